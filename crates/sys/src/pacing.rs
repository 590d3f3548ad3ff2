//! How fast a TCP socket sends (socket(7), SO_MAX_PACING_RATE), and how much is on its way (tcp(7), SIOCOUTQ).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

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
}
