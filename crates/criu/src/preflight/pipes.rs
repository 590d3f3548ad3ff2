//! Pipes of which another process has an end that no process of the container has: CRIU makes a new pipe with one end,
//! without complaint.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, sockopt};
use tranship_sys::process::take_descriptor;

use super::procfs::{self, Status};

/// A process, and a descriptor there.
pub type Place = (u32, i32);

/// What the processes of a container have of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// Whether one of them has the reading end.
    pub reads: bool,
    /// Whether one of them has the writing end.
    pub writes: bool,
    /// A descriptor that refers to it.
    pub place: Place,
}

/// All pipes of a container, by their links in `/proc/PID/fd`.
#[derive(Debug, Default)]
pub struct Pipes(BTreeMap<String, Ends>);

/// A pipe that leads out of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeadsOut {
    /// Its link in `/proc/PID/fd`.
    pub link: String,
    /// What the container has of it.
    pub ends: Ends,
    /// A process that has its other end, if this process sees any.
    pub holder: Option<u32>,
}

/// Which ends of a pipe a descriptor refers to (reading, writing), given the mode of its link in `/proc/PID/fd`
/// (proc(5)).
pub fn ends_of(mode: u32) -> (bool, bool) {
    (mode & 0o400 != 0, mode & 0o200 != 0)
}

impl Pipes {
    /// Adds a descriptor of one of the container's processes.
    pub fn add(&mut self, link: &str, place: Place, (reads, writes): (bool, bool)) {
        // A mere reference (O_PATH) is no end.
        if !reads && !writes {
            return;
        }
        match self.0.get_mut(link) {
            Some(ends) => (ends.reads, ends.writes) = (ends.reads | reads, ends.writes | writes),
            None => {
                self.0.insert(link.to_owned(), Ends { reads, writes, place });
            }
        }
    }

    /// What there is of one of them.
    pub fn ends(&self, link: &str) -> Option<Ends> {
        self.0.get(link).copied()
    }

    /// All of which the container has one end.
    pub fn halves(&self) -> impl Iterator<Item = (&str, Ends)> {
        self.0.iter().map(|(link, ends)| (link.as_str(), *ends)).filter(|(_, ends)| ends.reads != ends.writes)
    }

    /// Those whose other end is open in no process of the container, but for those that `is_carried` names. `is_inside`
    /// tells the container's processes, `is_dumper` those that look at them. Where no process is seen that has it, the
    /// end may be on its way through one of the container's `sockets`.
    ///
    /// Asks the kernel of each pipe of which the container has one end. Only if the other one is open it looks at all
    /// processes of the node, and at whether something waits in the sockets, which is not read.
    pub fn lead_out(
        &self,
        is_carried: impl Fn(&str) -> bool,
        (is_inside, is_dumper): (impl Fn(u32) -> bool, impl Fn(u32) -> bool),
        sockets: impl FnOnce() -> Vec<Place>,
    ) -> Vec<LeadsOut> {
        let halves = self.halves().filter(|(link, ends)| !is_carried(link) && has_other_end(*ends));
        let open: BTreeMap<&str, Ends> = halves.collect();
        if open.is_empty() {
            return Vec::new();
        }
        let (own, mut holders) = (std::process::id(), HashMap::<&str, u32>::new());
        let pids = procfs::numbers("/proc").unwrap_or_default();
        for pid in pids.into_iter().filter(|pid| *pid != own && !is_inside(*pid)) {
            for (link, mode) in links(pid) {
                let is_other = |ends: &Ends| mode & 0o600 != 0 && ends_of(mode) != (ends.reads, ends.writes);
                if let Some((link, _)) = open.get_key_value(link.as_str()).filter(|(_, ends)| is_other(ends)) {
                    holders.entry(link).or_insert(pid);
                }
            }
        }
        holders.retain(|_, pid| !is_dumper(*pid));
        let are_all_seen = open.keys().all(|link| holders.contains_key(link));
        let may_be_sent = !are_all_seen && sockets().into_iter().any(has_something_to_receive);
        let lead_out = |(link, ends): (&&str, &Ends)| {
            let holder = holders.get(link).copied();
            let leads_out = holder.is_some() || !may_be_sent;
            leads_out.then(|| LeadsOut { link: (*link).to_owned(), ends: *ends, holder })
        };
        open.iter().filter_map(lead_out).collect()
    }
}

/// Whether anybody has the end of a pipe that the container lacks: also processes that this one does not see.
fn has_other_end(ends: Ends) -> bool {
    take_descriptor(ends.place.0, ends.place.1).is_ok_and(|pipe| is_other_end_open(&pipe, ends.reads))
}

/// The same of a pipe, given whether this is its reading end.
pub fn is_other_end_open(pipe: &OwnedFd, reads: bool) -> bool {
    let mut asked = [PollFd::new(pipe.as_fd(), PollFlags::empty())];
    let gone = if reads { PollFlags::POLLHUP } else { PollFlags::POLLERR };
    poll(&mut asked, PollTimeout::ZERO).is_ok() && !asked[0].revents().is_some_and(|events| events.contains(gone))
}

/// Whether something waits in a Unix socket.
fn has_something_to_receive((pid, descriptor): Place) -> bool {
    let Ok(socket) = take_descriptor(pid, descriptor) else { return false };
    let is_unix = sockopt::socket_domain(&socket).is_ok_and(|family| family == AddressFamily::UNIX);
    is_unix && ioctl_fionread(&socket).is_ok_and(|bytes| bytes > 0)
}

/// The process that traces another one.
pub fn tracer(pid: u32) -> Option<u32> {
    Status::read(pid, None).ok().map(|status| status.tracer).filter(|tracer| *tracer != 0)
}

/// What a process has open: links and their modes.
fn links(pid: u32) -> impl Iterator<Item = (String, u32)> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| link(&entry.path()))
}

fn link(path: &Path) -> Option<(String, u32)> {
    let link = procfs::link(path).ok()?;
    Some((link, std::fs::symlink_metadata(path).ok()?.mode()))
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::{AsRawFd, RawFd};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use nix::fcntl::OFlag;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use nix::unistd::pipe2;

    use super::*;

    fn place(descriptor: RawFd) -> Place {
        (std::process::id(), descriptor)
    }

    fn link_of(descriptor: &OwnedFd) -> (String, u32) {
        link(Path::new(&format!("/proc/self/fd/{}", descriptor.as_raw_fd()))).unwrap()
    }

    fn of(descriptors: &[&OwnedFd]) -> Pipes {
        let mut pipes = Pipes::default();
        for descriptor in descriptors {
            let (link, mode) = link_of(descriptor);
            pipes.add(&link, place(descriptor.as_raw_fd()), ends_of(mode));
        }
        pipes
    }

    fn lead_out(pipes: &Pipes, sockets: &[Place]) -> Vec<LeadsOut> {
        pipes.lead_out(|_| false, (|_| false, |_| false), || sockets.to_vec())
    }

    #[test]
    fn a_pipe_leads_out_where_its_other_end_is_in_no_process_and_on_no_way() {
        let (read, write) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let (link, mode) = link_of(&read);
        assert_eq!((ends_of(mode), ends_of(link_of(&write).1)), ((true, false), (false, true)));
        assert_eq!(lead_out(&of(&[&read, &write]), &[]), []);

        let (one, other) = UnixStream::pair().unwrap();
        let descriptors = [read.as_raw_fd()];
        let message = [ControlMessage::ScmRights(&descriptors)];
        sendmsg::<()>(one.as_raw_fd(), &[IoSlice::new(b"x")], &message, MsgFlags::empty(), None).unwrap();
        let mut cat = Command::new("cat").stdin(Stdio::from(read)).stdout(Stdio::null()).spawn().unwrap();
        let sockets = [place(one.as_raw_fd()), place(other.as_raw_fd())];
        let half = of(&[&write]);
        let dumps = |pid| pid == cat.id();
        assert_eq!(half.lead_out(|_| false, (|_| false, dumps), || sockets.to_vec()), []);
        let ends = Ends { reads: false, writes: true, place: place(write.as_raw_fd()) };
        let expected = [LeadsOut { link: link.clone(), ends, holder: Some(cat.id()) }];
        assert_eq!(lead_out(&half, &sockets), expected);
        assert_eq!(half.lead_out(|carried| carried == link, (|_| false, |_| false), Vec::new), []);
        cat.kill().unwrap();
        cat.wait().unwrap();
        // It waits to be received, and another process that sees it there would not count.
        assert_eq!(lead_out(&half, &sockets), []);
        // Nobody is seen who has it.
        assert_eq!(lead_out(&half, &sockets[..1]), [LeadsOut { holder: None, ..expected[0].clone() }]);
        drop((one, other));
        // Nobody has it any more.
        assert_eq!(lead_out(&half, &[]), []);
    }
}
