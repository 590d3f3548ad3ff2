//! Rules about netlink sockets (CRIU: sk-netlink.c).

use std::os::fd::{AsFd, OwnedFd};

use tranship_sys::socket;

use super::super::Look;
use super::super::container::Container;
use super::super::diag::NetlinkSocket;
use super::super::files::Descriptor;
use super::super::procfs;
use super::blocker;

const TRY_AGAIN: &str = "try again when the program has read them";

/// Of one that the kernel lists: it is bound, or listens to groups.
pub(super) fn listed(s: &NetlinkSocket, d: &Descriptor<'_>, inode: u64, look: &mut Look) {
    let grouped = s.groups.iter().any(|b| *b != 0);
    if has_more_than_32_groups(&s.groups) {
        let what = "is a netlink socket of a protocol whose multicast groups are more than CRIU carries";
        look.block(blocker(d, what, "run the program without that subscription"));
    } else if grouped && s.port == 0 {
        let what = "is a netlink socket that listens to multicast groups without being bound";
        look.block(blocker(d, what, "let the program bind it"));
    }
    if s.waiting > 0 {
        look.wait(inode, unread(d));
    }
}

/// Of those of netfilter: which packets the kernel hands to a program by its socket's port is nowhere in CRIU's images.
pub(super) fn packets(container: &Container, s: &NetlinkSocket, d: &Descriptor<'_>, look: &mut Look) {
    const NETFILTER: u8 = 12;
    if s.protocol != NETFILTER {
        return;
    }
    for (file, target) in [("nfnetlink_queue", "NFQUEUE"), ("nfnetlink_log", "NFLOG")] {
        let all = procfs::text(format!("/proc/{}/net/netfilter/{file}", container.init)).unwrap_or_default();
        if let Some(number) = number_of(&all, s.port) {
            let what = format!("receives packets of the firewall ({target} {number}), which CRIU does not carry");
            look.block(blocker(d, &what, "stop the program, and start it again after the move"));
        }
    }
}

/// The number of a queue or group whose packets go to a port: the first two columns of both files.
pub(in crate::preflight) fn number_of(all: &str, port: u32) -> Option<u32> {
    let line = |line: &str| {
        let mut words = line.split_ascii_whitespace().map_while(|word| word.parse::<u32>().ok());
        Some((words.next()?, words.next()?))
    };
    all.lines().filter_map(line).find(|(_, own)| *own == port).map(|(number, _)| number)
}

/// Of one that the kernel does not list: CRIU asks the socket itself for its protocol.
pub(super) fn unbound(d: &Descriptor<'_>, inode: u64, socket: &OwnedFd, look: &mut Look) {
    if socket::readiness(socket.as_fd()).is_ok_and(|socket| socket.readable) {
        look.wait(inode, unread(d));
    }
}

fn unread(d: &Descriptor<'_>) -> tranship_types::Blocker {
    blocker(d, "is a netlink socket with messages that the program does not read", TRY_AGAIN)
}

/// CRIU carries the first 32 groups, and refuses a socket whose set of groups takes more than 8 bytes even where the others are empty.
fn has_more_than_32_groups(groups: &[u8]) -> bool {
    groups.len() > 8 || groups.iter().skip(4).any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_in_the_lists_of_netfilter() {
        let queues =
            "    0   4711     0 2 65531     0     0        0  1\n    3   4712     0 1 0     0     0        0  1\n";
        assert_eq!((number_of(queues, 4712), number_of(queues, 3), number_of("", 0)), (Some(3), None, None));
    }
}
