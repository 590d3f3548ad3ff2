use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::linger;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use tranship_sys::pacing;

use crate::link::Act;
use crate::pacer::{self, LOOK, Pacer};
use crate::{Closer, Counters};

/// Wanted size of each socket buffer in bytes.
const SOCKET_BUFFER: usize = 4 << 20;
const KEEPALIVE_IDLE_S: u32 = 5;
const KEEPALIVE_INTERVAL_S: u32 = 2;
const KEEPALIVE_PROBES: u32 = 3;
const USER_TIMEOUT_MS: u32 = 10_000;

/// A TCP socket set up for a link, which counts its bytes and can have a deadline.
pub(crate) struct Socket {
    stream: Arc<TcpStream>,
    /// A [`Closer`] has broken it.
    closed: Arc<AtomicBool>,
    counters: Counters,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
    /// Bytes a second that were allowed.
    pace: Option<u64>,
    way: Option<Way>,
}

/// How a socket that gives way has fared since the last look.
struct Way {
    pacer: Pacer,
    acknowledged: u64,
    looked: Instant,
    /// When the last write was done.
    written: Instant,
}

impl Socket {
    pub fn new(stream: Arc<TcpStream>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // A peer whose machine has died is noticed in about ten seconds, whether data is under way (user timeout) or not
        // (keepalive): tcp(7).
        setsockopt(&stream, sockopt::KeepAlive, &true)?;
        setsockopt(&stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
        setsockopt(&stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
        setsockopt(&stream, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
        setsockopt(&stream, sockopt::TcpUserTimeout, &USER_TIMEOUT_MS)?;
        // Only by the privileged option: the plain one is cut to net.core.{r,w}mem_max (often 208 KiB) and at the same
        // time ends the kernel's own tuning, which goes higher.
        let _ = setsockopt(&stream, sockopt::SndBufForce, &SOCKET_BUFFER);
        let _ = setsockopt(&stream, sockopt::RcvBufForce, &SOCKET_BUFFER);
        Ok(Self::plain(stream))
    }

    /// A socket that was set up already, or need not be.
    pub fn plain(stream: Arc<TcpStream>) -> Self {
        Self {
            stream,
            closed: Arc::default(),
            counters: Counters::default(),
            timeout: None,
            deadline: None,
            pace: None,
            way: None,
        }
    }

    /// The connection itself.
    pub fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Applies to each single read and write from now on.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout;
        self.deadline = None;
        self.stream.set_read_timeout(timeout)?;
        self.stream.set_write_timeout(timeout)
    }

    pub fn set_pace(&mut self, bytes_a_second: Option<u64>) -> io::Result<()> {
        self.pace = bytes_a_second;
        self.apply_pace()
    }

    /// A kernel that does not tell how a socket fares has it go on as before.
    pub fn give_way(&mut self) -> io::Result<()> {
        if let Ok(course) = pacing::course(self.stream.as_fd()) {
            let now = Instant::now();
            let acknowledged = course.acknowledged;
            self.way = Some(Way { pacer: Pacer::new(), acknowledged, looked: now, written: now });
        }
        self.apply_pace()
    }

    /// Whether one link fills the way, as far as that is known.
    pub fn is_narrow(&self) -> bool {
        self.pace.is_none() && self.way.as_ref().is_some_and(|way| way.pacer.is_narrow())
    }

    fn apply_pace(&self) -> io::Result<()> {
        pacing::set_pacing(self.stream.as_fd(), self.kept_pace())
    }

    /// The pace that is kept to, in bytes a second.
    fn kept_pace(&self) -> Option<u64> {
        let found = self.way.as_ref().map(|way| way.pacer.pace());
        self.pace.into_iter().chain(found).min()
    }

    /// Between two writes: looks how it fares if it gives way and the last look is long enough ago.
    fn look(&mut self, begun: Instant) -> io::Result<()> {
        let Some(way) = &mut self.way else { return Ok(()) };
        let now = Instant::now();
        let rested = begun.duration_since(way.written) > LOOK;
        way.written = now;
        let since = now.duration_since(way.looked);
        let course = pacing::course(self.stream.as_fd())?;
        way.pacer.note(course.round_trip.saturating_sub(course.shortest));
        if since < LOOK && !rested {
            return Ok(());
        }
        let arrived = course.acknowledged.saturating_sub(way.acknowledged);
        (way.acknowledged, way.looked) = (course.acknowledged, now);
        // Where nothing was to be sent for a while, what arrived is not what the link carries.
        if rested {
            way.pacer.rest();
            return Ok(());
        }
        way.pacer.look(arrived as f64 / since.as_secs_f64());
        self.apply_pace()
    }

    /// The kernel counts its own bookkeeping too, and doubles what is asked for to make up for that.
    pub fn set_in_flight(&self, bytes: usize) -> io::Result<()> {
        Ok(setsockopt(&self.stream, sockopt::SndBuf, &bytes)?)
    }

    pub fn in_flight(&self) -> io::Result<usize> {
        // The kernel may go on sending for a while what nobody waits for any more.
        if self.closed.load(Ordering::Relaxed) {
            return Err(io::Error::new(ErrorKind::BrokenPipe, "the link was broken on this node"));
        }
        if let Some(error) = self.stream.take_error()? {
            return Err(as_timeout(error));
        }
        pacing::unacknowledged(self.stream.as_fd())
    }

    /// All that follows together must be done by then, until a timeout is set instead.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
    }

    pub fn closer(&self) -> Closer {
        let (stream, closed) = (Arc::downgrade(&self.stream), Arc::clone(&self.closed));
        Closer::new(move |act| {
            let stream = stream.upgrade();
            closed.fetch_or(act != Act::LiftPace, Ordering::Relaxed);
            let Some(stream) = stream else { return };
            match act {
                Act::LiftPace => drop(pacing::set_pacing(stream.as_fd(), None)),
                Act::Shutdown => drop(stream.shutdown(Shutdown::Both)),
                Act::Reset => {
                    // socket(7): close(2) then drops what is in the send buffer; tcp_close() in net/ipv4/tcp.c resets.
                    let _ = setsockopt(&stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 });
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        })
    }

    pub fn shutdown(&self, how: Shutdown) {
        let _ = self.stream.shutdown(how);
    }

    pub fn set_nonblocking(&self) {
        let _ = self.stream.set_nonblocking(true);
    }

    /// Reads what there is, after waiting for something.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(left) = self.left()? {
                self.stream.set_read_timeout(Some(left))?;
            }
            match (&*self.stream).read(buf) {
                Ok(n) => {
                    self.counters.add_received(n);
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(as_timeout(e)),
            }
        }
    }

    pub fn write_all(&mut self, mut buf: &[u8]) -> io::Result<()> {
        let begun = self.way.as_ref().map(|_| Instant::now());
        while !buf.is_empty() {
            if let Some(left) = self.left()? {
                self.stream.set_write_timeout(Some(left))?;
            }
            match self.write(buf) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.counters.add_sent(n);
                    buf = &buf[n..];
                    begun.map_or(Ok(()), |begun| self.look(begun))?;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(as_timeout(e)),
            }
        }
        Ok(())
    }

    /// Writes something, after waiting for room where there is none; only then the clock is read. Where it gives way, that may become a segment, to
    /// which the kernel adds nothing.
    fn write(&self, mut buf: &[u8]) -> io::Result<usize> {
        let mut flags = MsgFlags::MSG_NOSIGNAL;
        if let Some(most) = self.way.as_ref().and_then(|_| pacer::segment(self.kept_pace()?)) {
            buf = &buf[..buf.len().min(most)];
            flags |= MsgFlags::MSG_EOR;
        }
        let at_once = send(self.stream.as_raw_fd(), buf, flags | MsgFlags::MSG_DONTWAIT);
        if at_once != Err(Errno::EAGAIN) {
            return Ok(at_once?);
        }
        let start = Instant::now();
        let written = send(self.stream.as_raw_fd(), buf, flags);
        self.counters.add_blocked(start.elapsed());
        Ok(written?)
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        match deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(timed_out()),
        }
    }
}

fn timed_out() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "the peer did not answer in the time allowed")
}

/// Linux reports an expired SO_RCVTIMEO or SO_SNDTIMEO as EAGAIN: socket(7).
fn as_timeout(e: io::Error) -> io::Error {
    if e.kind() == ErrorKind::WouldBlock { timed_out() } else { e }
}
