//! What the sockets of a container have that CRIU does not carry: options that programs have set, and memberships in multicast
//! groups.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::libc;
use nix::net::if_::if_nameindex;
use serde::{Deserialize, Serialize};
use tranship_sys::process::take_descriptor;
use tranship_sys::socket;

use crate::NetworkError;
use crate::multicast::{self, Membership};
use crate::namespace::inside;

mod options;

use options::{ALL, Choice, Kind, Of};

/// A socket that a process has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenSocket {
    /// The process, as this node calls it.
    pub pid: u32,
    /// And as the container does.
    pub task: u32,
    /// Under which number.
    pub descriptor: i32,
}

/// What CRIU does not carry of one socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketState {
    /// A process that has it open, as the container calls it.
    task: u32,
    /// Under which number.
    descriptor: i32,
    /// What differs from a new socket's.
    options: Vec<Set>,
    memberships: Vec<Membership>,
}

/// An option that was set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Set {
    level: i32,
    name: i32,
    value: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Value {
    Bytes(Vec<u8>),
    /// An interface, which may have another index elsewhere.
    Interface(String),
}

/// What a look at all sockets has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketStates {
    /// Those of which CRIU would not carry everything.
    pub sockets: Vec<SocketState>,
    /// Groups that have been joined in the namespace by none of them, each with the name of its interface.
    pub unclaimed: Vec<(String, IpAddr)>,
}

/// Family, type and protocol: what decides on the options that a new socket has.
type Sort = (i32, i32, i32);

/// Looks at sockets of processes whose network namespace is at `netns`. They need not stand still, but what they do meanwhile may be
/// missed.
///
/// # Errors
/// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the system's refusal.
pub fn socket_states(netns: &Path, sockets: &[OpenSocket]) -> Result<SocketStates, NetworkError> {
    inside(netns, || {
        let mut unclaimed = multicast::joined_here(netns)?;
        let interfaces = interfaces();
        let mut new = HashMap::new();
        let mut states = Vec::new();
        let joined = unclaimed.clone();
        for &OpenSocket { pid, task, descriptor } in sockets {
            // It may have been closed meanwhile.
            let Ok(socket) = take_descriptor(pid, descriptor) else { continue };
            let Some(sort) = sort(socket.as_fd()) else { continue };
            let defaults = new.entry(sort).or_insert_with(|| defaults(sort));
            let options = differing(socket.as_fd(), sort, defaults, &interfaces);
            let memberships = multicast::memberships(socket.as_fd(), &joined, &interfaces);
            unclaimed.retain(|(interface, group)| !memberships.iter().any(|m| m.is_in(interface, *group)));
            if !options.is_empty() || !memberships.is_empty() {
                states.push(SocketState { task, descriptor, options, memberships });
            }
        }
        Ok(SocketStates { sockets: states, unclaimed })
    })
}

/// Gives restored sockets what they had. `pid` tells the pid here of a process of the container; `netns` is its network namespace.
///
/// # Errors
/// A process or a socket that is not there, an option that is none of those that are carried, the system's refusal.
pub fn set_socket_states(
    netns: &Path,
    sockets: &[SocketState],
    pid: impl Fn(u32) -> Option<u32>,
) -> Result<(), NetworkError> {
    // A namespace is entered for the names of its interfaces only.
    let named = |s: &SocketState| {
        !s.memberships.is_empty() || s.options.iter().any(|set| matches!(set.value, Value::Interface(_)))
    };
    let indices = match sockets.iter().any(named) {
        true => inside(netns, || Ok(interfaces()))?,
        false => HashMap::new(),
    };
    for state in sockets {
        let SocketState { task, descriptor, .. } = state;
        let refused = |what: &str, why: &dyn std::fmt::Display| {
            NetworkError::refused(format!("give descriptor {descriptor} of process {task} {what}"), why)
        };
        let pid = pid(*task).ok_or_else(|| refused("its options", &"there is no such process"))?;
        let socket = take_descriptor(pid, *descriptor).map_err(|e| refused("its options", &e))?;
        for membership in &state.memberships {
            let what = || format!("its membership in {membership}");
            let index = index(&indices, membership.interface())
                .ok_or_else(|| refused(&what(), &"there is no such interface"))?;
            multicast::join(socket.as_fd(), membership, index).map_err(|e| refused(&what(), &e))?;
        }
        for set in &state.options {
            let known = ALL.iter().find(|choice| (choice.level, choice.name) == (set.level, set.name));
            let Some(choice) = known else {
                let what = format!("option {} of level {}", set.name, set.level);
                return Err(refused(&what, &"it is none of those that are carried"));
            };
            let value =
                set.value.bytes(choice, &indices).ok_or_else(|| refused(choice.text, &"there is no such interface"))?;
            socket::set_option(socket.as_fd(), choice.level, choice.name, &value)
                .map_err(|e| refused(choice.text, &e))?;
        }
    }
    Ok(())
}

/// The interfaces of this thread's namespace, by their indices.
fn interfaces() -> HashMap<u32, String> {
    let all = if_nameindex();
    let all = all.iter().flat_map(|all| all.iter());
    all.map(|interface| (interface.index(), interface.name().to_string_lossy().into_owned())).collect()
}

fn index(interfaces: &HashMap<u32, String>, name: &str) -> Option<u32> {
    interfaces.iter().find(|(_, known)| *known == name).map(|(index, _)| *index)
}

/// What sort of internet socket it is; nothing where it is none.
fn sort(socket: BorrowedFd<'_>) -> Option<Sort> {
    let ask = |name| socket::int_option(socket, libc::SOL_SOCKET, name).ok();
    let family = ask(libc::SO_DOMAIN).filter(|f| matches!(*f, libc::AF_INET | libc::AF_INET6))?;
    Some((family, ask(libc::SO_TYPE)?, ask(libc::SO_PROTOCOL)?))
}

/// What a new socket of that sort has.
fn defaults((family, kind, protocol): Sort) -> Vec<Option<Vec<u8>>> {
    // Where none can be made, nothing can be told.
    let new = socket::new(family, kind, protocol);
    new.map(|socket| ALL.iter().map(|choice| choice.value(socket.as_fd())).collect()).unwrap_or_default()
}

fn differing(
    socket: BorrowedFd<'_>,
    (_, kind, _): Sort,
    defaults: &[Option<Vec<u8>>],
    interfaces: &HashMap<u32, String>,
) -> Vec<Set> {
    let mut set = Vec::new();
    for (choice, default) in ALL.iter().zip(defaults) {
        let Some(default) = default else { continue };
        let Some(value) = choice.value(socket).filter(|value| value != default) else { continue };
        let can_be_set = match choice.of {
            Of::All => true,
            Of::Datagrams => kind != libc::SOCK_STREAM,
            Of::Listening => {
                socket::int_option(socket, libc::SOL_SOCKET, libc::SO_ACCEPTCONN).is_ok_and(|listens| listens == 1)
            }
        };
        if let Some(value) = Value::of(choice, value, interfaces).filter(|_| can_be_set) {
            set.push(Set { level: choice.level, name: choice.name, value });
        }
    }
    set
}

impl Value {
    fn of(choice: &Choice, bytes: Vec<u8>, interfaces: &HashMap<u32, String>) -> Option<Self> {
        let number = || bytes.first_chunk().copied();
        let index = match choice.kind {
            Kind::Plain => return Some(Self::Bytes(bytes)),
            Kind::Index => u32::from_ne_bytes(number()?),
            Kind::NetworkIndex => u32::from_be_bytes(number()?),
        };
        // Of an interface that is not there any more, the socket has nothing.
        interfaces.get(&index).cloned().map(Self::Interface)
    }

    fn bytes(&self, choice: &Choice, interfaces: &HashMap<u32, String>) -> Option<Vec<u8>> {
        let name = match self {
            Self::Bytes(bytes) => return Some(bytes.clone()),
            Self::Interface(name) => name,
        };
        let index = index(interfaces, name)?;
        Some(if choice.kind == Kind::NetworkIndex { index.to_be_bytes() } else { index.to_ne_bytes() }.to_vec())
    }
}

#[cfg(test)]
mod tests;
