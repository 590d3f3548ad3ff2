//! Handshakes in another process.
//!
//! ```text
//! agent                                           TLS process
//!   Request, the connection, a reply socket ─────▶ a thread for each
//!   ◀───────────────────────────────────────────── Established, or why not
//! ```
//!
//! The connection stays open in the agent, which may break it at any time. The end of the reply socket without a reply means that
//! the TLS process has ended.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::{Deserialize, Serialize};
use tranship_sys::{descriptor, threads};
use tranship_types::NodeName;
use zeroize::Zeroizing;

use crate::handshake::{Established, Handshakes, Role};
use crate::{TransportError, Verdict};

/// Longest request, in bytes.
const REQUEST: usize = 4096;
/// Longest reply, in bytes.
const REPLY: u64 = 2 << 20;
/// How long beyond the deadline of a handshake the TLS process may take for its reply: a second for the alert, and its own delay.
const GRACE: Duration = Duration::from_secs(2);

/// How long a request may wait for room in the queue.
const QUEUED: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
struct Request {
    role: Role,
    within: Duration,
}

/// Why a handshake has failed: the part of [`TransportError`] that handshakes have.
#[derive(Debug, Serialize, Deserialize)]
enum Refusal {
    Unreachable { code: Option<i32>, timed_out: bool, text: String },
    Untrusted { ours: bool, why: String },
    WrongNode { found: String },
    HungUp,
    Protocol { why: String },
}

impl Refusal {
    fn new(error: &TransportError) -> Self {
        match error {
            TransportError::Unreachable { source, .. } => Refusal::Unreachable {
                code: source.raw_os_error(),
                timed_out: source.kind() == ErrorKind::TimedOut,
                text: source.to_string(),
            },
            TransportError::Untrusted { verdict, why, .. } => {
                Refusal::Untrusted { ours: *verdict == Verdict::Ours, why: why.clone() }
            }
            TransportError::WrongNode { found, .. } => Refusal::WrongNode { found: found.clone() },
            TransportError::HungUp { .. } => Refusal::HungUp,
            TransportError::Protocol { why, .. } => Refusal::Protocol { why: why.clone() },
            other => Refusal::Protocol { why: other.to_string() },
        }
    }

    fn of(self, role: &Role) -> TransportError {
        let remote = role.remote();
        let peer = remote.to_string();
        match self {
            Refusal::Unreachable { code: Some(code), .. } => remote.unreachable(io::Error::from_raw_os_error(code)),
            Refusal::Unreachable { timed_out, text, .. } => {
                let kind = if timed_out { ErrorKind::TimedOut } else { ErrorKind::Other };
                remote.unreachable(io::Error::new(kind, text))
            }
            Refusal::Untrusted { ours, why } => {
                TransportError::Untrusted { peer, verdict: if ours { Verdict::Ours } else { Verdict::Theirs }, why }
            }
            Refusal::WrongNode { found } => match role {
                Role::Client { peer, addr } => {
                    TransportError::WrongNode { expected: peer.clone(), addr: addr.clone(), found }
                }
                Role::Server { .. } => TransportError::Protocol { peer, why: format!("it is {found}") },
            },
            Refusal::HungUp => TransportError::HungUp { peer, addr: remote.addr.to_owned() },
            Refusal::Protocol { why } => TransportError::Protocol { peer, why },
        }
    }
}

/// Threads that wait for requests from the beginning: there may be none to be had later.
const WAITING: usize = 4;

struct Work {
    stream: TcpStream,
    reply: UnixStream,
    request: Request,
}

impl Work {
    /// Its failure is the end of the reply socket.
    fn carry_out(mut self, handshakes: &dyn Handshakes) {
        let stream = Arc::new(self.stream);
        let done = handshakes.shake(&stream, &self.request.role, Instant::now() + self.request.within);
        let done = done.map_err(|error| Refusal::new(&error));
        if let Ok(bytes) = serde_json::to_vec(&done).map(Zeroizing::new) {
            let _ = self.reply.write_all(&bytes);
        }
    }
}

/// What waits for work, and how many threads do.
struct Waiting {
    work: Mutex<mpsc::Receiver<Work>>,
    idle: AtomicUsize,
}

/// Does work until there will be no more.
fn carry_on(waiting: &Waiting, handshakes: &dyn Handshakes) {
    loop {
        let next = waiting.work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(next) = next else { return };
        next.carry_out(handshakes);
        waiting.idle.fetch_add(1, Ordering::Release);
    }
}

/// The TLS process: does handshakes until the other end of `requests` is closed, each on a thread, which then waits for the next one.
/// Where no thread can be started for one, it is done before the next request is looked at.
///
/// # Errors
/// No thread can be started in the beginning, or the socket's.
pub fn serve(requests: &OwnedFd, handshakes: &Arc<dyn Handshakes>) -> io::Result<()> {
    let (to_waiting, work) = mpsc::channel::<Work>();
    let waiting = Arc::new(Waiting { work: Mutex::new(work), idle: AtomicUsize::new(WAITING) });
    for _ in 0..WAITING {
        let (waiting, handshakes) = (Arc::clone(&waiting), Arc::clone(handshakes));
        threads::start("handshake", move || carry_on(&waiting, &*handshakes))?;
    }
    let mut buffer = vec![0; REQUEST];
    loop {
        let (length, descriptors) = match descriptor::receive(requests.as_fd(), &mut buffer) {
            Ok((0, _)) => return Ok(()),
            Ok(received) => received,
            // It lacks descriptors (or the request is none): its sender sees the end of its reply socket.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::InvalidData) => continue,
            Err(error) => return Err(error),
        };
        let Ok([stream, reply]) = <[OwnedFd; 2]>::try_from(descriptors) else { continue };
        let Ok(request) = serde_json::from_slice::<Request>(&buffer[..length]) else { continue };
        let next = Work { stream: stream.into(), reply: reply.into(), request };
        // Nobody else takes from what is idle.
        if waiting.idle.load(Ordering::Acquire) > 0 {
            waiting.idle.fetch_sub(1, Ordering::Relaxed);
        } else {
            let (waiting, its) = (Arc::clone(&waiting), Arc::clone(handshakes));
            if threads::start("handshake", move || carry_on(&waiting, &*its)).is_err() {
                next.carry_out(&**handshakes);
                continue;
            }
        }
        let _ = to_waiting.send(next);
    }
}

/// The agent's end of a TLS process.
#[derive(Debug)]
pub struct TlsProcess {
    requests: OwnedFd,
    node: NodeName,
}

/// A handshake in another process has no result.
#[derive(Debug)]
pub enum Failed {
    /// As in this process.
    Handshake(TransportError),
    /// The TLS process has ended before it was given the connection.
    NotBegun(io::Error),
    /// The TLS process has ended. Whether it has used the connection is not known.
    Ended(io::Error),
    /// The TLS process takes no requests, or has not answered this one in its time: it is stopped, or hangs.
    Silent(io::Error),
}

impl TlsProcess {
    /// The agent's end: `requests` keeps message boundaries, and its other end is [`serve`]d.
    pub fn new(requests: OwnedFd, node: NodeName) -> Self {
        // Without it, a request to one that is stopped would wait for ever once the queue is full.
        let _ = setsockopt(&requests, sockopt::SendTimeout, &TimeVal::milliseconds(QUEUED.as_millis() as i64));
        Self { requests, node }
    }

    /// This node's name.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Requests a handshake, and waits for its end.
    ///
    /// # Errors
    /// [`Failed`].
    pub fn shake(&self, stream: &TcpStream, role: &Role, deadline: Instant) -> Result<Established, Failed> {
        let within = deadline.saturating_duration_since(Instant::now());
        let ours = |error| Failed::Handshake(role.remote().unreachable(error));
        let request = serde_json::to_vec(&Request { role: role.clone(), within }).map_err(|e| ours(e.into()))?;
        if request.len() > REQUEST {
            return Err(ours(io::Error::new(ErrorKind::InvalidInput, "the address is too long")));
        }
        let (reply, theirs) = UnixStream::pair().map_err(ours)?;
        descriptor::send(self.requests.as_fd(), &request, &[stream.as_fd(), theirs.as_fd()]).map_err(|error| {
            // Its queue has been full for this long.
            if error.kind() == ErrorKind::WouldBlock { Failed::Silent(error) } else { Failed::NotBegun(error) }
        })?;
        drop(theirs);
        reply.set_read_timeout(Some(within + GRACE)).map_err(ours)?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(16 << 10));
        match reply.take(REPLY).read_to_end(&mut bytes) {
            Ok(0) => return Err(Failed::Ended(ErrorKind::BrokenPipe.into())),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(Failed::Silent(io::Error::new(
                    ErrorKind::TimedOut,
                    "the agent's TLS process does not answer",
                )));
            }
            Err(error) => return Err(Failed::Ended(error)),
            Ok(_) => {}
        }
        let done = serde_json::from_slice::<Result<Established, Refusal>>(&bytes);
        done.map_err(|error| Failed::Ended(error.into()))?.map_err(|refusal| Failed::Handshake(refusal.of(role)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_keep_what_they_are() {
        let role = Role::Client { peer: "b".parse().unwrap(), addr: "10.0.0.1:1".to_owned() };
        let remote = role.remote();
        let peer = remote.to_string();
        let why = || "for this reason".to_owned();
        for error in [
            remote.unreachable(io::Error::from_raw_os_error(104)),
            remote.unreachable(io::Error::new(ErrorKind::TimedOut, "no answer in the time allowed")),
            TransportError::Untrusted { peer: peer.clone(), verdict: Verdict::Ours, why: why() },
            TransportError::Untrusted { peer: peer.clone(), verdict: Verdict::Theirs, why: why() },
            TransportError::WrongNode {
                expected: "b".parse().unwrap(),
                addr: "10.0.0.1:1".to_owned(),
                found: "node c".to_owned(),
            },
            TransportError::HungUp { peer: peer.clone(), addr: "10.0.0.1:1".to_owned() },
            TransportError::Protocol { peer, why: why() },
        ] {
            let sent = serde_json::to_vec(&Refusal::new(&error)).unwrap();
            let received = serde_json::from_slice::<Refusal>(&sent).unwrap().of(&role);
            assert_eq!(format!("{received:?}"), format!("{error:?}"));
        }
    }
}
