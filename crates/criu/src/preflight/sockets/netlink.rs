//! Rules about netlink sockets (CRIU: sk-netlink.c).

use std::os::fd::{AsFd, OwnedFd};

use tranship_sys::socket;

use super::super::Look;
use super::super::diag::NetlinkSocket;
use super::super::files::Descriptor;
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
