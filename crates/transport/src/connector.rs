use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tranship_types::NodeName;
use tranship_wire::{Hello, RefusalKind, Welcome, WriteError, read_welcome, write_hello};

use crate::connection::Channel;
use crate::handshake::{Handshakes, Role};
use crate::socket::Socket;
use crate::{Connection, TransportError, Verdict};

/// Opens links to other agents.
#[derive(Debug, Clone)]
pub struct Connector {
    handshakes: Arc<dyn Handshakes>,
}

impl Connector {
    /// A connector that shows the certificate with which `handshakes` are done.
    pub fn new(handshakes: impl Handshakes + 'static) -> Self {
        Self { handshakes: Arc::new(handshakes) }
    }

    /// Opens a link to `peer` at `addr` (`host:port`): when it returns, both sides have accepted each other's certificate
    /// and version. All of it together takes `timeout` at most (resolving a host name not included). A peer that hangs up in the middle is
    /// dialled once more: the process that does its handshakes may have ended, and another one does the next.
    ///
    /// # Errors
    /// [`TransportError::Unreachable`], [`Untrusted`](TransportError::Untrusted) by either side,
    /// [`WrongNode`](TransportError::WrongNode), [`Version`](TransportError::Version),
    /// [`Refused`](TransportError::Refused), [`HungUp`](TransportError::HungUp), [`Protocol`](TransportError::Protocol).
    pub fn connect(
        &self,
        peer: &NodeName,
        addr: &str,
        hello: &Hello,
        timeout: Duration,
    ) -> Result<Connection, TransportError> {
        let deadline = Instant::now() + timeout;
        match self.open(peer, addr, hello, deadline) {
            Err(TransportError::HungUp { .. }) if Instant::now() < deadline => self.open(peer, addr, hello, deadline),
            opened => opened,
        }
    }

    fn open(
        &self,
        peer: &NodeName,
        addr: &str,
        hello: &Hello,
        deadline: Instant,
    ) -> Result<Connection, TransportError> {
        let role = Role::Client { peer: peer.clone(), addr: addr.to_owned() };
        let remote = role.remote();
        let protocol = |why: String| TransportError::Protocol { peer: remote.to_string(), why };

        let (mut socket, established) = loop {
            let stream = dial(addr, deadline).map_err(|e| remote.unreachable(e))?;
            let socket = Socket::new(Arc::new(stream)).map_err(|e| remote.unreachable(e))?;
            match self.handshakes.shake(socket.stream(), &role, deadline) {
                Ok(established) => break (socket, established),
                // On another connection: the peer may have got a part of the handshake.
                Err(TransportError::TlsProcess(_)) if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
        };
        let shown = self.handshakes.check_peer(peer, &established.certificate);
        shown.map_err(|why| TransportError::Untrusted { peer: remote.to_string(), verdict: Verdict::Ours, why })?;
        socket.set_deadline(deadline);
        let mut channel = Channel::new(socket, established).map_err(|e| remote.io_error(e))?;

        // Should the server have refused our certificate, this may fail; its alert then says why.
        let greeted = write_hello(&mut channel, hello);
        let welcome = match (greeted, read_welcome(&mut channel)) {
            (_, Ok(welcome)) => welcome,
            (Err(WriteError::Io(sent)), Err(tranship_wire::ReadError::Io(e))) if e.get_ref().is_none() => {
                return Err(remote.io_error(sent));
            }
            (_, Err(e)) => return Err(remote.read_error(e)),
        };
        let version = match welcome {
            Welcome::Accepted { version } if (hello.versions.min..=hello.versions.max).contains(&version) => version,
            Welcome::Accepted { version } => {
                return Err(protocol(format!("it chose version {version}, which was not offered")));
            }
            Welcome::Refused(refusal) => {
                let (peer, why) = (remote.to_string(), refusal.reason);
                return Err(match refusal.kind {
                    RefusalKind::Version => TransportError::Version { peer, why },
                    RefusalKind::Node | RefusalKind::Greeting | RefusalKind::Unwanted => {
                        TransportError::Refused { peer, why }
                    }
                });
            }
        };
        Connection::new(channel, peer.clone(), version).map_err(|e| remote.io_error(e))
    }
}

/// Tries the addresses of a name in their order; the last failure is the one reported.
fn dial(addr: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in addr.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in the time allowed"));
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
