//! What the sockets of a container have that CRIU does not carry: options that programs have set, and memberships in multicast
//! groups.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::libc;
use nix::net::if_::if_nameindex;
use nix::sys::socket::{NetlinkAddr, connect, getpeername};
use serde::{Deserialize, Serialize};
use tranship_sys::process::{OpenFiles, take_descriptor};
use tranship_sys::socket::{self, TcpInfo};

use crate::NetworkError;
use crate::multicast::{self, Membership};
use crate::namespace::inside;
use tranship_sys::threads::{self, Beside};

mod dropped;
mod options;

pub use dropped::Dropped;
use options::{ALL, Choice, Kind, Of};

/// The least that `TCP_MAXSEG` can be set to (`TCP_MIN_MSS` of the kernel's net/tcp.h).
const LEAST_SEGMENT: u32 = 88;
/// How often an option that CRIU changes for a moment is looked at again, and after which time.
const SETTLED: u32 = 20;
/// How often at the most: another process may change it all the time.
const LOOKS: u32 = 200;
const LOOK: Duration = Duration::from_millis(1);
/// Sockets that are worth a thread of their own.
const SHARE: usize = 64;

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
    /// The same of options that older nodes would refuse; of this field they take no note.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    more_options: Vec<Set>,
    memberships: Vec<Membership>,
    /// The port of netlink that it is connected to together with [`GROUP_32`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    netlink_peer: Option<u32>,
}

/// The multicast group of netlink that CRIU takes for none when it connects a socket.
const GROUP_32: u32 = 1 << 31;

impl SocketState {
    /// All options, in the order in which they are set.
    fn set(&self) -> impl Iterator<Item = &Set> {
        let mut all: Vec<&Set> = self.options.iter().chain(&self.more_options).collect();
        all.sort_by_key(|set| set.choice().map(Choice::place));
        all.into_iter()
    }

    /// What programs call those of its options that older nodes cannot set.
    pub fn newer_options(&self) -> impl Iterator<Item = &'static str> {
        self.more_options.iter().filter_map(|set| Some(set.choice()?.text))
    }

    /// Whether it is a netlink socket that is connected to a group that CRIU does not connect it to.
    pub fn has_netlink_peer(&self) -> bool {
        self.netlink_peer.is_some()
    }

    /// Whether it is in a multicast group.
    pub fn has_groups(&self) -> bool {
        !self.memberships.is_empty()
    }
}

/// An option that was set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Set {
    level: i32,
    name: i32,
    value: Value,
}

impl Set {
    fn choice(&self) -> Option<&'static Choice> {
        ALL.iter().find(|choice| (choice.level, choice.name) == (self.level, self.name))
    }
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
    /// Sockets with something that CRIU drops, and what.
    pub dropped: Vec<(OpenSocket, Dropped)>,
}

/// Family, type and protocol: what decides on the options that a new socket has.
type Sort = (i32, i32, i32);

/// Options with the values that new sockets of a sort have.
type Defaults = Arc<Vec<(&'static Choice, options::Value)>>;

/// What programs call those options that these sockets have set and that older nodes cannot set. The sockets' network namespace is at `netns`.
///
/// # Errors
/// As [`socket_states`].
pub fn newer_options(netns: &Path, sockets: &[OpenSocket]) -> Result<Vec<&'static str>, NetworkError> {
    inside(netns, || {
        let (mut new, mut found) = (HashMap::new(), BTreeSet::new());
        each(sockets, |_, socket, sort| {
            let Some(sort) = sort.filter(|sort| ALL.iter().any(|choice| choice.is_newer() && choice.concerns(*sort)))
            else {
                return;
            };
            // Before each freeze: some of them follow settings of the node, which may have been changed.
            let defaults: &Defaults = new.entry(sort).or_insert_with(|| {
                known_defaults().remove(&sort);
                defaults(sort)
            });
            let newer = defaults.iter().filter(|(choice, _)| choice.is_newer());
            found.extend(
                newer
                    .filter(|(choice, default)| choice.value(socket).is_some_and(|value| value != *default))
                    .map(|(choice, _)| choice.text),
            );
        });
        Ok(found.into_iter().collect())
    })
}

/// Looks at sockets of processes whose network namespace is at `netns`, by several threads where they are many. They need not stand still,
/// but what they do meanwhile may be missed.
///
/// # Errors
/// [`NetworkError::Missing`], [`NetworkError::NotANamespace`], the system's refusal.
pub fn socket_states(netns: &Path, sockets: &[OpenSocket]) -> Result<SocketStates, NetworkError> {
    inside(netns, || {
        let mut unclaimed = multicast::joined_here(netns)?;
        let (joined, interfaces) = (&unclaimed, &interfaces());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = sockets.len().div_ceil(cores).max(SHARE);
        let looks = std::thread::scope(|scope| {
            // They are in this namespace, too.
            let look = |sockets| threads::beside(scope, "sockets", move || states(sockets, joined, interfaces));
            let workers: Vec<_> = sockets.chunks(share).map(look).collect();
            let looks = workers.into_iter().map(Beside::join);
            looks.reduce(|(mut states, mut dropped), more| {
                states.extend(more.0);
                dropped.extend(more.1);
                (states, dropped)
            })
        });
        let (states, dropped) = looks.unwrap_or_default();
        unclaimed.retain(|group| !states.iter().any(|state| is_in(&state.memberships, group)));
        Ok(SocketStates { sockets: states, unclaimed, dropped })
    })
}

/// The groups that have been joined in the network namespace at `netns` by none of the sockets, each with the name of its interface. The
/// sockets are asked for only if anything has joined a group.
///
/// # Errors
/// As [`socket_states`].
pub fn unclaimed_groups(
    netns: &Path,
    sockets: impl FnOnce() -> Vec<OpenSocket> + Send,
) -> Result<Vec<(String, IpAddr)>, NetworkError> {
    inside(netns, || {
        let joined = multicast::joined_here(netns)?;
        let mut unclaimed = joined.clone();
        if joined.is_empty() {
            return Ok(unclaimed);
        }
        let interfaces = interfaces();
        each(&sockets(), |_, socket, sort| {
            let Some(sort) = sort else { return };
            let memberships = memberships(socket, sort, &joined, &interfaces);
            unclaimed.retain(|group| !is_in(&memberships, group));
        });
        Ok(unclaimed)
    })
}

/// Takes each of the sockets that is still open, with its sort where it is one of the internet, of netlink, a packet or a Unix socket.
fn each(sockets: &[OpenSocket], mut look: impl FnMut(&OpenSocket, BorrowedFd<'_>, Option<Sort>)) {
    for of_one in sockets.chunk_by(|one, next| one.pid == next.pid) {
        let Ok(files) = OpenFiles::of(of_one[0].pid) else { continue };
        for open in of_one {
            let Ok(socket) = files.take(open.descriptor) else { continue };
            look(open, socket.as_fd(), sort(socket.as_fd()));
        }
    }
}

/// What of these sockets CRIU would not carry, and what it drops. `joined` are the groups that anything in this namespace has joined.
fn states(
    sockets: &[OpenSocket],
    joined: &[(String, IpAddr)],
    interfaces: &HashMap<u32, String>,
) -> (Vec<SocketState>, Vec<(OpenSocket, Dropped)>) {
    let (mut new, mut states, mut all_dropped) = (HashMap::new(), Vec::new(), Vec::new());
    each(sockets, |open @ &OpenSocket { task, descriptor, .. }, socket, sort| {
        all_dropped.extend(Dropped::of(socket, sort).map(|what| (*open, what)));
        let Some(sort) = sort else { return };
        let all = differing(socket, new.entry(sort).or_insert_with(|| defaults(sort)), interfaces);
        let (more_options, options): (Vec<Set>, Vec<Set>) =
            all.into_iter().partition(|set| set.choice().is_some_and(Choice::is_newer));
        let memberships = memberships(socket, sort, joined, interfaces);
        let netlink_peer = netlink_peer(socket, sort);
        let has_none = options.is_empty() && more_options.is_empty() && memberships.is_empty();
        if !has_none || netlink_peer.is_some() {
            states.push(SocketState { task, descriptor, options, more_options, memberships, netlink_peer });
        }
    });
    (states, all_dropped)
}

/// The port that a netlink socket is connected to together with [`GROUP_32`].
fn netlink_peer(socket: BorrowedFd<'_>, (family, ..): Sort) -> Option<u32> {
    if family != libc::AF_NETLINK {
        return None;
    }
    let peer: NetlinkAddr = getpeername(socket.as_raw_fd()).ok()?;
    (peer.groups() == GROUP_32).then(|| peer.pid())
}

/// The memberships of a socket of that sort in groups of IP; those of TCP, netlink, packet and Unix sockets have none.
fn memberships(
    socket: BorrowedFd<'_>,
    (family, kind, _): Sort,
    joined: &[(String, IpAddr)],
    interfaces: &HashMap<u32, String>,
) -> Vec<Membership> {
    match kind == libc::SOCK_STREAM || matches!(family, libc::AF_NETLINK | libc::AF_PACKET | libc::AF_UNIX) {
        true => Vec::new(),
        false => multicast::memberships(socket, joined, interfaces),
    }
}

fn is_in(memberships: &[Membership], (interface, group): &(String, IpAddr)) -> bool {
    memberships.iter().any(|membership| membership.is_in(interface, *group))
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
    let named =
        |s: &SocketState| !s.memberships.is_empty() || s.set().any(|set| matches!(set.value, Value::Interface(_)));
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
        if let Some(port) = state.netlink_peer {
            connect(socket.as_raw_fd(), &NetlinkAddr::new(port, GROUP_32))
                .map_err(|e| refused("the group of netlink that it is connected to", &e))?;
        }
        for set in state.set() {
            let Some(choice) = set.choice() else {
                let what = format!("option {} of level {}", set.name, set.level);
                return Err(refused(&what, &"it is none of those that are carried"));
            };
            let value =
                set.value.bytes(choice, &indices).ok_or_else(|| refused(choice.text, &"there is no such interface"))?;
            // Some cannot be set any more once others are, though to what they are.
            if choice.value(socket.as_fd()).is_some_and(|now| *now == *value) {
                continue;
            }
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

/// What sort of internet, netlink, packet or Unix socket it is; nothing where it is another.
fn sort(socket: BorrowedFd<'_>) -> Option<Sort> {
    let ask = |name| socket::int_option(socket, libc::SOL_SOCKET, name).ok();
    const FAMILIES: [i32; 5] = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_UNIX];
    let family = ask(libc::SO_DOMAIN).filter(|family| FAMILIES.contains(family))?;
    // A packet socket of no protocol receives nothing.
    let protocol = if family == libc::AF_PACKET { 0 } else { ask(libc::SO_PROTOCOL)? };
    Some((family, ask(libc::SO_TYPE)?, protocol))
}

/// Those of packet sockets, which are the same in each namespace.
fn known_defaults() -> MutexGuard<'static, BTreeMap<Sort, Defaults>> {
    static OF_PACKET_SOCKETS: Mutex<BTreeMap<Sort, Defaults>> = Mutex::new(BTreeMap::new());
    OF_PACKET_SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The options that sockets of a sort can have set, each with the value that a new one has. Those of packet sockets are kept from
/// [`newer_options`] on: to close one takes the kernel a grace period of RCU, for which a frozen container would wait.
fn defaults(sort: Sort) -> Defaults {
    if sort.0 != libc::AF_PACKET {
        return new_defaults(sort);
    }
    let mut known = known_defaults();
    if let Some(found) = known.get(&sort).filter(|found| !found.is_empty()) {
        return Arc::clone(found);
    }
    let found = new_defaults(sort);
    known.insert(sort, Arc::clone(&found));
    found
}

fn new_defaults(sort: Sort) -> Defaults {
    // Where none can be made, nothing can be told.
    let (family, kind, protocol) = sort;
    let Ok(new) = socket::new(family, kind, protocol) else { return Arc::default() };
    ALL.iter()
        .filter(|choice| choice.fits(sort))
        .filter_map(|choice| Some((choice, choice.value(new.as_fd())?)))
        .collect::<Vec<_>>()
        .into()
}

fn differing(socket: BorrowedFd<'_>, defaults: &Defaults, interfaces: &HashMap<u32, String>) -> Vec<Set> {
    let tcp = LazyCell::new(|| TcpInfo::of(socket));
    let is_unconnected = LazyCell::new(|| tcp.map_or_else(|| socket::has_no_peer(socket), |tcp| tcp.is_unconnected()));
    let is_asked = |choice: &Choice| match choice.of {
        Of::All | Of::Datagrams => true,
        Of::Unconnected => *is_unconnected,
        Of::Fresh => tcp.is_some_and(|tcp| tcp.is_fresh()),
        Of::Limited => tcp.is_some(),
    };
    // Others are what the kernel itself has set.
    let is_own = |choice: &Choice, value: &options::Value| {
        let number = || value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
        match choice.of {
            Of::Fresh => number() >= Some(LEAST_SEGMENT),
            Of::Limited if !*is_unconnected => {
                let buffer = socket::int_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUF).ok();
                let usual = tcp.zip(buffer).map(|(tcp, buffer)| tcp.usual_window(buffer.unsigned_abs()));
                number() < usual
            }
            _ => true,
        }
    };
    let mut set = Vec::new();
    for (choice, default) in defaults.iter() {
        if !is_asked(choice) {
            continue;
        }
        let is_set = |value: &options::Value| value != default;
        let mut value = choice.value(socket).filter(is_set);
        if (choice.level, choice.name) == (libc::SOL_SOCKET, libc::SO_PEEK_OFF) && value.is_some() {
            value = settled(choice, socket, is_set);
        }
        let Some(value) = value else { continue };
        if !is_own(choice, &value) {
            continue;
        }
        if let Some(value) = Value::of(choice, value.to_vec(), interfaces) {
            set.push(Set { level: choice.level, name: choice.name, value });
        }
    }
    set
}

/// The value of an option that CRIU changes for a moment when it looks at what waits in a socket, as it is afterwards; nothing where it is not set
/// then.
fn settled(
    choice: &Choice,
    socket: BorrowedFd<'_>,
    is_set: impl Fn(&options::Value) -> bool,
) -> Option<options::Value> {
    let (mut last, mut same, mut looks) = (choice.value(socket), 0, 0);
    while same < SETTLED && looks < LOOKS && last.as_ref().is_some_and(&is_set) {
        std::thread::sleep(LOOK);
        let now = choice.value(socket);
        same = if now == last { same + 1 } else { 0 };
        looks += 1;
        last = now;
    }
    last.filter(is_set)
}

impl Value {
    fn of(choice: &Choice, bytes: Vec<u8>, interfaces: &HashMap<u32, String>) -> Option<Self> {
        let number = || bytes.first_chunk().copied();
        let index = match choice.kind {
            Kind::Plain | Kind::OneWay => return Some(Self::Bytes(bytes)),
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
