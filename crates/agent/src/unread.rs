//! What waits unread in a container and what CRIU drops: events of inotify and fanotify (fsnotify.c, `dump_one_inotify`, `dump_one_fanotify`), and
//! packets in sockets whose queues neither CRIU nor the move carries.

use std::collections::{HashMap, HashSet};

use tranship_engine::Container;
use tranship_sys::process::{self, take_descriptor, text};
use tranship_sys::watch_queue::QueueKind;
use tranship_types::{Allowances, Blocker, BlockerKind};

/// Kinds that `--allow` names.
const EVENTS: &str = "inotify-events";
const PACKETS: &str = "unread-packets";

/// Whether a link in `/proc/PID/fd` stands for an inotify or fanotify descriptor.
pub fn is_queue(target: &str) -> bool {
    QueueKind::of(target).is_some()
}

/// The inode of a socket, given its link in `/proc/PID/fd`.
fn socket_inode(target: &str) -> Option<u64> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A list of sockets in `/proc/PID/net`.
#[derive(Debug)]
struct List {
    name: &'static str,
    /// The fields, counted from 0, of the bytes that wait unread and of the inode.
    unread_at: usize,
    inode_at: usize,
}

/// Those of raw sockets show the bytes to send in the same field (`00000000:000002F0`), in hexadecimal.
const LISTS: [List; 5] = [
    List { name: "packet", unread_at: 6, inode_at: 8 },
    List { name: "raw", unread_at: 4, inode_at: 9 },
    List { name: "raw6", unread_at: 4, inode_at: 9 },
    List { name: "udplite", unread_at: 4, inode_at: 9 },
    List { name: "udplite6", unread_at: 4, inode_at: 9 },
];

impl List {
    /// Inodes of its sockets, and whether there is something to read.
    fn sockets(&self, list: &str) -> Vec<(u64, bool)> {
        let socket = |line: &str| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let unread = fields.get(self.unread_at)?.rsplit(':').next()?;
            Some((fields.get(self.inode_at)?.parse().ok()?, unread.bytes().any(|digit| digit != b'0')))
        };
        list.lines().skip(1).filter_map(socket).collect()
    }

    fn of(&self, init: u32) -> Vec<(u64, bool)> {
        self.sockets(&text(format!("/proc/{init}/net/{}", self.name)).unwrap_or_default())
    }
}

/// Descriptors with queues of a container, or of several, as they are at one moment: processes and numbers.
#[derive(Debug, Default)]
pub struct Queues {
    /// Of inotify and fanotify.
    events: Vec<(u32, i32)>,
    /// Packet, raw and UDP-Lite sockets, by their inodes.
    sockets: HashMap<u64, (u32, i32)>,
    /// The lists that have them, by first processes of containers: reading one takes a tenth of a millisecond, also in the freeze.
    lists: Vec<(u32, &'static List)>,
}

impl Queues {
    /// Those of all processes of these containers, but for those that may lose what is in them. Takes a microsecond for each descriptor.
    pub fn of<'a>(containers: impl IntoIterator<Item = &'a Container>, allowed: &Allowances) -> Self {
        let mut found = Self::default();
        for container in containers {
            let lists = if allowed.permits(PACKETS) { &[] } else { LISTS.as_slice() };
            let lists: Vec<(&List, Vec<u64>)> = lists
                .iter()
                .map(|list| (list, list.of(container.init).into_iter().map(|(inode, _)| inode).collect()))
                .collect();
            let listed: HashSet<u64> = lists.iter().flat_map(|(_, inodes)| inodes).copied().collect();
            for pid in container.processes().unwrap_or_default() {
                found.look_at(pid, &listed, !allowed.permits(EVENTS));
            }
            // The agent has packet sockets in the namespace, too.
            let has_own = |inodes: &[u64]| inodes.iter().any(|inode| found.sockets.contains_key(inode));
            let with_own: Vec<_> = lists.iter().filter(|(_, inodes)| has_own(inodes)).map(|(list, _)| *list).collect();
            found.lists.extend(with_own.into_iter().map(|list| (container.init, list)));
        }
        found
    }

    fn look_at(&mut self, pid: u32, listed: &HashSet<u64>, with_events: bool) {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(link) = entry.path().read_link() else { continue };
            let Some(descriptor) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let link = link.to_str().unwrap_or_default();
            if with_events && is_queue(link) {
                self.events.push((pid, descriptor));
            }
            if let Some(inode) = socket_inode(link).filter(|inode| listed.contains(inode)) {
                self.sockets.insert(inode, (pid, descriptor));
            }
        }
    }

    /// One more of inotify or fanotify, of this process.
    pub fn add(&mut self, pid: u32, descriptor: i32) {
        self.events.push((pid, descriptor));
    }

    /// The first with something that waits unread; nothing is taken from it.
    pub fn unread(&self) -> Option<Blocker> {
        self.unread_events().or_else(|| self.unread_packets())
    }

    fn unread_events(&self) -> Option<Blocker> {
        let waits = |(pid, fd): &&(u32, i32)| {
            let taken = take_descriptor(*pid, *fd);
            taken.is_ok_and(|taken| rustix::io::ioctl_fionread(&taken).is_ok_and(|bytes| bytes > 0))
        };
        let queue = self.events.iter().find(waits)?;
        Some(lost(*queue, BlockerKind::Descriptor, "inotify or fanotify events", EVENTS))
    }

    /// A program that watches all packets is shown those that come to the closed gate, too; it has them once more on the destination.
    fn unread_packets(&self) -> Option<Blocker> {
        let listed = self.lists.iter().flat_map(|(init, list)| list.of(*init));
        let socket = listed.filter(|(_, is_unread)| *is_unread).find_map(|(inode, _)| self.sockets.get(&inode))?;
        Some(lost(*socket, BlockerKind::Socket, "packets", PACKETS))
    }
}

fn lost((pid, descriptor): (u32, i32), kind: BlockerKind, what: &str, allowable: &'static str) -> Blocker {
    let name = process::name(pid).unwrap_or_default();
    let cause =
        format!("descriptor {descriptor} of process {pid} ({name}) has {what} that wait unread, which would be lost");
    let blocker = Blocker::new(kind, cause, "try again when the program has read them").passing();
    blocker.at(pid, Some(descriptor)).allowable(allowable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_tell_what_waits_unread() {
        let packets = "sk RefCnt Type Proto Iface R Rmem User Inode\n\
                       0000 3 3 0003 2 1 0 0 4711\n0000 3 3 0003 2 1 2304 0 4712\n";
        let raw = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref\n\
                   89: 00000000:0059 00000000:0000 07 00000300:00000000 00:00000000 00000000     0        0 8 2 0 0\n\
                   89: 00000000:0059 00000000:0000 07 00000000:00000300 00:00000000 00000000     0        0 9 2 0 0\n";
        assert_eq!(LISTS[0].sockets(packets), [(4711, false), (4712, true)]);
        assert_eq!(LISTS[1].sockets(raw), [(8, false), (9, true)]);
        assert_eq!(LISTS[1].sockets(""), []);
    }
}
