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
use std::sync::Arc;
use std::time::{Duration, Instant};

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
            Refusal::Protocol { why } => TransportError::Protocol { peer, why },
        }
    }
}

/// The TLS process: does handshakes until the other end of `requests` is closed. A request for which there is no thread is dropped.
pub fn serve(requests: &OwnedFd, handshakes: &Arc<dyn Handshakes>) -> io::Result<()> {
    let mut buffer = vec![0; REQUEST];
    loop {
        let (length, descriptors) = match descriptor::receive(requests.as_fd(), &mut buffer) {
            Ok((0, _)) => return Ok(()),
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // It lacks descriptors: the request is lost, and its sender sees the end of its reply socket.
            Err(error) if error.kind() == ErrorKind::InvalidData => continue,
            Err(error) => return Err(error),
        };
        let Ok([stream, reply]) = <[OwnedFd; 2]>::try_from(descriptors) else { continue };
        let Ok(request) = serde_json::from_slice::<Request>(&buffer[..length]) else { continue };
        let handshakes = Arc::clone(handshakes);
        // The thread's failure is the end of the reply socket.
        drop(threads::start("handshake", move || {
            let stream = Arc::new(TcpStream::from(stream));
            let done = handshakes.shake(&stream, &request.role, Instant::now() + request.within);
            let done = done.map_err(|error| Refusal::new(&error));
            if let Ok(bytes) = serde_json::to_vec(&done).map(Zeroizing::new) {
                let _ = UnixStream::from(reply).write_all(&bytes);
            }
        }));
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
    /// The TLS process has ended, or lacks descriptors or threads.
    Process(io::Error),
}

impl TlsProcess {
    /// The agent's end: `requests` keeps message boundaries, and its other end is [`serve`]d.
    pub fn new(requests: OwnedFd, node: NodeName) -> Self {
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
    pub fn shake(&self, stream: &Arc<TcpStream>, role: &Role, deadline: Instant) -> Result<Established, Failed> {
        let within = deadline.saturating_duration_since(Instant::now());
        self.ask(stream, role, within)
            .map_err(Failed::Process)?
            .map_err(|refusal| Failed::Handshake(refusal.of(role)))
    }

    fn ask(&self, stream: &TcpStream, role: &Role, within: Duration) -> io::Result<Result<Established, Refusal>> {
        let (ours, theirs) = UnixStream::pair()?;
        let request = serde_json::to_vec(&Request { role: role.clone(), within })?;
        if request.len() > REQUEST {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the peer's address is too long"));
        }
        descriptor::send(self.requests.as_fd(), &request, &[stream.as_fd(), theirs.as_fd()])?;
        drop(theirs);
        ours.set_read_timeout(Some(within + GRACE))?;
        let mut reply = Zeroizing::new(Vec::with_capacity(16 << 10));
        ours.take(REPLY).read_to_end(&mut reply)?;
        if reply.is_empty() {
            return Err(io::Error::new(ErrorKind::BrokenPipe, "the process for TLS handshakes has ended"));
        }
        Ok(serde_json::from_slice(&reply)?)
    }
}
