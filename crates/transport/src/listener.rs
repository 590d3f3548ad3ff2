use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tranship_sys::pacing;
use tranship_wire::{Hello, ReadError, Refusal, RefusalKind, Versions, Welcome, negotiate, read_hello, write_welcome};

use crate::connection::Channel;
use crate::handshake::{Handshakes, Role};
use crate::socket::Socket;
use crate::{Closer, Connection, TransportError};

/// Takes links from other agents.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    handshakes: Arc<dyn Handshakes>,
    addr: SocketAddr,
}

impl Listener {
    /// Listens on `addr` (`host:port`; port 0 for a free one).
    ///
    /// # Errors
    /// [`TransportError::Bind`].
    pub fn bind(handshakes: impl Handshakes + 'static, addr: &str) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Bind { addr: addr.to_owned(), source };
        let listener = TcpListener::bind(addr).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, handshakes: Arc::new(handshakes), addr })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for the next caller, about whom nothing is known yet. How many [`Incoming`]s are shaking hands at a time is
    /// for the caller to limit.
    ///
    /// # Errors
    /// [`TransportError::Accept`], e.g. for want of file descriptors; it may be tried again, after a pause.
    pub fn accept(&self) -> Result<Incoming, TransportError> {
        loop {
            match self.listener.accept() {
                Ok((stream, addr)) => {
                    return Ok(Incoming { stream: Arc::new(stream), addr, handshakes: Arc::clone(&self.handshakes) });
                }
                // What the caller did while in the queue is no failure of ours: accept(2).
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                Err(e) => return Err(TransportError::Accept(e)),
            }
        }
    }

    /// A handle that ends the listening from another thread; an `accept` that waits returns an error.
    ///
    /// # Errors
    /// For want of a file descriptor.
    pub fn closer(&self) -> io::Result<Closer> {
        let listener = self.listener.try_clone()?;
        Ok(Closer::new(move |_| {
            let _ = nix::sys::socket::shutdown(
                std::os::fd::AsRawFd::as_raw_fd(&listener),
                nix::sys::socket::Shutdown::Both,
            );
        }))
    }
}

/// A caller that has not said who it is.
#[derive(Debug)]
pub struct Incoming {
    stream: Arc<TcpStream>,
    addr: SocketAddr,
    handshakes: Arc<dyn Handshakes>,
}

impl Incoming {
    /// The caller's address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A handle that ends the caller's connection from another thread, for as long as the caller has not been welcomed and dropped.
    pub fn closer(&self) -> Closer {
        let stream = Arc::downgrade(&self.stream);
        Closer::calling(move || {
            if let Some(stream) = stream.upgrade() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        })
    }

    /// Tells, for as long as the closer works, whether the caller has sent nothing yet.
    pub fn silence(&self) -> impl Fn() -> bool + Send + 'static {
        let stream = Arc::downgrade(&self.stream);
        move || {
            let course = stream.upgrade().and_then(|stream| pacing::course(stream.as_fd()).ok());
            course.is_some_and(|course| course.received == 0)
        }
    }

    /// Finds out who the caller is and what it wants, and welcomes it; to be run in a thread of its own. All of it
    /// together takes `timeout` at most, however slowly the caller sends.
    ///
    /// # Errors
    /// As [`Incoming::handshake_if`].
    pub fn handshake(self, timeout: Duration) -> Result<(Connection, Hello), TransportError> {
        self.handshake_if(timeout, |_| Ok(()))
    }

    /// As [`Incoming::handshake`], but `admit` may still refuse the link with a reason, of which the caller learns. It is
    /// asked after the certificate, the name and the version were found right.
    ///
    /// # Errors
    /// [`TransportError::Untrusted`] for a caller without a certificate of our CA: not a byte of the protocol is read from
    /// it. [`TransportError::Version`], [`TransportError::Refused`] if the caller was refused for another reason,
    /// [`TransportError::Unreachable`] if it was too slow or went away, [`TransportError::Protocol`].
    pub fn handshake_if(
        self,
        timeout: Duration,
        admit: impl FnOnce(&Hello) -> Result<(), String>,
    ) -> Result<(Connection, Hello), TransportError> {
        let deadline = Instant::now() + timeout;
        let role = Role::Server { addr: self.addr.to_string() };
        let remote = role.remote();
        let mut socket = Socket::new(self.stream).map_err(|e| remote.io_error(e))?;
        let established = self.handshakes.shake(socket.stream(), &role, deadline)?;
        let (peer, certificate) = (established.peer.clone(), established.certificate.clone());
        socket.set_deadline(deadline);
        let mut channel = Channel::new(socket, established).map_err(|e| remote.io_error(e))?;

        let named = format!("node {peer}");
        let refuse = |channel: &mut Channel, kind, reason: String| {
            // It is refused whether or not it hears why.
            let _ = write_welcome(channel, &Welcome::Refused(Refusal { kind, reason: reason.clone() }));
            match kind {
                RefusalKind::Version => TransportError::Version { peer: named.clone(), why: reason },
                RefusalKind::Greeting => TransportError::Protocol { peer: named.clone(), why: reason },
                RefusalKind::Node | RefusalKind::Unwanted => {
                    TransportError::Refused { peer: format!("this node, asked by {named},"), why: reason }
                }
            }
        };
        let hello = match read_hello(&mut channel) {
            Ok(hello) => hello,
            Err(ReadError::Wire(e)) => return Err(refuse(&mut channel, RefusalKind::Greeting, e.to_string())),
            Err(e) => return Err(remote.read_error(e)),
        };
        if hello.node != peer {
            let reason = format!("the certificate is for node {peer}, the greeting says {}", hello.node);
            return Err(refuse(&mut channel, RefusalKind::Node, reason));
        }
        if let Err(reason) = self.handshakes.check_peer(&peer, &certificate) {
            return Err(refuse(&mut channel, RefusalKind::Node, reason));
        }
        let Ok(version) = negotiate(Versions::OURS, hello.versions) else {
            let (ours, us, theirs) = (Versions::OURS, self.handshakes.node(), hello.versions);
            let reason = format!("{us} speaks {ours}, {peer} speaks {theirs}; install the same release on both nodes");
            return Err(refuse(&mut channel, RefusalKind::Version, reason));
        };
        if let Err(reason) = admit(&hello) {
            return Err(refuse(&mut channel, RefusalKind::Unwanted, reason));
        }
        write_welcome(&mut channel, &Welcome::Accepted { version }).map_err(|e| match e {
            tranship_wire::WriteError::Io(e) => remote.io_error(e),
            other => TransportError::Protocol { peer: named.clone(), why: other.to_string() },
        })?;
        let connection = Connection::new(channel, peer, version).map_err(|e| remote.io_error(e))?;
        Ok((connection, hello))
    }
}
