use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_types::NodeName;

use crate::link::Act;
use crate::{Closer, Counters, Link};

/// Bytes under way in one direction before a writer waits.
const CAPACITY: usize = 1 << 20;

/// Two ends of a link within this process, for tests. The peers are called `a` (of the second) and `b` (of the first).
pub fn memory_pair() -> (MemoryLink, MemoryLink) {
    // The names are constants that obey the rules for names; see the test.
    match ("a".parse(), "b".parse()) {
        (Ok(a), Ok(b)) => memory_pair_between(a, b),
        _ => unreachable!("a and b are node names"),
    }
}

/// The ends at node `a` and at node `b`, in this order.
pub fn memory_pair_between(a: NodeName, b: NodeName) -> (MemoryLink, MemoryLink) {
    let shared = Arc::new(Shared { state: Mutex::new(State::default()), changed: Condvar::new() });
    let end =
        |side, peer| MemoryLink { shared: shared.clone(), side, peer, timeout: None, counters: Counters::default() };
    (end(0, b), end(1, a))
}

/// One end of an in-memory link that behaves as a network one: it blocks, times out, pushes back and can be cut.
#[derive(Debug)]
pub struct MemoryLink {
    shared: Arc<Shared>,
    /// Index of the direction that this end writes.
    side: usize,
    peer: NodeName,
    timeout: Option<Duration>,
    counters: Counters,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    directions: [Direction; 2],
    cut: bool,
}

#[derive(Debug, Default)]
struct Direction {
    bytes: VecDeque<u8>,
    /// The writer has ended it in good order.
    ended: bool,
    /// Bytes that still get through before the link is cut.
    until_cut: Option<usize>,
}

impl State {
    /// Nothing can be sent any more, either way; what is under way can still be read.
    fn is_cut(&self) -> bool {
        self.cut || self.directions.iter().any(|d| d.until_cut == Some(0))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cut(&self) {
        let mut state = self.lock();
        state.cut = true;
        for direction in &mut state.directions {
            direction.bytes.clear();
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl MemoryLink {
    /// Breaks the link at once, both ways; what is under way is lost.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// Breaks the link, both ways, as soon as this end has written `bytes` more bytes: these arrive, nothing after them does.
    pub fn cut_after(&self, bytes: usize) {
        self.shared.lock().directions[self.side].until_cut = Some(bytes);
        self.shared.changed.notify_all();
    }

    /// Waits until `ready` gives something, the link is cut, or the time is up.
    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<io::Result<T>>) -> io::Result<T> {
        let deadline = self.timeout.map(|t| Instant::now() + t);
        let mut state = self.shared.lock();
        loop {
            if let Some(result) = ready(&mut state) {
                self.shared.changed.notify_all();
                return result;
            }
            state = match deadline {
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::Error::new(ErrorKind::TimedOut, "the peer did not answer in the time allowed"));
                    }
                    self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

fn reset<T>() -> Option<io::Result<T>> {
    Some(Err(ErrorKind::ConnectionReset.into()))
}

impl Link for MemoryLink {
    fn peer(&self) -> &NodeName {
        &self.peer
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout == Some(Duration::ZERO) {
            return Err(ErrorKind::InvalidInput.into());
        }
        self.timeout = timeout;
        Ok(())
    }

    fn set_pace(&mut self, _bytes_a_second: Option<u64>) -> io::Result<()> {
        // What never leaves the process is not in anybody's way.
        Ok(())
    }

    fn set_in_flight(&mut self, _bytes: usize) -> io::Result<()> {
        Ok(())
    }

    fn give_way(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn is_narrow(&self) -> bool {
        false
    }

    fn in_flight(&mut self) -> io::Result<usize> {
        let state = self.shared.lock();
        if state.is_cut() {
            return Err(ErrorKind::ConnectionReset.into());
        }
        Ok(state.directions[self.side].bytes.len())
    }

    fn closer(&self) -> Closer {
        let shared = Arc::downgrade(&self.shared);
        Closer::new(move |act| {
            if act != Act::LiftPace
                && let Some(shared) = shared.upgrade()
            {
                shared.cut();
            }
        })
    }

    fn counters(&self) -> Counters {
        self.counters.clone()
    }
}

impl Read for MemoryLink {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        let from = 1 - self.side;
        let n = self.wait(|state| {
            let cut = state.is_cut();
            let direction = &mut state.directions[from];
            match direction.bytes.read(buf) {
                // As with a network, what was sent before the cut arrives before the cut is noticed.
                Ok(0) if cut => reset(),
                Ok(0) if direction.ended => Some(Ok(0)),
                Ok(0) => None,
                other => Some(other),
            }
        })?;
        self.counters.add_received(n);
        Ok(n)
    }
}

impl Write for MemoryLink {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        let side = self.side;
        let n = self.wait(|state| {
            if state.is_cut() {
                return reset();
            }
            if state.directions[1 - side].ended {
                return Some(Err(ErrorKind::BrokenPipe.into()));
            }
            let direction = &mut state.directions[side];
            let room = CAPACITY.saturating_sub(direction.bytes.len());
            let n = buf.len().min(room).min(direction.until_cut.unwrap_or(usize::MAX));
            if n == 0 {
                return None;
            }
            direction.bytes.extend(&buf[..n]);
            direction.until_cut = direction.until_cut.map(|left| left - n);
            Some(Ok(n))
        })?;
        self.counters.add_sent(n);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.shared.lock().directions[self.side].ended = true;
        self.shared.changed.notify_all();
    }
}
