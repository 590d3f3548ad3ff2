//! What the agent tells its service manager (sd_notify(3)): that it is ready, that it is alive, that it stops.
//!
//! It is alive while its API answers on its own socket, and the listener for other agents takes callers. One that turns
//! callers away, because it is busy or has no descriptors left, is alive: to restart it would help nobody.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use tranship_sys::{environment, reserve, threads};

use crate::node::Node;

/// How often the reserve of descriptors is filled.
const TICK: Duration = Duration::from_secs(1);

/// What the service manager is told.
pub struct Manager {
    socket: Option<UnixDatagram>,
    /// Within what time it is to hear that the agent is alive.
    watchdog: Option<Duration>,
}

impl Manager {
    /// Takes what it has said out of the environment, where no program that the agent starts must find it: a runc would
    /// give its containers a socket to notify. To be called before there are threads.
    pub fn take() -> Self {
        let names = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];
        let [address, within, pid, ..] = environment::take(names);
        let number = |value: Option<std::ffi::OsString>| value?.to_str()?.parse::<u64>().ok();
        let is_ours = pid.is_none() || number(pid) == Some(u64::from(std::process::id()));
        let watchdog = number(within).filter(|within| is_ours && *within > 0).map(Duration::from_micros);
        let socket = address.and_then(|address| {
            let bytes = address.as_bytes();
            let address = match bytes.strip_prefix(b"@") {
                Some(name) => UnixAddress::from_abstract_name(name),
                None => UnixAddress::from_pathname(&address),
            };
            let socket = UnixDatagram::unbound().and_then(|socket| {
                socket.connect_addr(&address?)?;
                // A manager that does not read must not keep the agent waiting.
                socket.set_nonblocking(true)?;
                Ok(socket)
            });
            socket.inspect_err(|error| tracing::warn!(%error, "the service manager cannot be told anything")).ok()
        });
        Self { socket, watchdog }
    }

    /// Tells it how the agent stands: a line of sd_notify(3).
    pub fn tell(&self, state: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(state.as_bytes())
        {
            tracing::warn!(%error, state, "the service manager was not told");
        }
    }

    /// Keeps telling it that the agent is alive, as long as it is; and keeps the reserve of descriptors full.
    pub fn watch(self: &Arc<Self>, node: &Arc<Node>, peers: SocketAddr) -> io::Result<()> {
        let (manager, node) = (Arc::clone(self), Arc::clone(node));
        threads::start("watchdog", move || manager.keep_watch(&node, peers)).map(drop)
    }

    fn keep_watch(&self, node: &Node, peers: SocketAddr) {
        let every = self.watchdog.map(|within| within / 2);
        let mut due = Instant::now();
        loop {
            reserve::fill();
            if let Some(every) = every.filter(|_| due <= Instant::now()) {
                let next = match is_alive(node, peers, every / 4) {
                    Ok(()) => {
                        self.tell("WATCHDOG=1");
                        every
                    }
                    Err(error) => {
                        tracing::error!(%error, "the service manager is not told that the agent is alive");
                        every / 8
                    }
                };
                due = Instant::now() + next;
            }
            let wait = every.map_or(TICK, |_| due.saturating_duration_since(Instant::now()).min(TICK));
            if !node.pause(wait) {
                return;
            }
        }
    }
}

/// How many calls of the agent to itself are known as such.
const PROBES: usize = 16;

/// The listener for other agents, as the watchdog sees it.
#[derive(Default)]
pub struct Liveness {
    accepts: AtomicU64,
    /// The last callers that were the agent itself. What came of a call may be known only after the next one.
    probes: Mutex<VecDeque<SocketAddr>>,
}

impl Liveness {
    fn probes(&self) -> std::sync::MutexGuard<'_, VecDeque<SocketAddr>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn probe(&self, caller: SocketAddr) {
        let mut probes = self.probes();
        probes.truncate(PROBES - 1);
        probes.push_front(caller);
    }

    /// A caller has been taken, or turned away.
    pub fn accepted(&self) {
        self.accepts.fetch_add(1, Ordering::Release);
    }

    /// Whether this caller is the agent itself, which looks whether callers are taken.
    pub fn is_probe(&self, caller: SocketAddr) -> bool {
        self.probes().contains(&caller)
    }
}

/// Whether both listeners take callers, each within so much time.
fn is_alive(node: &Node, peers: SocketAddr, patience: Duration) -> io::Result<()> {
    let late = |what: &str| io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {patience:?}"));
    match ask(&node.config.socket, patience) {
        // It has no descriptor to ask with.
        Err(error) if reserve::is_lacking(&error) => return Ok(()),
        Err(error) => return Err(io::Error::new(error.kind(), format!("the API does not answer: {error}"))),
        Ok(()) => {}
    }
    let before = node.liveness.accepts.load(Ordering::Acquire);
    let caller = match TcpStream::connect_timeout(&peers, patience) {
        Err(error) if reserve::is_lacking(&error) || is_away(&error) => return Ok(()),
        called => {
            called.map_err(|error| io::Error::new(error.kind(), format!("other agents are not heard: {error}")))?
        }
    };
    caller.local_addr().into_iter().for_each(|address| node.liveness.probe(address));
    let deadline = Instant::now() + patience;
    while node.liveness.accepts.load(Ordering::Acquire) == before {
        if Instant::now() > deadline {
            return Err(late("no call of another agent was taken"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether the address that is listened on is no address of this host at the moment: an agent that is started again could not
/// listen on it either.
fn is_away(error: &io::Error) -> bool {
    const AWAY: [Errno; 4] = [Errno::EADDRNOTAVAIL, Errno::ENETUNREACH, Errno::EHOSTUNREACH, Errno::ENETDOWN];
    error.raw_os_error().is_some_and(|code| AWAY.contains(&Errno::from_raw(code)))
}

/// Sends the API a request that needs nothing but its own loop; whatever it answers, it is alive.
fn ask(path: &Path, patience: Duration) -> io::Result<()> {
    let limit = TimeVal::milliseconds(patience.as_millis().max(1) as i64);
    let unconnected = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // It bounds the connect, too, where the queue is full.
    setsockopt(&unconnected, sockopt::SendTimeout, &limit)?;
    setsockopt(&unconnected, sockopt::ReceiveTimeout, &limit)?;
    connect(std::os::fd::AsRawFd::as_raw_fd(&unconnected), &UnixAddr::new(path)?)?;
    let mut stream = UnixStream::from(unconnected);
    stream.write_all(b"GET /v1/alive HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    if &head != b"HTTP/1.1 " {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no answer"));
    }
    // The connection ends in good order.
    io::copy(&mut stream, &mut io::sink()).map(drop)
}
