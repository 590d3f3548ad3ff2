//! Parsers of the preflight for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use std::collections::BTreeSet;

use super::procfs::{FdInfo, Mapping, Mount, Status, bracketed, is_32_bit};
use super::sockets::netlink;
use super::terminals::Controlling;
use super::{diag, scheduling, timers, watches, zombies};
use crate::irmap::Watch;

/// `/proc/PID/status`.
pub fn status(text: &str) {
    if let Some(status) = Status::parse(text) {
        assert_ne!(status.state, '?');
        assert!(status.ids.len() <= text.len());
    }
}

/// `/proc/PID/fdinfo/FD` of each kind of descriptor.
pub fn fdinfo(text: &str) {
    let info = FdInfo::parse(text);
    assert_eq!(info.text, text);
    for key in ["Pid", "tty-index", "eventfd-count", "scm_fds"] {
        let _ = info.number(key);
    }
    assert!(info.epoll_targets().len() <= text.lines().count());
    for watch in Watch::all(text) {
        let _ = (watch.device(), watch.in_layer());
    }
    let _ = watches::has_lease_in_the_way(text);
    let _ = crate::timers::running(text);
}

/// `/proc/PID/mountinfo`.
pub fn mountinfo(text: &str) {
    for mount in Mount::parse_all(text) {
        assert!(mount.point.len() <= 3 * text.len() && mount.root.len() <= 3 * text.len(), "{mount:?}");
    }
}

/// The lists of zombies, which a peer has sent.
pub fn zombies(text: &str) {
    if let Ok(listed) = zombies::parse(text) {
        assert!(listed.values().map(BTreeSet::len).sum::<usize>() == text.lines().count());
    }
    let _ = zombies::parse_ends(text);
}

/// `/proc/PID/maps`, as the preflight reads it.
pub fn maps(text: &str) {
    for mapping in text.lines().filter_map(Mapping::parse) {
        assert!(!mapping.name.is_empty() && text.contains(&mapping.name), "{mapping:?}");
    }
}

/// Files of /proc with a line or two that matter: `stat`, `timers`, `numa_maps`, `net/netfilter/*`, links, `auxv`.
pub fn proc_others(data: &[u8], text: &str) {
    let _ = Controlling::parse(text);
    assert!(timers::notified(text).count() <= text.lines().count());
    assert!(scheduling::first_policy(text).is_none_or(|policy| text.contains(policy)));
    let _ = netlink::number_of(text, 1);
    let _ = ["socket", "pipe", "net"].map(|kind| bracketed(text, kind));
    let _ = is_32_bit(data);
}

/// Answers of sock_diag(7).
pub fn sock_diag(data: &[u8]) {
    let mut bytes = 0;
    let _ = diag::each_message(data, &mut |message| {
        bytes += message.len();
        if let Some((_, socket)) = diag::unix_socket(message) {
            assert!(socket.name.len() <= 3 * message.len() && socket.waiting.len() <= message.len(), "{socket:?}");
        }
        if let Some((_, socket)) = diag::tcp_socket(message) {
            assert!(socket.ulp.len() <= 3 * message.len(), "{socket:?}");
        }
        if let Some((_, socket)) = diag::netlink_socket(message) {
            assert!(socket.groups.len() <= message.len(), "{socket:?}");
        }
        if let Some(connection) = diag::closed_connection(message) {
            assert!(connection.left > 0);
        }
    });
    assert!(bytes <= data.len());
}
