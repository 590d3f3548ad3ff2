use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tranship_types::NodeName;

/// A two-way stream of bytes to a peer whose name is known. One thread uses it at a time.
///
/// What is written may wait in a buffer until `flush`; a `read` flushes first, so that a request is never left lying while
/// its answer is awaited. `Ok(0)` from `read` means that the peer has ended the link in good order; a link that breaks
/// gives an error.
pub trait Link: Read + Write + Send {
    /// Who is at the other end.
    fn peer(&self) -> &NodeName;

    /// How long one read or write may wait for the peer; `None` waits for ever (a dead peer is still noticed). A read that
    /// times out ([`io::ErrorKind::TimedOut`]) can be repeated; after a write that does, the link is broken.
    ///
    /// # Errors
    /// Those of the socket; a zero duration.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Sends no more than so many bytes a second from now on; `None`: as many as it can.
    ///
    /// # Errors
    /// Those of the socket.
    fn set_pace(&mut self, bytes_a_second: Option<u64>) -> io::Result<()>;

    /// Keeps no more than about so many bytes on their way to the peer: what is written after that waits, so that other
    /// links to it need not queue behind more.
    ///
    /// # Errors
    /// Those of the socket.
    fn set_in_flight(&mut self, bytes: usize) -> io::Result<()>;

    /// Has it send, from now on, a little less than what the way to the peer carries, so that what others send there does not
    /// queue behind its own. It finds out by itself how much that is; a pace that was set is kept to.
    ///
    /// # Errors
    /// Those of the socket.
    fn give_way(&mut self) -> io::Result<()>;

    /// Whether it gives way, and has found the way to be so narrow that one link fills it: a second one that gives way would only take this one's
    /// queue for somebody else's. Not where a pace was set.
    fn is_narrow(&self) -> bool;

    /// Bytes that were written to it and that the peer's host has not got yet.
    ///
    /// # Errors
    /// Those of the socket; what broke the link, if it is broken.
    fn in_flight(&mut self) -> io::Result<usize>;

    /// A handle that breaks the link from any thread.
    fn closer(&self) -> Closer;

    /// The link's counters, to be read from any thread.
    fn counters(&self) -> Counters;
}

/// Breaks a link from another thread: whoever waits on it gets an error at once. Does not keep the link alive.
#[derive(Clone)]
pub struct Closer(Arc<dyn Fn(Act) + Send + Sync>);

/// What is done to a link from another thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is broken. The kernel still sends what was written.
    Shutdown,
    /// It is broken. The kernel drops what was written and not sent, and resets the connection when its owner drops it.
    Reset,
    /// It sends as fast as it can.
    LiftPace,
}

impl Closer {
    /// A handle that breaks a link by this.
    pub fn calling(close: impl Fn() + Send + Sync + 'static) -> Self {
        Self::new(move |act| match act {
            Act::Shutdown | Act::Reset => close(),
            Act::LiftPace => {}
        })
    }

    pub(crate) fn new(close: impl Fn(Act) + Send + Sync + 'static) -> Self {
        Self(Arc::new(close))
    }

    /// Breaks the link; does nothing if it is gone already. What was written before is still sent.
    pub fn close(&self) {
        (self.0)(Act::Shutdown);
    }

    /// Breaks the link and drops what was written and not sent, so that the peer's host learns of the end without waiting for
    /// megabytes on a slow link.
    pub fn reset(&self) {
        (self.0)(Act::Reset);
    }

    /// Lifts the pace that was set, also for what was written already. It holds again once its owner sets it anew.
    pub fn lift_pace(&self) {
        (self.0)(Act::LiftPace);
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Closer")
    }
}

/// Counts a link's bytes as they are on the wire, TLS included, TCP/IP not.
#[derive(Debug, Clone, Default)]
pub struct Counters(Arc<[AtomicU64; 3]>);

impl Counters {
    /// Bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }

    /// How long writers have waited so far because what was written before had not left.
    pub fn blocked(&self) -> Duration {
        Duration::from_nanos(self.0[2].load(Ordering::Relaxed))
    }

    pub(crate) fn add_sent(&self, n: usize) {
        self.0[0].fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_received(&self, n: usize) {
        self.0[1].fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_blocked(&self, time: Duration) {
        self.0[2].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}
