//! The options of internet, netlink, packet and Unix sockets that programs set and CRIU does not carry.

use std::os::fd::BorrowedFd;

use nix::libc;
use tranship_sys::socket;

use super::Sort;

const SOL_SOCKET: i32 = 1;
const SOL_IP: i32 = 0;
const SOL_TCP: i32 = 6;
const SOL_UDP: i32 = 17;
const SOL_IPV6: i32 = 41;
const SOL_UDPLITE: i32 = 136;
const SOL_RAW: i32 = 255;
const SOL_PACKET: i32 = 263;
const SOL_NETLINK: i32 = 270;
/// Of the longest value: options of IP.
const LONGEST: usize = 40;
const IP_OPTIONS: i32 = 4;
const IPV6_CHECKSUM: i32 = 7;
const TCP_CONGESTION: i32 = 13;
/// Of the name of a congestion control.
const CONGESTION_CONTROL: usize = 16;

/// What the value of an option is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The same everywhere.
    Plain,
    /// The same everywhere; the value of a socket that does not have it cannot be set.
    OneWay,
    /// The index of an interface.
    Index,
    /// The same, in the network's byte order.
    NetworkIndex,
}

/// Which sockets can be given it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    All,
    /// Those without a connection.
    Unconnected,
    /// Those of TCP that have never had a connection: of others the kernel shows something else.
    Fresh,
    /// Those of TCP without a connection, and those with one whose value is less than what the kernel sets by itself.
    Limited,
    /// Those without connections: with others the kernel keeps something else in its place.
    Datagrams,
}

/// One option.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub level: i32,
    pub name: i32,
    /// What programs call it.
    pub text: &'static str,
    pub kind: Kind,
    pub of: Of,
}

const fn plain(level: i32, name: i32, text: &'static str) -> Choice {
    Choice { level, name, text, kind: Kind::Plain, of: Of::All }
}

const fn index(kind: Kind, level: i32, name: i32, text: &'static str) -> Choice {
    Choice { kind, ..plain(level, name, text) }
}

const fn unconnected(level: i32, name: i32, text: &'static str) -> Choice {
    Choice { of: Of::Unconnected, ..plain(level, name, text) }
}

const fn datagrams(level: i32, name: i32, text: &'static str) -> Choice {
    Choice { of: Of::Datagrams, ..plain(level, name, text) }
}

/// All of them, in the order in which they are set. Some that CRIU carries are here because it does so for one family only, or
/// because another one changes them. Of connections not: what changes by itself (`TCP_QUICKACK`,
/// `SO_INCOMING_CPU`, a `TCP_WINDOW_CLAMP` that the kernel may have set); and not what cannot be read (`IP_MULTICAST_IF` by index).
#[rustfmt::skip]
pub(super) const ALL: [Choice; 115] = [
    plain(SOL_SOCKET, 1, "SO_DEBUG"),
    plain(SOL_SOCKET, 29, "SO_TIMESTAMP"),
    plain(SOL_SOCKET, 35, "SO_TIMESTAMPNS"),
    plain(SOL_SOCKET, 63, "SO_TIMESTAMP_NEW"),
    plain(SOL_SOCKET, 64, "SO_TIMESTAMPNS_NEW"),
    plain(SOL_SOCKET, 37, "SO_TIMESTAMPING"),
    plain(SOL_SOCKET, 65, "SO_TIMESTAMPING_NEW"),
    plain(SOL_SOCKET, 40, "SO_RXQ_OVFL"),
    plain(SOL_SOCKET, 41, "SO_WIFI_STATUS"),
    plain(SOL_SOCKET, 42, "SO_PEEK_OFF"),
    plain(SOL_SOCKET, 43, "SO_NOFCS"),
    plain(SOL_SOCKET, 45, "SO_SELECT_ERR_QUEUE"),
    plain(SOL_SOCKET, 46, "SO_BUSY_POLL"),
    plain(SOL_SOCKET, 47, "SO_MAX_PACING_RATE"),
    unconnected(SOL_SOCKET, 49, "SO_INCOMING_CPU"),
    plain(SOL_SOCKET, 60, "SO_ZEROCOPY"),
    plain(SOL_SOCKET, 61, "SO_TXTIME"),
    plain(SOL_SOCKET, 69, "SO_PREFER_BUSY_POLL"),
    plain(SOL_SOCKET, 70, "SO_BUSY_POLL_BUDGET"),
    plain(SOL_SOCKET, 74, "SO_TXREHASH"),
    plain(SOL_SOCKET, 75, "SO_RCVMARK"),
    plain(SOL_SOCKET, 76, "SO_PASSPIDFD"),
    plain(SOL_SOCKET, 82, "SO_RCVPRIORITY"),
    plain(SOL_SOCKET, 83, "SO_PASSRIGHTS"),
    plain(SOL_SOCKET, 84, "SO_INQ"),
    plain(SOL_IP, 1, "IP_TOS"),
    plain(SOL_IP, 2, "IP_TTL"),
    // With TCP they change what TCP_MAXSEG says.
    datagrams(SOL_IP, IP_OPTIONS, "IP_OPTIONS"),
    Choice { kind: Kind::OneWay, ..plain(SOL_IP, 5, "IP_ROUTER_ALERT") },
    plain(SOL_IP, 6, "IP_RECVOPTS"),
    plain(SOL_IP, 7, "IP_RETOPTS"),
    plain(SOL_IP, 8, "IP_PKTINFO"),
    plain(SOL_IP, 10, "IP_MTU_DISCOVER"),
    plain(SOL_IP, 11, "IP_RECVERR"),
    plain(SOL_IP, 12, "IP_RECVTTL"),
    plain(SOL_IP, 13, "IP_RECVTOS"),
    plain(SOL_IP, 18, "IP_PASSSEC"),
    plain(SOL_IP, 19, "IP_TRANSPARENT"),
    plain(SOL_IP, 20, "IP_RECVORIGDSTADDR"),
    plain(SOL_IP, 21, "IP_MINTTL"),
    plain(SOL_IP, 23, "IP_CHECKSUM"),
    plain(SOL_IP, 24, "IP_BIND_ADDRESS_NO_PORT"),
    plain(SOL_IP, 25, "IP_RECVFRAGSIZE"),
    plain(SOL_IP, 26, "IP_RECVERR_RFC4884"),
    datagrams(SOL_IP, 32, "IP_MULTICAST_IF"),
    datagrams(SOL_IP, 33, "IP_MULTICAST_TTL"),
    datagrams(SOL_IP, 34, "IP_MULTICAST_LOOP"),
    datagrams(SOL_IP, 49, "IP_MULTICAST_ALL"),
    index(Kind::NetworkIndex, SOL_IP, 50, "IP_UNICAST_IF"),
    plain(SOL_IP, 51, "IP_LOCAL_PORT_RANGE"),
    plain(SOL_IPV6, 16, "IPV6_UNICAST_HOPS"),
    Choice { kind: Kind::Index, ..datagrams(SOL_IPV6, 17, "IPV6_MULTICAST_IF") },
    datagrams(SOL_IPV6, 18, "IPV6_MULTICAST_HOPS"),
    datagrams(SOL_IPV6, 19, "IPV6_MULTICAST_LOOP"),
    plain(SOL_IPV6, 23, "IPV6_MTU_DISCOVER"),
    plain(SOL_IPV6, 25, "IPV6_RECVERR"),
    datagrams(SOL_IPV6, 29, "IPV6_MULTICAST_ALL"),
    plain(SOL_IPV6, 31, "IPV6_RECVERR_RFC4884"),
    plain(SOL_IPV6, 33, "IPV6_FLOWINFO_SEND"),
    plain(SOL_IPV6, 49, "IPV6_RECVPKTINFO"),
    plain(SOL_IPV6, 51, "IPV6_RECVHOPLIMIT"),
    plain(SOL_IPV6, 53, "IPV6_RECVHOPOPTS"),
    plain(SOL_IPV6, 56, "IPV6_RECVRTHDR"),
    plain(SOL_IPV6, 58, "IPV6_RECVDSTOPTS"),
    plain(SOL_IPV6, 60, "IPV6_RECVPATHMTU"),
    plain(SOL_IPV6, 62, "IPV6_DONTFRAG"),
    plain(SOL_IPV6, 66, "IPV6_RECVTCLASS"),
    plain(SOL_IPV6, 67, "IPV6_TCLASS"),
    plain(SOL_IPV6, 70, "IPV6_AUTOFLOWLABEL"),
    plain(SOL_IPV6, 72, "IPV6_ADDR_PREFERENCES"),
    plain(SOL_IPV6, 73, "IPV6_MINHOPCOUNT"),
    plain(SOL_IPV6, 74, "IPV6_RECVORIGDSTADDR"),
    plain(SOL_IPV6, 75, "IPV6_TRANSPARENT"),
    index(Kind::NetworkIndex, SOL_IPV6, 76, "IPV6_UNICAST_IF"),
    plain(SOL_IPV6, 77, "IPV6_RECVFRAGSIZE"),
    Choice { of: Of::Fresh, ..plain(SOL_TCP, 2, "TCP_MAXSEG") },
    plain(SOL_TCP, 7, "TCP_SYNCNT"),
    plain(SOL_TCP, 8, "TCP_LINGER2"),
    plain(SOL_TCP, 9, "TCP_DEFER_ACCEPT"),
    Choice { of: Of::Limited, ..plain(SOL_TCP, 10, "TCP_WINDOW_CLAMP") },
    unconnected(SOL_TCP, 12, "TCP_QUICKACK"),
    plain(SOL_TCP, TCP_CONGESTION, "TCP_CONGESTION"),
    plain(SOL_TCP, 16, "TCP_THIN_LINEAR_TIMEOUTS"),
    plain(SOL_TCP, 18, "TCP_USER_TIMEOUT"),
    unconnected(SOL_TCP, 23, "TCP_FASTOPEN"),
    plain(SOL_TCP, 25, "TCP_NOTSENT_LOWAT"),
    plain(SOL_TCP, 27, "TCP_SAVE_SYN"),
    unconnected(SOL_TCP, 30, "TCP_FASTOPEN_CONNECT"),
    unconnected(SOL_TCP, 34, "TCP_FASTOPEN_NO_COOKIE"),
    plain(SOL_TCP, 36, "TCP_INQ"),
    plain(SOL_TCP, 37, "TCP_TX_DELAY"),
    plain(SOL_TCP, 44, "TCP_RTO_MAX_MS"),
    plain(SOL_TCP, 45, "TCP_RTO_MIN_US"),
    plain(SOL_TCP, 46, "TCP_DELACK_MAX_US"),
    plain(SOL_UDP, 100, "UDP_ENCAP"),
    plain(SOL_UDP, 101, "UDP_NO_CHECK6_TX"),
    plain(SOL_UDP, 102, "UDP_NO_CHECK6_RX"),
    plain(SOL_UDP, 103, "UDP_SEGMENT"),
    plain(SOL_UDP, 104, "UDP_GRO"),
    plain(SOL_UDPLITE, 10, "UDPLITE_SEND_CSCOV"),
    plain(SOL_UDPLITE, 11, "UDPLITE_RECV_CSCOV"),
    plain(SOL_RAW, IPV6_CHECKSUM, "IPV6_CHECKSUM"),
    plain(SOL_NETLINK, 3, "NETLINK_PKTINFO"),
    plain(SOL_NETLINK, 4, "NETLINK_BROADCAST_ERROR"),
    plain(SOL_NETLINK, 5, "NETLINK_NO_ENOBUFS"),
    plain(SOL_NETLINK, 8, "NETLINK_LISTEN_ALL_NSID"),
    plain(SOL_NETLINK, 10, "NETLINK_CAP_ACK"),
    plain(SOL_NETLINK, 11, "NETLINK_EXT_ACK"),
    plain(SOL_NETLINK, 12, "NETLINK_GET_STRICT_CHK"),
    plain(SOL_PACKET, 19, "PACKET_TX_HAS_OFF"),
    plain(SOL_PACKET, 20, "PACKET_QDISC_BYPASS"),
    plain(SOL_PACKET, 23, "PACKET_IGNORE_OUTGOING"),
    plain(SOL_PACKET, 24, "PACKET_VNET_HDR_SZ"),
    // The type of service decides on it.
    plain(SOL_SOCKET, 12, "SO_PRIORITY"),
    // It comes last: the filter can then no longer be changed.
    plain(SOL_SOCKET, 44, "SO_LOCK_FILTER"),
];

/// Options of `SOL_SOCKET` that mean something to Unix sockets: times of arrival, where to peek, what comes with messages.
const UNIX: [i32; 9] = [29, 35, 63, 64, 37, 42, 76, 83, 84];

impl Choice {
    /// Whether agents that speak a protocol before version 9 refuse it.
    pub(super) fn is_newer(&self) -> bool {
        match self.level {
            SOL_UDPLITE | SOL_PACKET => true,
            SOL_RAW => self.name == IPV6_CHECKSUM,
            _ => false,
        }
    }

    /// Its place in the order in which options are set.
    pub(super) fn place(&self) -> Option<usize> {
        ALL.iter().position(|choice| (choice.level, choice.name) == (self.level, self.name))
    }

    /// Whether it is one of the family or the protocol of such sockets.
    pub(super) fn concerns(&self, (family, kind, protocol): Sort) -> bool {
        match self.level {
            SOL_PACKET => family == libc::AF_PACKET,
            SOL_UDPLITE => protocol == SOL_UDPLITE,
            SOL_RAW => kind == libc::SOCK_RAW && family == libc::AF_INET6,
            _ => true,
        }
    }

    /// Whether sockets of this family and kind can have it set.
    pub(super) fn fits(&self, (family, kind, _): Sort) -> bool {
        match family {
            libc::AF_UNIX => self.level == SOL_SOCKET && UNIX.contains(&self.name),
            libc::AF_PACKET => matches!(self.level, SOL_SOCKET | SOL_PACKET),
            _ => self.of != Of::Datagrams || kind != libc::SOCK_STREAM,
        }
    }

    /// The value that a socket has, or nothing where it has none.
    pub(super) fn value(&self, socket: BorrowedFd<'_>) -> Option<Value> {
        let mut bytes = [0; LONGEST];
        let asked = match (self.level, self.name) {
            (SOL_TCP, TCP_CONGESTION) => CONGESTION_CONTROL,
            (SOL_IP, IP_OPTIONS) => LONGEST,
            _ => 8,
        };
        let length = socket::option(socket, self.level, self.name, &mut bytes[..asked]).ok()?;
        Some(Value { bytes, length })
    }
}

/// The value of an option, as the kernel tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Value {
    bytes: [u8; LONGEST],
    length: usize,
}

impl std::ops::Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
