use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::inject::LOOPBACK;
use crate::link;
use crate::namespace::inside;
use crate::nftables::{Batch, Nftables, Place};
use crate::reply::Refusal;

/// The name of the table that the gate is.
pub(crate) const TABLE: &str = "tranship";

/// The gate of a network namespace: closed, no frame leaves or enters by the given interfaces, of whatever protocol.
///
/// It is a table `tranship` of nftables' netdev family with one chain on the ingress and one on the egress hook of each
/// device, policy drop and no rules. The netdev hooks are the outermost that there are, right at the device: they also
/// see ARP, neighbour discovery and what packet sockets send, which the inet families' hooks do not. The state lives in
/// the namespace; dropping this value, or dying, changes nothing.
///
/// ```text
///   open ──close_to_newcomers──▶ closed to newcomers ──close──▶ closed ──open_but_to_packets──▶ closed to packets ──┬──▶ open
///                                chain `newcomers-…`            chains `ingress-…`,             chain `packets-…`   │     ▲
///                                                               `egress-…` as well      └─open_but_to_groups──▶ closed to groups
///                                                                                                              chain `groups-…`
/// ```
///
/// On its way to closed the gate only ever *adds* chains: a frame that another processor carries past the hooks meanwhile never
/// meets a chain that goes, and what one stage keeps out the next one cannot let in, whatever the order of the kernel's work.
///
/// Everything that costs time is done by [`Gate::prepare`]; [`close`](Gate::close) and [`open`](Gate::open) are one
/// netlink transaction each, which the kernel carries out before the call returns.
pub struct Gate {
    nftables: Nftables,
    netns: PathBuf,
    interfaces: Vec<String>,
}

impl Gate {
    /// Opens what is needed for the gate of `netns`, on `interfaces` in there. Changes nothing. The value holds a
    /// socket in the namespace, which keeps the namespace alive.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], an interface that is not there, the system's
    /// refusal.
    pub fn prepare(netns: &Path, interfaces: &[String]) -> Result<Self, NetworkError> {
        inside(netns, || Self::here(netns, interfaces))
    }

    /// The same for a thread that is inside already.
    pub(crate) fn here(netns: &Path, interfaces: &[String]) -> Result<Self, NetworkError> {
        let what = || format!("prepare the gate of network namespace {}", netns.display());
        // Kernels from 6.16 take the name of a device that is not there yet, others refuse: a wrong name must not make
        // a gate that guards nothing.
        let mut rtnl = open_rtnl(netns)?;
        for name in interfaces {
            if link::by_name(&mut rtnl, name).map_err(|e| NetworkError::refused(what(), e))?.is_none() {
                return Err(NetworkError::refused(what(), format!("it has no interface {name}")));
            }
        }
        let nftables = Nftables::open().map_err(|e| NetworkError::Refused {
            what: what(),
            why: e.to_string(),
            remedy: "a kernel with nf_tables is needed",
        })?;
        Ok(Self { nftables, netns: netns.to_owned(), interfaces: interfaces.to_vec() })
    }

    /// The gate for interfaces that are not there yet, for a thread that is inside already, to be closed by
    /// [`close_ahead`](Self::close_ahead).
    pub(crate) fn ahead(netns: &Path, interfaces: &[String]) -> Result<Self, NetworkError> {
        let nftables = Nftables::open().map_err(|e| {
            NetworkError::refused(format!("prepare the gate of network namespace {}", netns.display()), e)
        })?;
        Ok(Self { nftables, netns: netns.to_owned(), interfaces: interfaces.to_vec() })
    }

    /// Closes the gate; success if it was closed. When this returns, no frame passes any more but one that another
    /// processor was carrying past the hook at that very moment.
    ///
    /// # Errors
    /// The kernel's refusal: then nothing has changed.
    pub fn close(&mut self) -> Result<(), NetworkError> {
        let closed = self.add(close);
        closed.map_err(|e| self.refused("close the gate", &e))
    }

    /// The same for a container that stands still or is being made, in which no segment of TCP comes by the loopback interface any more
    /// either. While CRIU dumps, one end of a connection would acknowledge to the other, 40 ms late, what that one has in its queue; while
    /// CRIU restores, the end that is there already would be reset for want of the other. Whoever has a segment lost by this sends it again.
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub fn close_still(&mut self) -> Result<(), NetworkError> {
        let closed = self.try_close_still();
        closed.map_err(|e| self.refused("close the gate", &e))
    }

    fn try_close_still(&mut self) -> Result<(), Refusal> {
        let interfaces = &self.interfaces;
        self.nftables.transact(|batch| {
            batch.new_table(TABLE);
            interfaces.iter().for_each(|device| close(batch, device));
            batch.new_chain(TABLE, LOOPBACK, Place::Segments);
            batch.drop_segments(TABLE, LOOPBACK);
        })
    }

    /// Closes the gate of interfaces that are not there yet, so that it is closed when they come.
    ///
    /// Kernels before 6.16 take no chain for a device that is not there. On these IPv4, IPv6 and ARP are dropped at their own hooks, of all
    /// devices, until [`close_attached`](Self::close_attached): that is all that the kernel sends by itself, and all that it would answer. What
    /// passes is what a packet socket sends, and nobody lives in the namespace yet.
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub(crate) fn close_ahead(&mut self) -> Result<(), NetworkError> {
        match self.try_close_still() {
            Err(e) if e.errno == Errno::ENOENT => self.close_protocols(),
            closed => closed.map_err(|e| self.refused("close the gate", &e)),
        }
    }

    /// The part of [`close_ahead`](Self::close_ahead) for kernels before 6.16.
    pub(crate) fn close_protocols(&mut self) -> Result<(), NetworkError> {
        let closed = self.nftables.transact(|batch| batch.drop_protocols(TABLE));
        closed.map_err(|e| self.refused("close the gate", &e))
    }

    /// Closes the gate of interfaces that have come since it was [closed ahead](Self::close_ahead).
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub(crate) fn close_attached(&mut self) -> Result<(), NetworkError> {
        self.close_still()?;
        match self.nftables.transact(|batch| batch.pass_protocols(TABLE)) {
            // Without the families of protocols there is no such table.
            Err(e) if ![Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT].contains(&e.errno) => {
                Err(self.refused("open the gate to protocols", &e))
            }
            _ => Ok(()),
        }
    }

    /// Lets everything pass but what CRIU cannot carry once it has arrived: segments that ask for a new TCP connection, and
    /// datagrams. So programs can accept and read what is there before the gate is [closed](Self::close). Success if that is so
    /// already.
    ///
    /// # Errors
    /// The kernel's refusal: then nothing has changed.
    pub fn close_to_newcomers(&mut self) -> Result<(), NetworkError> {
        let closed = self.add(|batch, device| {
            batch.first_chain(TABLE, device, Place::Newcomers);
            batch.drop_new_connections(TABLE, device);
            batch.drop_datagrams(TABLE, device);
        });
        match closed {
            // A chain comes with its rules, in one transaction, so it has them.
            Err(e) if e.errno == Errno::EEXIST => Ok(()),
            closed => closed.map_err(|e| self.refused("keep new connections and datagrams waiting at the gate", &e)),
        }
    }

    /// Adds chains for each interface to what is there.
    fn add(&mut self, chains: impl Fn(&mut Batch, &str)) -> Result<(), Refusal> {
        let interfaces = &self.interfaces;
        self.nftables.transact(|batch| {
            batch.new_table(TABLE);
            interfaces.iter().for_each(|device| chains(batch, device));
        })
    }

    fn refused(&self, what: &str, e: &Refusal) -> NetworkError {
        NetworkError::Refused {
            what: format!("{what} of network namespace {} on {}", self.netns.display(), self.interfaces.join(", ")),
            remedy: match e.errno {
                Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPROTONOSUPPORT => {
                    "a kernel from 5.16 with nf_tables, NETFILTER_INGRESS and NETFILTER_EGRESS is needed"
                }
                _ => "",
            },
            why: e.to_string(),
        }
    }

    /// Opens the gate; success if it was open.
    ///
    /// # Errors
    /// The kernel's refusal: then nothing has changed.
    pub fn open(&mut self) -> Result<(), NetworkError> {
        match self.nftables.transact(|batch| batch.delete_table(TABLE)) {
            Err(e) if e.errno != Errno::ENOENT => {
                Err(NetworkError::refused(format!("open the gate of network namespace {}", self.netns.display()), e))
            }
            _ => Ok(()),
        }
    }

    /// Opens the gate to what leaves, to ARP and to neighbour discovery: not to packets of IP that come by themselves, as long as these have to be
    /// delivered in their order by [`Injector`](crate::Injector), whose frames pass. Success if that is so already.
    ///
    /// # Errors
    /// The kernel's refusal: then nothing has changed.
    pub fn open_but_to_packets(&mut self) -> Result<(), NetworkError> {
        let opened = self.open_but_to(Place::Packets, |batch, device| batch.drop_undelivered(TABLE, device));
        opened.map_err(|e| self.refused("open the gate but to packets", &e))
    }

    /// The same, but to datagrams to groups (and to all) that come by themselves.
    ///
    /// # Errors
    /// The kernel's refusal: then nothing has changed.
    pub fn open_but_to_groups(&mut self) -> Result<(), NetworkError> {
        let opened = self.open_but_to(Place::Groups, |batch, device| batch.drop_undelivered_to_groups(TABLE, device));
        opened.map_err(|e| self.refused("open the gate but to groups", &e))
    }

    fn open_but_to(&mut self, place: Place, rules: impl Fn(&mut Batch, &str)) -> Result<(), Refusal> {
        let interfaces = &self.interfaces;
        self.nftables.transact(|batch| {
            // One that is not there cannot be deleted.
            batch.new_table(TABLE);
            batch.delete_table(TABLE);
            batch.new_table(TABLE);
            for device in interfaces {
                batch.first_chain(TABLE, device, place);
                rules(batch, device);
            }
        })
    }

    /// Whether there is anything of a gate. Costs a listing: for diagnosis.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn is_there(&mut self) -> Result<bool, NetworkError> {
        let found = self.nftables.has_chains(TABLE);
        found.map_err(|e| {
            NetworkError::refused(format!("look at the gate of network namespace {}", self.netns.display()), e)
        })
    }

    /// Whether every one of the interfaces is closed in both directions. Costs a listing: for tests and diagnosis.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn is_closed(&mut self) -> Result<bool, NetworkError> {
        let chains = self.nftables.dropping_chains(TABLE).map_err(|e| {
            NetworkError::refused(format!("look at the gate of network namespace {}", self.netns.display()), e)
        })?;
        let shut = |place: Place, device: &str| chains.contains(&place.chain(device));
        Ok(!self.interfaces.is_empty()
            && self.interfaces.iter().all(|d| shut(Place::Ingress, d) && shut(Place::Egress, d)))
    }
}

fn close(batch: &mut Batch, device: &str) {
    batch.new_chain(TABLE, device, Place::Ingress);
    batch.new_chain(TABLE, device, Place::Egress);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use super::*;
    use crate::namespace;

    #[test]
    fn what_comes_into_a_namespace_closed_by_protocols_is_mute_until_its_gate_is_opened() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return;
        }
        let run = |program: &str, arguments: &str| {
            Command::new(program).args(arguments.split(' ')).output().unwrap().status.success()
        };
        let ip = |arguments: &str| assert!(run("ip", arguments), "ip {arguments}");
        let answers = |seconds: u8| run("busybox", &format!("ping -c 1 -W {seconds} 10.9.8.2"));
        let played = namespace::in_a_new_one(|| {
            let file = namespace::in_a_new_one(namespace::own)?;
            let inner = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
            let names = ["eth0".to_owned()];
            inside(&inner, || Gate::ahead(&inner, &names)?.close_protocols())?;
            ip(&format!("link add out0 type veth peer name eth0 netns {}", inner.display()));
            ip("address add 10.9.8.1/24 dev out0");
            ip("link set out0 up");
            inside(&inner, || {
                ip("address add 10.9.8.2/24 dev eth0");
                ip("link set eth0 up");
                Ok(())
            })?;
            assert!(!answers(1), "it answers before it has a gate");
            let mut gate = Gate::prepare(&inner, &names)?;
            gate.close_attached()?;
            assert!(gate.is_closed()?);
            assert!(!answers(1), "it answers behind its gate");
            gate.open()?;
            // A question that nobody answered is asked again only when there is another packet.
            assert!((0..20).any(|_| answers(1)), "it does not answer");
            Ok(())
        });
        played.unwrap();
    }
}
