//! Multicast groups that programs have joined: CRIU does not carry these memberships.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use crate::NetworkError;
use crate::namespace;

/// The groups that programs in the namespace at `netns` have joined, each with the name of its interface: all but those that the
/// kernel joins by itself.
///
/// # Errors
/// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the system's refusal.
pub fn memberships(netns: &Path) -> Result<Vec<(String, IpAddr)>, NetworkError> {
    namespace::inside(netns, || {
        let read = |name: &str| match fs::read_to_string(Path::new("/proc/thread-self/net").join(name)) {
            // A kernel without IPv6 has no such file.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            other => other.map_err(|e| {
                NetworkError::refused(format!("read the multicast groups of network namespace {}", netns.display()), e)
            }),
        };
        let mut groups = v4(&read("igmp")?);
        groups.extend(v6(&read("igmp6")?));
        Ok(groups)
    })
}

/// Of `/proc/net/igmp`: a line for each interface, below it one for each of its groups.
fn v4(text: &str) -> Vec<(String, IpAddr)> {
    let mut interface = "";
    let mut groups = Vec::new();
    for line in text.lines().skip(1) {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if !line.starts_with(char::is_whitespace) {
            interface = words.next().unwrap_or_default();
        } else if let Ok(address) = u32::from_str_radix(first, 16) {
            // The kernel prints the address as the machine has the bytes in memory.
            let group = Ipv4Addr::from(address.to_ne_bytes());
            if group != Ipv4Addr::new(224, 0, 0, 1) {
                groups.push((interface.to_owned(), group.into()));
            }
        }
    }
    groups
}

/// Of `/proc/net/igmp6`: a line for each group, with the interface's index and name before it.
fn v6(text: &str) -> Vec<(String, IpAddr)> {
    let group = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (interface, digits) = (words.next()?, words.next()?);
        let group = Ipv6Addr::from(u128::from_str_radix(digits, 16).ok()?);
        (!is_the_kernels(group)).then(|| (interface.to_owned(), group.into()))
    };
    text.lines().filter_map(group).collect()
}

/// All nodes, all routers (where it forwards), and what its own addresses are asked for by (RFC 4291, section 2.7.1).
fn is_the_kernels(group: Ipv6Addr) -> bool {
    match group.segments() {
        [0xff01 | 0xff02, 0, 0, 0, 0, 0, 0, 1 | 2] | [0xff05, 0, 0, 0, 0, 0, 0, 2] => true,
        [0xff02, 0, 0, 0, 0, 1, last, _] => last >> 8 == 0xff,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_group_is_named_while_somebody_is_in_it() {
        let (v4, v6) = (Ipv4Addr::new(239, 77, 1, 2), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0x77, 0x1234));
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.join_multicast_v4(&v4, &Ipv4Addr::LOCALHOST).unwrap();
        let other = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
        other.join_multicast_v6(&v6, 1).unwrap();
        let here = || memberships(Path::new("/proc/thread-self/ns/net")).unwrap();
        let expected = [("lo".to_owned(), IpAddr::V4(v4)), ("lo".to_owned(), IpAddr::V6(v6))];
        assert!(expected.iter().all(|one| here().contains(one)), "{:?}", here());
        drop((socket, other));
        assert!(!expected.iter().any(|one| here().contains(one)), "{:?}", here());
    }

    #[test]
    fn what_the_kernel_joins_is_not_named() {
        for own in ["ff02::1", "ff01::1", "ff02::2", "ff02::1:ff00:1"] {
            assert!(is_the_kernels(own.parse().unwrap()), "{own}");
        }
        for joined in ["ff02::fb", "ff05::1:3", "ff02::1:2"] {
            assert!(!is_the_kernels(joined.parse().unwrap()), "{joined}");
        }
    }
}
