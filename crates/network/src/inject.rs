use std::path::{Path, PathBuf};

use tranship_sys::packet::{OFFLOAD_HEADER, PacketSocket, TapDevice};
use tranship_types::{Attachment, NetworkIdentity};

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::hold::{HeldFrame, LONGEST};
use crate::link;
use crate::namespace::{self, inside};
use crate::redirect;

/// The one flag of the offload header that means something to a receiver that trusts nobody: this checksum is to be
/// computed. The other vouches for one that was verified.
const NEEDS_CHECKSUM: u8 = 1;

/// Delivers held frames to a container as if they arrived from the wire, on whichever node it runs on.
///
/// - A veth: sent out of its other end, the port of the node's bridge. That end leads nowhere but into the container.
/// - A macvlan: written to a tap device of ours on the node, from which everything is redirected (tc's mirred) to the
///   receiving side of the macvlan's parent. Nothing is sent there, so nothing can leak to the wire, whether the container
///   is there or not. The device vanishes with the injector and with its process.
///
/// Frames to all or to a group go to the container's MAC instead: the parent's other macvlans have had theirs, and they pass a gate
/// that is still closed to what comes to groups by itself.
///
/// The container's gate must be open, or [closed to groups alone](crate::Gate::open_but_to_groups).
pub struct Injector {
    netns: PathBuf,
    lines: Vec<Line>,
    buffer: Vec<u8>,
}

struct Line {
    name: String,
    mac: [u8; 6],
    outlet: Outlet,
}

enum Outlet {
    Veth(PacketSocket),
    Macvlan(TapDevice),
}

impl Injector {
    /// Prepares the ways into `netns`, from the calling thread's namespace, the node's. Changes nothing about the
    /// container.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], an interface of the identity that is not there or hangs on
    /// something else; for macvlans also a kernel without tun, u32 or mirred. The container can be moved without: peers
    /// then wait for their retransmission timeouts.
    pub fn prepare(netns: &Path, identity: &NetworkIdentity) -> Result<Self, NetworkError> {
        let node = namespace::own()?;
        let below = inside(netns, || {
            let mut rtnl = open_rtnl(netns)?;
            let failed = |e| NetworkError::refused(format!("look into network namespace {}", netns.display()), e);
            let node = link::namespace_id(&mut rtnl, &node).map_err(failed)?;
            let mut below = Vec::new();
            for interface in &identity.interfaces {
                let link = link::by_name(&mut rtnl, &interface.name).map_err(failed)?;
                below.push(link.and_then(|l| l.below.filter(|_| l.below_nsid.is_some() && l.below_nsid == node)));
            }
            Ok(below)
        })?;
        let mut lines = Vec::new();
        for (interface, below) in identity.interfaces.iter().zip(below) {
            let what =
                || format!("prepare to deliver packets to {} of network namespace {}", interface.name, netns.display());
            let below = below
                .ok_or_else(|| NetworkError::refused(what(), "there is no such interface that hangs on this node"))?;
            let refused = |e: std::io::Error| NetworkError::refused(what(), e);
            let outlet = match interface.attachment {
                Attachment::Bridge { .. } => {
                    let socket = PacketSocket::open().map_err(refused)?;
                    socket.listen(below, 0).map_err(refused)?;
                    Outlet::Veth(socket)
                }
                Attachment::Macvlan { .. } => {
                    let device = TapDevice::make("tranship%d").map_err(refused)?;
                    redirect::to_reception(&mut open_rtnl(netns)?, device.name(), below).map_err(|e| {
                        NetworkError::Refused {
                            what: what(),
                            why: e.to_string(),
                            remedy: "a kernel with CLS_U32 and NET_ACT_MIRRED is needed",
                        }
                    })?;
                    Outlet::Macvlan(device)
                }
            };
            lines.push(Line { name: interface.name.clone(), mac: interface.mac, outlet });
        }
        Ok(Self { netns: netns.to_owned(), lines, buffer: Vec::with_capacity(LONGEST) })
    }

    /// Delivers the frames in their order; returns how many. Frames for no interface of the container, and what is no
    /// frame, are left out. Some 5 µs a frame.
    ///
    /// # Errors
    /// The first refusal of the system; the rest was tried all the same.
    pub fn inject(&mut self, frames: &[HeldFrame]) -> Result<usize, NetworkError> {
        let (mut delivered, mut failure) = (0, None);
        for frame in frames {
            let Some(line) = self.lines.iter().find(|l| l.name == frame.interface) else { continue };
            if !(OFFLOAD_HEADER + 14..=LONGEST).contains(&frame.bytes.len()) {
                continue;
            }
            self.buffer.clear();
            self.buffer.extend_from_slice(&frame.bytes);
            self.buffer[0] &= NEEDS_CHECKSUM;
            let to = &mut self.buffer[OFFLOAD_HEADER..OFFLOAD_HEADER + 6];
            let to_many = to[0] & 1 == 1;
            if to != line.mac && !to_many {
                continue;
            }
            to.copy_from_slice(&line.mac);
            let sent = match &line.outlet {
                Outlet::Veth(socket) => socket.send(&self.buffer),
                Outlet::Macvlan(device) => device.inject(&self.buffer),
            };
            match sent {
                Ok(()) => delivered += 1,
                Err(e) => {
                    let what =
                        format!("deliver a held packet to {} of network namespace {}", line.name, self.netns.display());
                    failure.get_or_insert(NetworkError::refused(what, e));
                }
            }
        }
        failure.map_or(Ok(delivered), Err)
    }
}
