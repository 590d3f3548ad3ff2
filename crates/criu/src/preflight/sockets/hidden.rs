//! Rules about what sockets have that no system call shows. CRIU drops it without a word.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketType, sockopt};

use super::super::Look;
use super::super::diag::{CLOSE, Sockets};
use super::super::files::Descriptor;
use super::super::hidden_files::Known;
use super::blocker;

pub(super) fn check(
    files: &mut Known,
    known: &Sockets,
    d: &Descriptor<'_>,
    inode: u64,
    socket: &OwnedFd,
    look: &mut Look,
) {
    const TCP: u32 = 6;
    let (Ok(family), Ok(kind)) = (sockopt::socket_domain(socket), sockopt::socket_type(socket)) else { return };
    if !matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return;
    }
    let hidden = files.of(d, look);
    if hidden.has_reuseport_program {
        let what = "is in a group whose program shares out what comes (SO_ATTACH_REUSEPORT_EBPF, _CBPF), which CRIU does not carry";
        let remedy = "run the program without it";
        look.block(blocker(d, what, remedy).allowable("reuseport-programs"));
    }
    let protocol = sockopt::socket_protocol(socket).ok().flatten().map_or(0, |p| p.as_raw().get());
    // Of others the kernel lists keys for MD5 signatures (inet.rs).
    let is_listed = known.tcp.get(&inode).is_some_and(|socket| socket.md5 && socket.state != CLOSE);
    if hidden.has_keys && kind == SocketType::STREAM && protocol == TCP && !is_listed {
        let what = "has keys to sign segments of TCP with (TCP_MD5SIG, TCP_AO_ADD_KEY), which CRIU does not carry";
        look.block(blocker(d, what, "run the connection without signatures"));
    }
    if hidden.has_flow_labels && family == AddressFamily::INET6 {
        let what = "has leased IPv6 flow labels (IPV6_FLOWLABEL_MGR), which CRIU does not carry";
        look.block(blocker(d, what, "let the program release them").allowable("flow-labels"));
    }
}
