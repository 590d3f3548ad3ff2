//! Multicast groups that programs have joined.
//!
//! The kernel tells which groups have been joined in a namespace, and of a socket and a group whether it is in it, with the sources
//! that it wants or does not want to hear (RFC 3678).

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use nix::libc;
use serde::{Deserialize, Serialize};
use tranship_sys::socket;

use crate::NetworkError;

// linux/in.h
const JOIN_GROUP: i32 = 42;
const BLOCK_SOURCE: i32 = 43;
const JOIN_SOURCE_GROUP: i32 = 46;
const FILTER: i32 = 48;
const EXCLUDE: u32 = 0;
/// Bytes of a `struct sockaddr_storage`, and of a `struct group_filter` before its sources.
const ADDRESS: usize = 128;
const FILTER_HEAD: usize = 8 + ADDRESS + 8;
/// Sources of one membership at most: more than the kernel allows unless it is told otherwise (`igmp_max_msf`, `mld_max_msf`).
const SOURCES: usize = 128;

/// A socket's membership in a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    interface: String,
    group: IpAddr,
    /// Whether it hears all sources but these, or these only.
    but: bool,
    sources: Vec<IpAddr>,
}

impl Membership {
    /// One that hears one source only.
    #[cfg(test)]
    pub(crate) fn only(interface: &str, group: IpAddr, source: IpAddr) -> Self {
        Self { interface: interface.to_owned(), group, but: false, sources: vec![source] }
    }

    /// The interface on which it was joined.
    pub(crate) fn interface(&self) -> &str {
        &self.interface
    }

    /// Whether it is one in this group on this interface.
    pub(crate) fn is_in(&self, interface: &str, group: IpAddr) -> bool {
        self.interface == interface && self.group == group
    }
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the multicast group {} on {}", self.group, self.interface)
    }
}

fn level(group: IpAddr) -> i32 {
    if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 }
}

/// As a `struct sockaddr_storage`.
fn encode(address: IpAddr) -> [u8; ADDRESS] {
    let mut bytes = [0; ADDRESS];
    match address {
        IpAddr::V4(v4) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes[4..8].copy_from_slice(&v4.octets());
        }
        IpAddr::V6(v6) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.octets());
        }
    }
    bytes
}

pub(crate) fn decode(bytes: &[u8]) -> Option<IpAddr> {
    match i32::from(u16::from_ne_bytes(*bytes.first_chunk()?)) {
        libc::AF_INET => Some(Ipv4Addr::from(*bytes.get(4..)?.first_chunk::<4>()?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(*bytes.get(8..)?.first_chunk::<16>()?).into()),
        _ => None,
    }
}

/// A `struct group_req`, or with a source a `struct group_source_req`.
fn request(index: u32, group: IpAddr, source: Option<IpAddr>) -> Vec<u8> {
    let mut bytes = [index.to_ne_bytes(), [0; 4]].concat();
    bytes.extend(encode(group));
    bytes.extend(source.into_iter().flat_map(encode));
    bytes
}

/// In which of these groups, each with the name of its interface, a socket is.
pub(crate) fn memberships(
    socket: BorrowedFd<'_>,
    joined: &[(String, IpAddr)],
    interfaces: &HashMap<u32, String>,
) -> Vec<Membership> {
    let of = |(interface, group): &(String, IpAddr)| {
        let (index, _) = interfaces.iter().find(|(_, name)| *name == interface)?;
        let mut filter = request(*index, *group, None);
        filter.extend([0; 4]);
        filter.extend((SOURCES as u32).to_ne_bytes());
        filter.resize(FILTER_HEAD + SOURCES * ADDRESS, 0);
        // It is not in it, or of another family.
        socket::option(socket, level(*group), FILTER, &mut filter).ok()?;
        let number = |at: usize| filter[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        let (mode, count) = (number(8 + ADDRESS), number(8 + ADDRESS + 4) as usize);
        let sources = filter[FILTER_HEAD..].chunks_exact(ADDRESS).take(count).filter_map(decode).collect();
        Some(Membership { interface: interface.clone(), group: *group, but: mode == EXCLUDE, sources })
    };
    joined.iter().filter_map(of).collect()
}

/// Makes a socket a member, on the interface of this index.
pub(crate) fn join(socket: BorrowedFd<'_>, membership: &Membership, index: u32) -> io::Result<()> {
    let Membership { group, but, sources, .. } = membership;
    let ask = |name, source| socket::set_option(socket, level(*group), name, &request(index, *group, source));
    if *but {
        ask(JOIN_GROUP, None)?;
    }
    let each = if *but { BLOCK_SOURCE } else { JOIN_SOURCE_GROUP };
    sources.iter().try_for_each(|source| ask(each, Some(*source)))
}

/// The groups that have been joined in this thread's namespace, which is that at `netns`, each with the name of its interface: all
/// but those that the kernel joins by itself.
pub(crate) fn joined_here(netns: &Path) -> Result<Vec<(String, IpAddr)>, NetworkError> {
    let mut joined = Joined::here(netns)?.read()?;
    joined.retain(|one| !is_the_kernels(one.group));
    Ok(joined.into_iter().map(|one| (one.interface, one.group)).collect())
}

/// A group that has been joined on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub interface: String,
    pub index: u32,
    pub group: IpAddr,
    /// How many sockets have joined it, or how many of the kernel's own needs.
    users: u32,
    /// Sources that some of them want to hear alone.
    wanted: Vec<IpAddr>,
    /// Whether there are sources that some of them do not want to hear.
    unwanted: bool,
}

impl Group {
    /// The sources that it is heard from, where it is certain that it is from these alone.
    pub(crate) fn sources(&self) -> Option<&[IpAddr]> {
        let alone = self.users == 1 && !self.unwanted && !self.wanted.is_empty();
        alone.then_some(&self.wanted)
    }
}

/// Tells which groups have been joined in a namespace, as often as it is asked and without entering it again. Holds files in the
/// namespace, which keep it alive.
pub(crate) struct Joined {
    netns: PathBuf,
    /// Of each family: the groups, and the sources.
    files: Vec<[File; 2]>,
}

impl Joined {
    /// For this thread's namespace, which is that at `netns`.
    pub(crate) fn here(netns: &Path) -> Result<Self, NetworkError> {
        let open = |names: [&str; 2]| -> io::Result<Option<[File; 2]>> {
            let [groups, sources] = names.map(|name| File::open(Path::new("/proc/thread-self/net").join(name)));
            match (groups, sources) {
                // A kernel without IPv6 has no such files.
                (Err(e), _) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                (groups, sources) => Ok(Some([groups?, sources?])),
            }
        };
        let files = [["igmp", "mcfilter"], ["igmp6", "mcfilter6"]].map(open).into_iter().filter_map(Result::transpose);
        let files = files.collect::<io::Result<_>>().map_err(|e| unreadable(netns, e))?;
        Ok(Self { netns: netns.to_owned(), files })
    }

    /// All groups that are joined now, those that the kernel joins by itself included.
    pub(crate) fn read(&mut self) -> Result<Vec<Group>, NetworkError> {
        let text = |file: &mut File| {
            let mut text = String::new();
            file.rewind().and_then(|()| file.read_to_string(&mut text)).map(|_| text)
        };
        let mut all = Vec::new();
        for (files, read) in self.files.iter_mut().zip([v4, v6]) {
            let [groups, sources] = files.each_mut().map(text);
            let mut groups = read(&groups.map_err(|e| unreadable(&self.netns, e))?);
            add_sources(&mut groups, &sources.map_err(|e| unreadable(&self.netns, e))?);
            all.append(&mut groups);
        }
        Ok(all)
    }

    /// Whether any program has joined a group.
    pub(crate) fn any(&mut self) -> Result<bool, NetworkError> {
        Ok(self.read()?.iter().any(|one| !is_the_kernels(one.group)))
    }
}

fn unreadable(netns: &Path, e: io::Error) -> NetworkError {
    NetworkError::refused(format!("read the multicast groups of network namespace {}", netns.display()), e)
}

/// Of `/proc/net/igmp`: a line for each interface, below it one for each of its groups.
pub(crate) fn v4(text: &str) -> Vec<Group> {
    let (mut index, mut interface) = (0, "");
    let mut groups = Vec::new();
    for line in text.lines().skip(1) {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if !line.starts_with(char::is_whitespace) {
            let name = words.next().unwrap_or_default().trim_end_matches(':');
            (index, interface) = (first.parse().unwrap_or(0), name);
        } else if let Ok(address) = u32::from_str_radix(first, 16) {
            // The kernel prints the address as the machine has the bytes in memory.
            let group = Ipv4Addr::from(address.to_ne_bytes());
            groups.push(new_group(interface, index, group.into(), words.next()));
        }
    }
    groups
}

/// Of `/proc/net/igmp6`: a line for each group, with the interface's index and name before it.
pub(crate) fn v6(text: &str) -> Vec<Group> {
    let group = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (index, interface, digits) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        let group = Ipv6Addr::from(u128::from_str_radix(digits, 16).ok()?);
        Some(new_group(interface, index, group.into(), words.next()))
    };
    text.lines().filter_map(group).collect()
}

fn new_group(interface: &str, index: u32, group: IpAddr, users: Option<&str>) -> Group {
    let users = users.and_then(|users| users.parse().ok()).unwrap_or(0);
    Group { interface: interface.to_owned(), index, group, users, wanted: Vec::new(), unwanted: false }
}

/// Of `/proc/net/mcfilter` and `mcfilter6`: a line for each source, with the interface's index, its name, and the group before it, and behind
/// it how many want to hear it alone, and how many do not want to hear it.
pub(crate) fn add_sources(groups: &mut [Group], text: &str) {
    let address = |word: &str| match word.strip_prefix("0x") {
        Some(digits) => Some(IpAddr::from(Ipv4Addr::from(u32::from_str_radix(digits, 16).ok()?))),
        None => Some(Ipv6Addr::from(u128::from_str_radix(word, 16).ok()?).into()),
    };
    for line in text.lines().skip(1) {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [index, _, group, source, wanted, unwanted] = words[..] else { continue };
        let (Some(group), Some(source)) = (address(group), address(source)) else { continue };
        let found = groups.iter_mut().find(|one| one.group == group && index.parse() == Ok(one.index));
        if let Some(found) = found {
            found.wanted.extend((wanted != "0").then_some(source));
            found.unwanted |= unwanted != "0";
        }
    }
}

/// All nodes, all routers (where it forwards), and what its own addresses are asked for by (RFC 4291, section 2.7.1).
fn is_the_kernels(group: IpAddr) -> bool {
    let group = match group {
        IpAddr::V4(group) => return group == Ipv4Addr::new(224, 0, 0, 1),
        IpAddr::V6(group) => group,
    };
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
        let here = || joined_here(Path::new("/proc/thread-self/ns/net")).unwrap();
        let expected = [("lo".to_owned(), IpAddr::V4(v4)), ("lo".to_owned(), IpAddr::V6(v6))];
        assert!(expected.iter().all(|one| here().contains(one)), "{:?}", here());
        drop((socket, other));
        assert!(!expected.iter().any(|one| here().contains(one)), "{:?}", here());
    }

    #[test]
    fn what_the_kernel_joins_is_not_named() {
        for own in ["224.0.0.1", "ff02::1", "ff01::1", "ff02::2", "ff02::1:ff00:1"] {
            assert!(is_the_kernels(own.parse().unwrap()), "{own}");
        }
        for joined in ["224.0.0.251", "ff02::fb", "ff05::1:3", "ff02::1:2"] {
            assert!(!is_the_kernels(joined.parse().unwrap()), "{joined}");
        }
    }

    #[test]
    fn sources_are_told_where_one_socket_hears_these_alone() {
        let groups = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n3\teth0      :     3      V3\n\t\t\t\t\
                      0101A8E8     1 0:00000000\t\t0\n\t\t\t\t0201A8E8     2 0:00000000\t\t0\n\t\t\t\t0301A8E8     1 0:00000000\t\t0\n";
        let mut groups = v4(groups);
        add_sources(
            &mut groups,
            "Idx Device        MCA        SRC    INC    EXC\n  3   eth0 0xe8a80101 0x0a000001      1      0\n  3   \
             eth0 0xe8a80102 0x0a000001      1      0\n  3   eth0 0xe8a80103 0x0a000001      0      1\n",
        );
        let source = [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))];
        let told: Vec<_> = groups.iter().map(|one| (one.group.to_string(), one.sources())).collect();
        assert_eq!(
            told,
            [
                ("232.168.1.1".to_owned(), Some(&source[..])),
                // The other one may hear all.
                ("232.168.1.2".to_owned(), None),
                ("232.168.1.3".to_owned(), None),
            ]
        );
        assert!(groups.iter().all(|one| (one.index, one.interface.as_str()) == (3, "eth0")));
    }
}
