//! Raw frames: packet sockets (packet(7)) and tap devices, both with the virtio-net header that keeps frames right that
//! are larger than the link's MTU (GSO) or whose checksum is still to be filled in.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};

/// Bytes of the header before each frame, `struct virtio_net_hdr`.
pub const OFFLOAD_HEADER: usize = 10;
/// A protocol of [`PacketSocket::listen`]: every frame, seen before any filter of the kernel.
pub const ALL: u16 = libc::ETH_P_ALL as u16;
/// A protocol of [`PacketSocket::listen`]: IPv4 that has passed the kernel's filters at the device.
pub const IPV4: u16 = libc::ETH_P_IP as u16;
/// A protocol of [`PacketSocket::listen`]: IPv6 that has passed the kernel's filters at the device.
pub const IPV6: u16 = libc::ETH_P_IPV6 as u16;

/// Where in a frame without a VLAN tag the header of IPv4 says what it carries.
pub const IPV4_PROTOCOL_AT: usize = 14 + 9;
/// The same of IPv6.
pub const IPV6_PROTOCOL_AT: usize = 14 + 6;

/// The EtherType that is reserved for all times (IANA, IEEE 802 Numbers).
const NO_PROTOCOL: u16 = 0xffff;

// The kernel's include/uapi/linux/if_packet.h and filter.h.
const SOL_PACKET: libc::c_int = 263;
const PACKET_STATISTICS: libc::c_int = 6;
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const SKF_AD_OFF: u32 = 0xffff_f000;
const SKF_AD_VLAN_TAG_PRESENT: u32 = 48;

const _: () = assert!(size_of::<libc::sockaddr_ll>() == 20 && size_of::<libc::ifreq>() == 40);

/// A step of a classic BPF program.
fn filter(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// A packet socket of the calling thread's network namespace. It neither waits nor sees what the machine itself sends;
/// everything it receives or sends begins with [`OFFLOAD_HEADER`] bytes.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// Opens one that receives nothing before [`listen`](Self::listen).
    ///
    /// # Errors
    /// The system's refusal; it needs CAP_NET_RAW and Linux 4.20.
    pub fn open() -> io::Result<Self> {
        let this = Self(crate::socket::new(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, 0)?);
        this.set(SOL_PACKET, PACKET_VNET_HDR, &1i32)?;
        this.set(SOL_PACKET, PACKET_IGNORE_OUTGOING, &1i32)?;
        this.filter(&[])?;
        Ok(this)
    }

    /// From now on it receives only frames of UDP: those of which the header of IPv4 or IPv6 says so itself.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn only_datagrams(&self) -> io::Result<()> {
        // Where a frame has the kind of what it carries; where IPv4 and IPv6 have that of what they carry.
        const KIND: u32 = 12;
        const UDP: u32 = libc::IPPROTO_UDP as u32;
        self.filter(&[
            filter(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, KIND),
            filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 2, IPV4.into()),
            filter(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, IPV4_PROTOCOL_AT as u32),
            filter(libc::BPF_JMP | libc::BPF_JA, 0, 0, 2),
            filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 2, IPV6.into()),
            filter(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, IPV6_PROTOCOL_AT as u32),
            filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, UDP),
            filter(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        ])
    }

    /// From now on it receives the frames that come to the end of this part of a program.
    fn filter(&self, wanted: &[libc::sock_filter]) -> io::Result<()> {
        // A frame with a VLAN tag is for another network; its tag is not among its bytes.
        let mut program = vec![
            filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT),
            filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, 0),
            filter(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        ];
        program.extend(wanted);
        program.push(filter(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        self.set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    fn set<T>(&self, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
        let (data, length) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: `data` points at `length` bytes of a live value, and so does what the value itself points at.
        match unsafe { libc::setsockopt(self.0.as_raw_fd(), level, option, data, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Bounds what waits to be received, in bytes of kernel memory. Goes beyond `net.core.rmem_max` with CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn receive_buffer(&self, bytes: usize) -> io::Result<()> {
        // The kernel doubles what it is given.
        let half = bytes / 2;
        setsockopt(&self.0, sockopt::RcvBufForce, &half).or_else(|_| setsockopt(&self.0, sockopt::RcvBuf, &half))?;
        Ok(())
    }

    /// Binds it to the interface of that index: from now on it receives frames of `protocol`, none if that is 0, and sends
    /// there. Takes microseconds.
    ///
    /// # Errors
    /// The system's refusal, e.g. that there is no such interface.
    pub fn listen(&self, interface: u32, protocol: u16) -> io::Result<()> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol.to_be(),
            sll_ifindex: interface.cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of_val(&address) as libc::socklen_t;
        // SAFETY: `address` is alive and `length` bytes long.
        match unsafe { libc::bind(self.0.as_raw_fd(), (&raw const address).cast(), length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ends what [`listen`](Self::listen) began on that interface. When this returns no processor is carrying a frame any more
    /// that this socket has seen: each has come to the end of its way, or waits in a queue. That takes milliseconds. What was received can still be read.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn listen_no_more(&self, interface: u32) -> io::Result<()> {
        // To bind a socket to protocol 0 would leave it as it is.
        self.listen(interface, NO_PROTOCOL)
    }

    /// Receives a frame, if there is one: its whole length with the header, even if that is more than the buffer's.
    ///
    /// # Errors
    /// The system's refusal, e.g. once that the interface went down.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match recv(self.0.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC) {
            Ok(length) => Ok(Some(length)),
            Err(nix::errno::Errno::EAGAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Sends a frame with its header.
    ///
    /// # Errors
    /// The system's refusal, also that there is no room.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        send(self.0.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    /// How many frames the kernel has dropped for lack of room since the last call.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn dropped(&self) -> io::Result<u32> {
        // struct tpacket_stats: packets, drops.
        let mut stats = [0u32; 2];
        let mut length = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: `stats` has room for the `length` bytes that the kernel may write.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                SOL_PACKET,
                PACKET_STATISTICS,
                stats.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if result == 0 { Ok(stats[1]) } else { Err(io::Error::last_os_error()) }
    }
}

impl PacketSocket {
    /// Whether half of the room for what waits to be received is taken.
    ///
    /// # Errors
    /// The system's refusal; it needs Linux 4.12.
    pub fn is_half_full(&self) -> io::Result<bool> {
        // The kernel's include/uapi/linux/sock_diag.h, `SK_MEMINFO_…`: what is taken, and the bound. Of the others nothing is asked.
        let mut sizes = [0u32; 2];
        let mut length = size_of_val(&sizes) as libc::socklen_t;
        // SAFETY: `sizes` has room for the `length` bytes that the kernel may write.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                sizes.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if result == 0 { Ok(sizes[0] >= sizes[1] / 2) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A tap device of the calling thread's network namespace: what is written to it arrives there as if from a wire. It
/// vanishes with this value, and with its process.
#[derive(Debug)]
pub struct TapDevice {
    file: File,
    name: String,
}

impl TapDevice {
    /// Makes one, down, named by `pattern` in which `%d` stands for the first number that is free.
    ///
    /// # Errors
    /// No `/dev/net/tun`, or the system's refusal.
    pub fn make(pattern: &str) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        // SAFETY: zero is a valid value for each of its fields.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if pattern.len() >= request.ifr_name.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the name is too long for an interface"));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(pattern.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
        // SAFETY: TUNSETIFF reads and writes one ifreq, which is alive.
        if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let name = request.ifr_name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect();
        Ok(Self { file, name })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets a frame with its [`OFFLOAD_HEADER`] arrive at the device; it has been processed when this returns.
    ///
    /// # Errors
    /// The system's refusal, e.g. that the device is down or the header is nonsense.
    pub fn inject(&self, frame: &[u8]) -> io::Result<()> {
        (&self.file).write(frame).map(drop)
    }
}
