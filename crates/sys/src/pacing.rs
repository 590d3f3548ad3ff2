//! How fast a TCP socket sends (socket(7), SO_MAX_PACING_RATE), how much is on its way (tcp(7), SIOCOUTQ) and how that fares (TCP_INFO).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Has the kernel send no more than so many bytes a second on this socket; `None`: as many as it can.
pub fn set_pacing(socket: BorrowedFd<'_>, bytes_a_second: Option<u64>) -> io::Result<()> {
    let rate: u64 = bytes_a_second.unwrap_or(u64::MAX);
    // SAFETY: the kernel reads the eight bytes of `rate`, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const rate).cast(),
            size_of::<u64>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that were written to this socket and that the peer's host has not acknowledged.
pub fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an int to `bytes`, which lives until the call returns. SIOCOUTQ has the number of TIOCOUTQ.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { Ok(usize::try_from(bytes).unwrap_or_default()) } else { Err(io::Error::last_os_error()) }
}

/// How what a TCP socket sends fares on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Course {
    /// Bytes that the peer's host has acknowledged, since the connection was opened.
    pub acknowledged: u64,
    /// Bytes that came from there, read or not.
    pub received: u64,
    /// How long a round trip takes at present: the kernel's running mean.
    pub round_trip: Duration,
    /// How long the shortest took, of the last minutes.
    pub shortest: Duration,
}

/// The kernel's `struct tcp_info` (linux/tcp.h) up to what is read of it, all of which Linux 4.6 has.
#[repr(C)]
#[derive(Default)]
struct TcpInfo {
    states: [u8; 8],
    first: [u32; 15],
    rtt: u32,
    second: [u32; 8],
    rates: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    segments: [u32; 3],
    min_rtt: u32,
}

const _: () = assert!(
    offset_of!(TcpInfo, rtt) == 68
        && offset_of!(TcpInfo, bytes_acked) == 120
        && offset_of!(TcpInfo, min_rtt) == 148
        && size_of::<TcpInfo>() == 152
);

/// Asks the kernel how what was written to this TCP socket fares.
///
/// # Errors
/// The kernel's; `Unsupported` where it does not tell as much.
pub fn course(socket: BorrowedFd<'_>) -> io::Result<Course> {
    let mut info = TcpInfo::default();
    let mut len = size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `info`, which is as long and made of integers, and how many to `len`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < size_of::<TcpInfo>() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let micros = |time: u32| Duration::from_micros(time.into());
    let (acknowledged, received) = (info.bytes_acked, info.bytes_received);
    Ok(Course { acknowledged, received, round_trip: micros(info.rtt), shortest: micros(info.min_rtt) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn a_paced_socket_takes_its_time() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut out = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut to, _) = listener.accept().unwrap();
        set_pacing(out.as_fd(), Some(4_000_000)).unwrap();
        let start = Instant::now();
        let reader = std::thread::spawn(move || io::copy(&mut (&mut to).take(2_000_000), &mut io::sink()).unwrap());
        out.write_all(&vec![7; 2_000_000]).unwrap();
        assert_eq!(reader.join().unwrap(), 2_000_000);
        // Half a second at that rate; the first bytes go at once.
        assert!(start.elapsed() > Duration::from_millis(250), "{:?}", start.elapsed());
        set_pacing(out.as_fd(), None).unwrap();
    }

    #[test]
    fn what_the_peer_s_host_has_is_not_on_its_way() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut out = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (to, _) = listener.accept().unwrap();
        assert_eq!(unacknowledged(out.as_fd()).unwrap(), 0);
        out.set_nonblocking(true).unwrap();
        // As much as fits: the peer does not read.
        let noise = vec![7; 1 << 20];
        while out.write(&noise).is_ok() {}
        assert!(unacknowledged(out.as_fd()).unwrap() > 0);
        let reader = std::thread::spawn(move || io::copy(&mut &to, &mut io::sink()).unwrap());
        let deadline = Instant::now() + Duration::from_secs(10);
        while unacknowledged(out.as_fd()).unwrap() > 0 {
            assert!(Instant::now() < deadline, "what was read is still said to be on its way");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(out);
        reader.join().unwrap();
    }

    #[test]
    fn the_course_tells_what_has_arrived_and_how_long_that_takes() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut out = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (to, _) = listener.accept().unwrap();
        let before = course(out.as_fd()).unwrap();
        out.write_all(&[7; 100_000]).unwrap();
        (&to).read_exact(&mut [0; 100_000]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while course(out.as_fd()).unwrap().acknowledged < before.acknowledged + 100_000 {
            assert!(Instant::now() < deadline, "what was read is not said to have arrived");
            std::thread::sleep(Duration::from_millis(1));
        }
        let Course { acknowledged, received, round_trip, shortest } = course(out.as_fd()).unwrap();
        assert_eq!(acknowledged, before.acknowledged + 100_000);
        assert_eq!((received, course(to.as_fd()).unwrap().received), (0, 100_000));
        assert!(!shortest.is_zero() && shortest <= round_trip * 2 && round_trip < Duration::from_secs(1));
    }
}
