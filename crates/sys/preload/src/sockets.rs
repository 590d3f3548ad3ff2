//! What criu asks of sockets, and how it makes them anew.
//!
//! - SO_PASSCRED and SO_PASSSEC: criu before 4.2 asks every socket for them, and kernels since 6.16 refuse them for all but Unix and
//!   netlink sockets. Where they are refused, they are off.
//! - A listening socket of multipath TCP is one of TCP to criu: the kernel lists it among those of TCP, and clients without multipath
//!   TCP have connections of plain TCP by it. Options that multipath TCP does not know are as a new socket has them.
//! - A socket may have an address that no interface has any more, and a peer that no route leads to: IP_FREEBIND for the time of `bind`,
//!   IP_TRANSPARENT and SO_BINDTODEVICE for that of `connect`.
//! - Link-local addresses are none without their interface, which criu leaves out of those of connections.
//! - A netlink socket that is connected to no group is connected to group 32 by criu, to which all that it sends would go, too
//!   (`open_netlink_sk` of sk-netlink.c). Sockets that are connected to that group are refused before.
//! - The kernel computes the size of segments when a connection is made. criu tells the peer's limit later, so it is computed once more.

use std::ffi::{CStr, c_int, c_void};

use libc::{sockaddr, sockaddr_in6, sockaddr_nl, socklen_t};

use crate::socket_files;

type Getsockopt = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
type Setsockopt = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
type WithAddress = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;

const MPTCP: c_int = 262;
const TCP_REPAIR_OPTIONS: c_int = 22;
const IPV6_2292PKTOPTIONS: c_int = 6;

macro_rules! real {
    ($symbol:literal, $kind:ty) => {{
        static REAL: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
        let at = *REAL.get_or_init(|| $crate::next($symbol) as usize);
        // SAFETY: the symbol is libc's function of this type.
        unsafe { std::mem::transmute::<usize, $kind>(at) }
    }};
}
pub(crate) use real;

fn errno() -> c_int {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: c_int) {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = value }
}

/// An option whose value is an int.
pub(crate) fn number(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut len): (c_int, socklen_t) = (0, size_of::<c_int>() as socklen_t);
    let real = real!(c"getsockopt", Getsockopt);
    // SAFETY: both are ours, and fit.
    let done = unsafe { real(fd, level, name, (&raw mut value).cast(), &raw mut len) };
    (done == 0).then_some(value)
}

pub(crate) fn set_number(fd: c_int, level: c_int, name: c_int, value: c_int) -> bool {
    let (len, at) = (size_of::<c_int>() as socklen_t, (&raw const value).cast());
    let real = real!(c"setsockopt", Setsockopt);
    // SAFETY: the kernel reads an int that is ours.
    unsafe { real(fd, level, name, at, len) == 0 }
}

/// Stands in for libc's `getsockopt`.
///
/// # Safety
/// As libc's: `value` must hold `*len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let real = real!(c"getsockopt", Getsockopt);
    // SAFETY: valid by contract.
    let size = unsafe { *len };
    // SAFETY: handed on as it came.
    let done = unsafe { real(fd, level, name, value, len) };
    if size < size_of::<c_int>() as socklen_t {
        return done;
    }
    // SAFETY: `value` holds at least the size of an int, by contract and the check above.
    let write = |number: c_int| unsafe { value.cast::<c_int>().write_unaligned(number) };
    if done == 0 {
        // SAFETY: as above; the kernel has just written it.
        let is_mptcp = level == libc::SOL_SOCKET
            && name == libc::SO_PROTOCOL
            && unsafe { value.cast::<c_int>().read_unaligned() } == MPTCP;
        if is_mptcp && number(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(1) {
            write(libc::IPPROTO_TCP);
        }
        return done;
    }
    let refused = errno();
    if !matches!(refused, libc::EOPNOTSUPP | libc::ENOPROTOOPT) {
        return done;
    }
    if level == libc::SOL_SOCKET && matches!(name, libc::SO_PASSCRED | libc::SO_PASSSEC) && refused == libc::EOPNOTSUPP
    {
        write(0);
        return 0;
    }
    if number(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(MPTCP)
        && let Some(family) = number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)
    {
        // SAFETY: numbers only.
        let new = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP) };
        if new >= 0 {
            // SAFETY: by contract `value` holds that many bytes; the descriptor is ours.
            let done = unsafe {
                *len = size;
                real(new, level, name, value, len)
            };
            let refused = errno();
            // SAFETY: as above.
            unsafe { libc::close(new) };
            set_errno(refused);
            return done;
        }
    }
    set_errno(refused);
    done
}

/// Stands in for libc's `setsockopt`.
///
/// # Safety
/// As libc's: `value` must hold `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let real = real!(c"setsockopt", Setsockopt);
    // SAFETY: handed on as it came.
    let done = unsafe { real(fd, level, name, value, len) };
    if done == 0 && level == libc::IPPROTO_TCP && name == TCP_REPAIR_OPTIONS {
        size_segments(fd);
    }
    done
}

/// Has the kernel compute the size of segments from the limits that it knows now. It does so where IP options are set, also none:
/// net/ipv4/ip_sockglue.c, net/ipv6/ipv6_sockglue.c (a control message shorter than its header has no options in it).
fn size_segments(fd: c_int) {
    static NOTHING: u8 = 0;
    let real = real!(c"setsockopt", Setsockopt);
    let set = |level, name, len: socklen_t| {
        // SAFETY: the kernel reads one byte at most, which is ours.
        unsafe { real(fd, level, name, (&raw const NOTHING).cast(), len) }
    };
    if number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_INET6)
        && set(libc::IPPROTO_IPV6, IPV6_2292PKTOPTIONS, 1) == 0
    {
        set(libc::IPPROTO_IPV6, IPV6_2292PKTOPTIONS, 0);
    }
    // Also of a socket of IPv6 whose connection is one of IPv4.
    set(libc::IPPROTO_IP, libc::IP_OPTIONS, 0);
}

/// Stands in for libc's `bind`.
///
/// # Safety
/// As libc's: `address` must hold `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: by contract.
    let scoped = unsafe { without_interface(address, len) }.map(|mut address| {
        address.sin6_scope_id = interface_of(&address).unwrap_or(0);
        address
    });
    let address = scoped.as_ref().map_or(address, |scoped| std::ptr::from_ref(scoped).cast());
    let real = real!(c"bind", WithAddress);
    // SAFETY: the address is as it came, or one of the same length that lives long enough.
    let mut bind = || unsafe { real(fd, address, len) };
    let done = bind();
    if done != 0 && errno() == libc::ENOENT {
        // SAFETY: by contract.
        if unsafe { socket_files::make_directories(address, len) } {
            return bind();
        }
        set_errno(libc::ENOENT);
    }
    if done == 0 || errno() != libc::EADDRNOTAVAIL {
        return done;
    }
    with_option(fd, libc::IP_FREEBIND, &mut bind).unwrap_or(done)
}

/// Stands in for libc's `connect`.
///
/// # Safety
/// As libc's: `address` must hold `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: by contract.
    let scoped = unsafe { without_interface(address, len) }.map(|mut address| {
        address.sin6_scope_id = own_interface(fd).or_else(|| interface_of(&address)).unwrap_or(0);
        address
    });
    let address = scoped.as_ref().map_or(address, |scoped| std::ptr::from_ref(scoped).cast());
    // SAFETY: by contract.
    let ungrouped = unsafe { without_group(address, len) };
    let address = ungrouped.as_ref().map_or(address, |ungrouped| std::ptr::from_ref(ungrouped).cast());
    let real = real!(c"connect", WithAddress);
    // SAFETY: the address is as it came, or one of the same length that lives long enough.
    let mut connect = || unsafe { real(fd, address, len) };
    let done = connect();
    let refused = errno();
    let family = number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN);
    if done == 0 || !matches!(family, Some(libc::AF_INET | libc::AF_INET6)) {
        set_errno(refused);
        return done;
    }
    match refused {
        libc::EADDRNOTAVAIL | libc::EINVAL => with_option(fd, libc::IP_TRANSPARENT, &mut connect).unwrap_or(done),
        // Nor has the peer's address a route any more. A socket that is bound to a device needs none.
        libc::ENETUNREACH | libc::EHOSTUNREACH if bind_to_device(fd, c"lo") => {
            let again = with_option(fd, libc::IP_TRANSPARENT, &mut connect).unwrap_or(done);
            let refused = errno();
            bind_to_device(fd, c"");
            set_errno(refused);
            again
        }
        _ => {
            set_errno(refused);
            done
        }
    }
}

fn bind_to_device(fd: c_int, name: &CStr) -> bool {
    let real = real!(c"setsockopt", Setsockopt);
    let bytes = name.to_bytes_with_nul();
    // SAFETY: the kernel reads that many bytes, which are ours.
    unsafe { real(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, bytes.as_ptr().cast(), bytes.len() as socklen_t) == 0 }
}

/// Tries again with an option that is on for that time; `None`, with errno as it was, where it is on already or cannot be set.
fn with_option(fd: c_int, option: c_int, again: &mut dyn FnMut() -> c_int) -> Option<c_int> {
    let before = errno();
    if number(fd, libc::IPPROTO_IP, option) != Some(0) || !set_number(fd, libc::IPPROTO_IP, option, 1) {
        set_errno(before);
        return None;
    }
    let done = again();
    let refused = errno();
    set_number(fd, libc::IPPROTO_IP, option, 0);
    set_errno(refused);
    Some(done)
}

/// The address without its group, if that is the one of netlink that criu takes for none.
///
/// # Safety
/// `address` holds `len` bytes.
unsafe fn without_group(address: *const sockaddr, len: socklen_t) -> Option<sockaddr_nl> {
    const GROUP_32: u32 = 1 << 31;
    if address.is_null() || (len as usize) < size_of::<sockaddr_nl>() {
        return None;
    }
    // SAFETY: it is long enough; any bytes are a value.
    let mut address = unsafe { address.cast::<sockaddr_nl>().read_unaligned() };
    let is_taken_so = c_int::from(address.nl_family) == libc::AF_NETLINK && address.nl_groups == GROUP_32;
    address.nl_groups = 0;
    is_taken_so.then_some(address)
}

/// The address, if it is a link-local one that does not say which interface it belongs to.
///
/// # Safety
/// `address` holds `len` bytes.
unsafe fn without_interface(address: *const sockaddr, len: socklen_t) -> Option<sockaddr_in6> {
    if address.is_null() || (len as usize) < size_of::<sockaddr_in6>() {
        return None;
    }
    // SAFETY: it is long enough; any bytes are a value.
    let address = unsafe { address.cast::<sockaddr_in6>().read_unaligned() };
    (c_int::from(address.sin6_family) == libc::AF_INET6 && is_link_local(&address) && address.sin6_scope_id == 0)
        .then_some(address)
}

fn is_link_local(address: &sockaddr_in6) -> bool {
    let bytes = address.sin6_addr.s6_addr;
    bytes[0] == 0xfe && bytes[1] & 0xc0 == 0x80
}

/// The interface that a socket's own address belongs to.
fn own_interface(fd: c_int) -> Option<u32> {
    // SAFETY: plain integers; all zeros is a value.
    let mut own: sockaddr_in6 = unsafe { std::mem::zeroed() };
    let mut len = size_of::<sockaddr_in6>() as socklen_t;
    // SAFETY: both are ours, and fit.
    let done = unsafe { libc::getsockname(fd, (&raw mut own).cast(), &raw mut len) };
    (done == 0 && own.sin6_scope_id != 0).then_some(own.sin6_scope_id)
}

/// The interface that has a link-local address; for a peer's, the only one that has any.
fn interface_of(address: &sockaddr_in6) -> Option<u32> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call makes a list, which is given back below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let (mut exact, mut all, mut at) = (None, Vec::new(), list);
    // SAFETY: `at` is null or an entry of the list, which is not given back yet.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        // SAFETY: an address of this family has this type.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| c_int::from(address.sa_family));
        if family != Some(libc::AF_INET6) {
            continue;
        }
        // SAFETY: as above.
        let own = unsafe { entry.ifa_addr.cast::<sockaddr_in6>().read_unaligned() };
        if is_link_local(&own) {
            all.push(own.sin6_scope_id);
            if own.sin6_addr.s6_addr == address.sin6_addr.s6_addr {
                exact = Some(own.sin6_scope_id);
            }
        }
    }
    // SAFETY: from getifaddrs, and not used any more.
    unsafe { libc::freeifaddrs(list) };
    all.dedup();
    exact.or(match all.as_slice() {
        [only] => Some(*only),
        _ => None,
    })
}
