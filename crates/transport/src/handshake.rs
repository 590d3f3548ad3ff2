//! The TLS handshake: who the peer is, and the keys of the link.
//!
//! It is apart from the rest of a link, so that another process can do it ([`crate::remote`]): that process has the private
//! key, and parses what strangers send. It leaves an [`Established`], with which [`crate::records`] goes on.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{CipherSuite, ConnectionTrafficSecrets, ExtractedSecrets, KeyLog};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use tranship_types::NodeName;
use zeroize::Zeroizing;

use crate::error::Remote;
use crate::identity::{node_of, server_name};
use crate::records::{Suite, Traffic, derive};
use crate::socket::Socket;
use crate::{Identity, TransportError, Verdict};

/// Room for what a peer sends in its handshake: more than rustls accepts.
const ROOM: usize = 128 << 10;

/// Which side of a handshake this node is, and what is known about the other one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Role {
    /// It has dialled this node.
    Client {
        /// Who must answer.
        peer: NodeName,
        /// Where, for messages.
        addr: String,
    },
    /// It was dialled by somebody.
    Server {
        /// The caller's address, for messages.
        addr: String,
    },
}

impl Role {
    pub(crate) fn remote(&self) -> Remote<'_> {
        match self {
            Role::Client { peer, addr } => Remote { dialled: Some(peer), addr },
            Role::Server { addr } => Remote { dialled: None, addr },
        }
    }
}

/// What a handshake leaves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Established {
    /// The node that the peer's certificate is for. A client does not know yet whether the server accepts its own certificate.
    pub peer: NodeName,
    /// The peer's certificate, in DER form.
    pub certificate: Vec<u8>,
    pub(crate) suite: Suite,
    pub(crate) sending: Traffic,
    pub(crate) receiving: Traffic,
    /// Plaintext that came behind the handshake.
    pub(crate) plain: Vec<u8>,
    /// The beginning of a record that came behind it.
    pub(crate) sealed: Vec<u8>,
    /// Bytes that were sent and received.
    pub(crate) bytes: (u64, u64),
}

/// What does the handshakes of a node.
pub trait Handshakes: std::fmt::Debug + Send + Sync {
    /// This node's name, from its certificate.
    fn node(&self) -> &NodeName;

    /// Does one handshake over a connection, until a deadline. It may leave the connection with timeouts.
    ///
    /// # Errors
    /// [`TransportError::Untrusted`], [`WrongNode`](TransportError::WrongNode), [`Protocol`](TransportError::Protocol),
    /// [`Unreachable`](TransportError::Unreachable), [`TlsProcess`](TransportError::TlsProcess).
    fn shake(&self, stream: &Arc<TcpStream>, role: &Role, deadline: Instant) -> Result<Established, TransportError>;

    /// Compares a peer's certificate (DER) with what is pinned for it, and notes when it ends.
    ///
    /// # Errors
    /// Why the peer is not accepted.
    fn check_peer(&self, peer: &NodeName, certificate: &[u8]) -> Result<(), String>;
}

impl Handshakes for Identity {
    fn node(&self) -> &NodeName {
        self.node()
    }

    fn check_peer(&self, peer: &NodeName, certificate: &[u8]) -> Result<(), String> {
        self.trust().check(peer, certificate)
    }

    fn shake(&self, stream: &Arc<TcpStream>, role: &Role, deadline: Instant) -> Result<Established, TransportError> {
        let mut socket = Socket::plain(Arc::clone(stream));
        socket.set_deadline(deadline);
        let secrets = Arc::new(Secrets::default());
        let remote = role.remote();
        let protocol = |why: String| TransportError::Protocol { peer: remote.to_string(), why };
        let session = match role {
            Role::Client { peer, .. } => {
                let mut config = (*self.client()).clone();
                config.enable_secret_extraction = true;
                config.key_log = secrets.clone();
                let name = server_name(peer).map_err(protocol)?;
                UnbufferedClientConnection::new(Arc::new(config), name).map(Session::Client)
            }
            Role::Server { .. } => {
                let mut config = (*self.server()).clone();
                config.enable_secret_extraction = true;
                config.key_log = secrets.clone();
                UnbufferedServerConnection::new(Arc::new(config)).map(Session::Server)
            }
        };
        let session = session.map_err(|e| protocol(e.to_string()))?;
        let mut handshake = Handshake {
            socket: &mut socket,
            session,
            incoming: vec![0; ROOM],
            end: 0,
            plain: Vec::new(),
            outgoing: Vec::new(),
        };
        if let Err(error) = handshake.run() {
            let longest = if matches!(role, Role::Client { .. }) { 200 } else { 1000 };
            let left = deadline.saturating_duration_since(Instant::now());
            handshake.send_alert(left.min(Duration::from_millis(longest)));
            return Err(remote.io_error(error));
        }
        let untrusted = |why| TransportError::Untrusted { peer: remote.to_string(), verdict: Verdict::Ours, why };
        let Some(certificate) = handshake.session.peer_certificate() else {
            return Err(untrusted("it shows none".to_owned()));
        };
        let (peer, certificate) = (node_of(certificate).map_err(untrusted)?, certificate.to_vec());
        // The certificate is valid for the name; this is to have it from the certificate and not from the question.
        if let Role::Client { peer: expected, addr } = role
            && *expected != peer
        {
            let (expected, addr, found) = (expected.clone(), addr.clone(), format!("node {peer}"));
            return Err(TransportError::WrongNode { expected, addr, found });
        }
        handshake.establish((peer, certificate), &secrets).map_err(|e| protocol(e.to_string()))
    }
}

/// Takes the traffic secrets of one session from rustls.
#[derive(Default)]
struct Secrets(Mutex<[Zeroizing<Vec<u8>>; 2]>);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets")
    }
}

const LABELS: [&str; 2] = ["CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0"];

impl KeyLog for Secrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if let Some(side) = LABELS.iter().position(|one| *one == label) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)[side] = Zeroizing::new(secret.to_vec());
        }
    }

    fn will_log(&self, label: &str) -> bool {
        LABELS.contains(&label)
    }
}

enum Session {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl Session {
    fn is_handshaking(&self) -> bool {
        match self {
            Session::Client(c) => c.is_handshaking(),
            Session::Server(s) => s.is_handshaking(),
        }
    }

    fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Session::Client(c) => c.peer_certificates(),
            Session::Server(s) => s.peer_certificates(),
        }
        .and_then(<[_]>::first)
    }
}

/// What a step through the incoming bytes came to.
enum Step {
    Progress,
    /// The handshake is done, and all that can be handled of what came behind it.
    Done,
    /// Nothing more can be done before more bytes arrive.
    Blocked,
    PeerClosed,
}

struct Handshake<'a> {
    socket: &'a mut Socket,
    session: Session,
    incoming: Vec<u8>,
    end: usize,
    plain: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Handshake<'_> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            match self.step().map_err(tls_io_error)? {
                Step::Progress => {}
                // A server may send before the client has finished; we do not, not to someone unknown.
                Step::Done if !self.session.is_handshaking() => return self.send(),
                Step::Done | Step::Blocked => {
                    self.send()?;
                    if self.end == self.incoming.len() || self.plain.len() > ROOM {
                        return Err(io::Error::new(
                            ErrorKind::InvalidData,
                            "the peer sent a TLS message that is too long",
                        ));
                    }
                    match self.socket.read(&mut self.incoming[self.end..])? {
                        0 => return Err(ErrorKind::UnexpectedEof.into()),
                        n => self.end += n,
                    }
                }
                Step::PeerClosed => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    fn send(&mut self) -> io::Result<()> {
        let outgoing = std::mem::take(&mut self.outgoing);
        self.socket.write_all(&outgoing)
    }

    fn step(&mut self) -> Result<Step, rustls::Error> {
        let incoming = &mut self.incoming[..self.end];
        let (discard, step) = match &mut self.session {
            Session::Client(c) => advance(c.process_tls_records(incoming), &mut self.plain, &mut self.outgoing),
            Session::Server(s) => advance(s.process_tls_records(incoming), &mut self.plain, &mut self.outgoing),
        };
        self.incoming.copy_within(discard..self.end, 0);
        self.end -= discard;
        step
    }

    /// After a failed handshake: sends the alert that says why, and waits a moment for the peer to take notice. To close
    /// at once while unread bytes lie in the socket would send an RST, which can overtake the alert.
    fn send_alert(&mut self, patience: Duration) {
        while matches!(self.step(), Ok(Step::Progress)) {}
        if self.outgoing.is_empty() || self.send().is_err() {
            return;
        }
        self.socket.shutdown(Shutdown::Write);
        self.socket.set_deadline(Instant::now() + patience);
        let mut budget = 4;
        while budget > 0 && self.socket.read(&mut self.incoming).is_ok_and(|n| n > 0) {
            budget -= 1;
        }
    }

    fn establish(
        self,
        (peer, certificate): (NodeName, Vec<u8>),
        secrets: &Secrets,
    ) -> Result<Established, rustls::Error> {
        let is_client = matches!(self.session, Session::Client(_));
        let (extracted, suite) = match self.session {
            Session::Client(c) => {
                c.dangerous_into_kernel_connection().map(|(s, c)| (s, c.negotiated_cipher_suite()))?
            }
            Session::Server(s) => {
                s.dangerous_into_kernel_connection().map(|(s, c)| (s, c.negotiated_cipher_suite()))?
            }
        };
        let suite = match suite.suite() {
            CipherSuite::TLS13_AES_128_GCM_SHA256 => Suite::Aes128Gcm,
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => Suite::Chacha20Poly1305,
            other => return Err(rustls::Error::General(format!("the suite {other:?} is not supported"))),
        };
        let [client, server] = std::mem::take(&mut *secrets.0.lock().unwrap_or_else(PoisonError::into_inner));
        let (sending, receiving) = if is_client { (client, server) } else { (server, client) };
        let ExtractedSecrets { tx, rx } = extracted;
        let sending = Traffic { secret: sending, sequence: tx.0 };
        let receiving = Traffic { secret: receiving, sequence: rx.0 };
        // A peer that renews its key within its handshake gets no link.
        if !is_of(suite, &sending, &tx.1) || !is_of(suite, &receiving, &rx.1) {
            return Err(rustls::Error::General("the keys are not those of the handshake".to_owned()));
        }
        let counters = self.socket.counters();
        let bytes = (counters.sent(), counters.received());
        let sealed = self.incoming[..self.end].to_vec();
        Ok(Established { peer, certificate, suite, sending, receiving, plain: self.plain, sealed, bytes })
    }
}

/// Whether a key is the first one of a traffic secret.
fn is_of(suite: Suite, traffic: &Traffic, key: &ConnectionTrafficSecrets) -> bool {
    let derived = derive(suite, &traffic.secret);
    match (suite, key) {
        (Suite::Aes128Gcm, ConnectionTrafficSecrets::Aes128Gcm { key, iv })
        | (Suite::Chacha20Poly1305, ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }) => {
            key.as_ref() == derived.key.as_slice() && iv.as_ref() == derived.iv
        }
        _ => false,
    }
}

fn advance<D>(
    status: UnbufferedStatus<'_, '_, D>,
    plain: &mut Vec<u8>,
    outgoing: &mut Vec<u8>,
) -> (usize, Result<Step, rustls::Error>) {
    let mut discard = status.discard;
    let state = match status.state {
        Ok(state) => state,
        Err(e) => return (discard, Err(e)),
    };
    let step = match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        discard += record.discard;
                        plain.extend_from_slice(record.payload);
                    }
                    Err(e) => return (discard, Err(e)),
                }
            }
            Step::Progress
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let start = outgoing.len();
            let needed = match data.encode(&mut []) {
                Ok(_) | Err(EncodeError::AlreadyEncoded) => 0,
                Err(EncodeError::InsufficientSize(e)) => e.required_size,
            };
            outgoing.resize(start + needed, 0);
            if needed > 0 {
                match data.encode(&mut outgoing[start..]) {
                    Ok(n) => outgoing.truncate(start + n),
                    Err(e) => return (discard, Err(rustls::Error::General(e.to_string()))),
                }
            }
            Step::Progress
        }
        // What is to be transmitted is in `outgoing`, and whoever waits for the peer sends that first.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Step::Progress
        }
        ConnectionState::BlockedHandshake => Step::Blocked,
        ConnectionState::PeerClosed | ConnectionState::Closed => Step::PeerClosed,
        ConnectionState::WriteTraffic(_) => Step::Done,
        // Early data is not enabled; what a later rustls may add is not known to be safe.
        _ => return (discard, Err(rustls::Error::General("an unexpected state of the TLS session".to_owned()))),
    };
    (discard, Ok(step))
}

pub(crate) fn tls_io_error(e: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, e)
}
