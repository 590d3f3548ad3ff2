//! What the way from this node's memory to the other's carries: pages of noise, read, encrypted, sent and stored as a
//! container's would be, and then forgotten.
//!
//! ```text
//!   source                         destination
//!   Probe { bytes } ─────────────▶
//!   Pages … ═════════════════════▶ into a scratch arena
//!                   ◀───────────── Probed
//! ```
//!
//! Each trial is four times as long as the one before, until one takes long enough, twice, to tell something: so a slow link is not
//! burdened, and a fast one not underestimated.

use std::io::{IoSliceMut, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use tranship_sys::arena::Arena;
use tranship_sys::threads::{self, Beside};
use tranship_types::{AddressSpaceId, PageRange};
use tranship_wire::message::{Request, Response};
use tranship_wire::{FrameHeader, Kind, ReadError, WriteError};

/// Most bytes in one trial on one link.
pub const MOST: u64 = 64 << 20;
/// Bytes of the first trial.
const LEAST: u64 = 64 << 10;
/// Bytes in a frame.
const CHUNK: u64 = 1 << 20;
/// Noise that is sent again and again, and room to which it goes.
const SCRATCH: u64 = 16 << 20;
/// A trial that took as long as this is believed.
const LONG_ENOUGH: Duration = Duration::from_millis(150);

/// A probe that did not work.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The link broke on the way there.
    #[error("the link cannot be measured: {0}")]
    Send(#[from] WriteError),
    /// The link broke on the way back, or what came is not allowed.
    #[error("the link cannot be measured: {0}")]
    Receive(#[from] ReadError),
    /// The peer does not want to.
    #[error("the link cannot be measured: {0}")]
    Refused(String),
    /// There is no memory for it.
    #[error("the link cannot be measured, there is no memory for it: {0}")]
    Memory(#[from] std::io::Error),
}

/// Measures over several links at once; returns bytes of pages a second. Ends with the first trial that shows that they carry `enough`.
///
/// # Errors
/// If a link breaks, or the peer refuses.
pub fn measure<L: Read + Write + Send>(links: &mut [L], enough: Option<f64>) -> Result<f64, ProbeError> {
    let noise = noise();
    let (mut bytes, mut best, mut again) = (LEAST, 0.0f64, false);
    loop {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let trials: Vec<_> =
                links.iter_mut().map(|link| threads::beside(scope, "probe", || trial(link, bytes, &noise))).collect();
            trials.into_iter().try_for_each(Beside::join)
        })?;
        let took = start.elapsed();
        best = best.max((bytes * links.len() as u64) as f64 / took.as_secs_f64().max(1e-6));
        if enough.is_some_and(|enough| best >= enough) {
            return Ok(best);
        }
        match (took >= LONG_ENOUGH, bytes >= MOST) {
            (false, true) => return Ok(best),
            (false, false) => (bytes, best, again) = ((bytes * 4).min(MOST), 0.0, false),
            (true, _) if again => return Ok(best),
            // A busy machine can hold up even a short one: it is the link only if that happens twice.
            (true, _) => again = true,
        }
    }
}

/// Bytes that no compression makes fewer.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..SCRATCH / 8).flat_map(|_| next().to_le_bytes()).collect()
}

fn trial<L: Read + Write>(link: &mut L, bytes: u64, noise: &[u8]) -> Result<(), ProbeError> {
    tranship_wire::write_message(link, &Request::Probe { bytes })?;
    let mut buffer = vec![0; CHUNK as usize];
    let mut sent = 0;
    while sent < bytes {
        let length = CHUNK.min(bytes - sent);
        let at = sent % SCRATCH;
        let part = &mut buffer[..length as usize];
        // The way of a container's pages, this process being the container.
        let from = RemoteIoVec { base: noise.as_ptr() as usize + at as usize, len: part.len() };
        process_vm_readv(Pid::this(), &mut [IoSliceMut::new(part)], &[from]).map_err(std::io::Error::from)?;
        let range = PageRange { start: at, end: at + length };
        tranship_wire::write_header(link, &FrameHeader::Pages { space: AddressSpaceId(1), range })?;
        link.write_all(part).map_err(WriteError::Io)?;
        sent += length;
    }
    link.flush().map_err(WriteError::Io)?;
    match tranship_wire::read_message(link)? {
        Response::Probed => Ok(()),
        Response::Failed { message, .. } => Err(ProbeError::Refused(message)),
        other => Err(ProbeError::Refused(format!("the peer gave an answer that does not fit: {other:?}"))),
    }
}

/// Where a destination puts what it is sent for a probe.
#[derive(Debug)]
pub struct Sink(Arc<Arena>);

impl Sink {
    /// Takes the memory, 16 MiB.
    ///
    /// # Errors
    /// If there is none.
    pub fn new() -> std::io::Result<Self> {
        let arena = Arena::new(SCRATCH)?;
        arena.populate(SCRATCH)?;
        arena.populated()?;
        arena.allocate(SCRATCH as usize)?;
        Ok(Self(arena))
    }

    /// Receives a trial of `bytes`, at most [`MOST`].
    ///
    /// # Errors
    /// If the link breaks, or brings what was not announced.
    pub fn receive<R: Read>(&self, link: &mut R, bytes: u64) -> Result<(), ReadError> {
        let mut buffer = Vec::new();
        let mut received = 0;
        while received < bytes {
            let range = match tranship_wire::read_header(link)? {
                FrameHeader::Pages { range, .. } if range.len() <= bytes - received => range,
                FrameHeader::Pages { range, .. } => {
                    return Err(ReadError::Incomplete { sent: range.len(), received: bytes - received });
                }
                other => return Err(ReadError::Unexpected { expected: Kind::Pages, found: other.kind() }),
            };
            buffer.resize(range.len() as usize, 0);
            link.read_exact(&mut buffer).map_err(ReadError::Io)?;
            // Somewhere within; what is not there (a peer may name any address) goes nowhere.
            self.0.replace(range.start % SCRATCH, &buffer);
            received += range.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn answer(mut link: UnixStream) -> Result<u64, ReadError> {
        let sink = Sink::new().unwrap();
        let mut total = 0;
        loop {
            match tranship_wire::read_message(&mut link) {
                Ok(Request::Probe { bytes }) => {
                    sink.receive(&mut link, bytes)?;
                    total += bytes;
                    tranship_wire::write_message(&mut link, &Response::Probed).unwrap();
                }
                Ok(other) => panic!("{other:?}"),
                Err(ReadError::Closed) => return Ok(total),
                Err(error) => return Err(error),
            }
        }
    }

    #[test]
    fn a_fast_link_gets_the_longest_trial_and_a_rate_comes_out() {
        let (here, there) = UnixStream::pair().unwrap();
        let answering = std::thread::spawn(move || answer(there));
        let rate = measure(&mut [here], None).unwrap();
        assert!(rate > 1e6, "{rate}");
        assert!(answering.join().unwrap().unwrap() >= LEAST);
    }

    #[test]
    fn more_than_was_announced_is_refused() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let range = PageRange { start: 0, end: 8192 };
        tranship_wire::write_header(&mut here, &FrameHeader::Pages { space: AddressSpaceId(1), range }).unwrap();
        assert!(Sink::new().unwrap().receive(&mut there, 4096).is_err());
    }

    #[test]
    fn a_peer_that_refuses_is_quoted() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let answering = std::thread::spawn(move || {
            let _: Request = tranship_wire::read_message(&mut there).unwrap();
            Sink::new().unwrap().receive(&mut there, LEAST).unwrap();
            let refusal = Response::Failed { message: "too many probes".into(), blockers: vec![], waiting: None };
            tranship_wire::write_message(&mut there, &refusal).unwrap();
        });
        assert!(measure(&mut [here], None).unwrap_err().to_string().contains("too many probes"));
        answering.join().unwrap();
    }
}
