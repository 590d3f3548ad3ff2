use std::fmt;
use std::io;
use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError};
use tranship_types::NodeName;
use tranship_wire::ReadError;

/// Whose verdict a refused certificate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// We do not accept the peer's certificate.
    Ours,
    /// The peer does not accept our certificate.
    Theirs,
}

/// A link cannot be prepared, opened or taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A file of the identity cannot be read.
    #[error("cannot read the {what} {}; run `tranship init` or correct the path in the configuration", path.display())]
    File {
        /// Which of the files, e.g. `node's key`.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file does not contain what it should.
    #[error("the {what} {} is not usable: {why}; make new ones with `tranship init`", path.display())]
    Unusable {
        /// Which of the files.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The key belongs to another certificate.
    #[error("the key {} does not belong to the certificate {}; copy both from the same `tranship init`", key.display(), cert.display())]
    KeyMismatch {
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// Our own certificate's time is over, or has not come.
    #[error("the certificate {} is {}; check the clock or make a new one with `tranship init --renew`", path.display(), if *not_yet { "not valid yet" } else { "expired" })]
    Expired {
        /// The certificate.
        path: PathBuf,
        /// Its time has not come, as opposed to being over.
        not_yet: bool,
    },
    /// Our own certificate is not of our own CA.
    #[error("the certificate {} was not issued by the CA in {} ({why}); copy both from the same `tranship init`", cert.display(), ca.display())]
    NotIssued {
        /// The certificate.
        cert: PathBuf,
        /// The CA's certificates.
        ca: PathBuf,
        /// What the check said.
        why: String,
    },
    /// Our certificate is for another node than the configuration says we are.
    #[error("the certificate {} is for node {found}, but this node is {expected}; copy the files of {expected} here or correct `node` in the configuration", path.display())]
    OtherNode {
        /// The certificate.
        path: PathBuf,
        /// Who we are.
        expected: NodeName,
        /// Who the certificate is for.
        found: NodeName,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}; choose another address in the configuration or end what uses it")]
    Bind {
        /// The address.
        addr: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// No connection can be taken at the moment.
    #[error("cannot accept connections")]
    Accept(#[source] io::Error),
    /// Nobody answers there: refused, no route, unknown host, or not in time.
    #[error(
        "node {peer} cannot be reached at {addr}; check that its agent runs and that the network and firewalls let it through"
    )]
    Unreachable {
        /// Who was dialled (or the address that dialled us).
        peer: String,
        /// Where.
        addr: String,
        /// What happened.
        #[source]
        source: io::Error,
    },
    /// One side does not accept the other's certificate.
    #[error("{} ({why}); both nodes need certificates of the same CA and right clocks", untrusted(*verdict, peer))]
    Untrusted {
        /// The other side: a node's name where we dialled, an address where we were dialled.
        peer: String,
        /// Who refuses.
        verdict: Verdict,
        /// Why.
        why: String,
    },
    /// Another node answers at the address.
    #[error("at {addr} answers {found}, not node {expected}; correct the peer's address in the configuration")]
    WrongNode {
        /// Who was dialled.
        expected: NodeName,
        /// Where.
        addr: String,
        /// Whose certificate was shown.
        found: String,
    },
    /// No common protocol version.
    #[error("there is no protocol version in common with {peer}: {why}")]
    Version {
        /// The other side.
        peer: String,
        /// Which.
        why: String,
    },
    /// The peer does not want this link.
    #[error("{peer} refuses the link: {why}")]
    Refused {
        /// The other side.
        peer: String,
        /// Its reason.
        why: String,
    },
    /// The process that does this node's TLS handshakes has ended in the middle of one.
    #[error("the TLS process of this node's agent has ended; another one is started, try again")]
    TlsProcess(#[source] io::Error),
    /// The connection was closed in the middle of the opening: the agent there was ended, or the process that does its TLS handshakes, or it
    /// has no room for another link.
    #[error("{peer} closed the connection at {addr} during the opening; try again, and see the log of its agent")]
    HungUp {
        /// The other side.
        peer: String,
        /// Where.
        addr: String,
    },
    /// What answers does not speak the protocol.
    #[error("{peer} does not open a link as an agent does ({why}); check that the address is that of a Tranship agent")]
    Protocol {
        /// The other side.
        peer: String,
        /// What happened.
        why: String,
    },
}

impl TransportError {
    /// Whether dialling again later can help without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        use TransportError as E;
        matches!(self, E::Unreachable { .. } | E::Accept(_) | E::TlsProcess(_) | E::HungUp { .. })
    }
}

fn untrusted(verdict: Verdict, peer: &str) -> String {
    match verdict {
        Verdict::Ours => format!("the certificate of {peer} is not accepted"),
        Verdict::Theirs => format!("{peer} does not accept this node's certificate"),
    }
}

/// The other side of a link that is being opened, for messages.
pub(crate) struct Remote<'a> {
    /// Who was dialled; `None` if we were.
    pub dialled: Option<&'a NodeName>,
    pub addr: &'a str,
}

impl fmt::Display for Remote<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dialled {
            Some(node) => write!(f, "node {node}"),
            None => write!(f, "the caller at {}", self.addr),
        }
    }
}

impl Remote<'_> {
    /// What an I/O error during the opening of a link means.
    pub fn io_error(&self, e: io::Error) -> TransportError {
        let peer = self.to_string();
        let tls = e.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(tls) = tls {
            return self.tls_error(tls);
        }
        match e.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                TransportError::HungUp { peer, addr: self.addr.to_owned() }
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let source = io::Error::new(io::ErrorKind::TimedOut, "no answer in the time allowed");
                self.unreachable(source)
            }
            _ => self.unreachable(e),
        }
    }

    pub fn unreachable(&self, source: io::Error) -> TransportError {
        let peer = self.dialled.map_or_else(|| "(unknown)".to_owned(), ToString::to_string);
        TransportError::Unreachable { peer, addr: self.addr.to_owned(), source }
    }

    pub fn read_error(&self, e: ReadError) -> TransportError {
        match e {
            ReadError::Io(e) => self.io_error(e),
            other => TransportError::Protocol { peer: self.to_string(), why: other.to_string() },
        }
    }

    fn tls_error(&self, e: &rustls::Error) -> TransportError {
        use AlertDescription as Alert;
        let peer = self.to_string();
        let untrusted = |verdict, why: String| TransportError::Untrusted { peer: peer.clone(), verdict, why };
        match e {
            rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { expected, presented }) => {
                let found = if presented.is_empty() { "a nameless node".to_owned() } else { names(presented) };
                match self.dialled {
                    Some(expected) => {
                        TransportError::WrongNode { expected: expected.clone(), addr: self.addr.to_owned(), found }
                    }
                    None => untrusted(Verdict::Ours, format!("it is for {found}, not {}", expected.to_str())),
                }
            }
            rustls::Error::InvalidCertificate(why) => untrusted(Verdict::Ours, certificate_fault(why)),
            rustls::Error::NoCertificatesPresented => untrusted(Verdict::Ours, "it shows none".to_owned()),
            rustls::Error::AlertReceived(
                alert @ (Alert::UnknownCA
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateExpired
                | Alert::CertificateRevoked
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::AccessDenied),
            ) => untrusted(
                Verdict::Theirs,
                match alert {
                    Alert::UnknownCA => "it is of a CA that is unknown there".to_owned(),
                    Alert::CertificateExpired => {
                        "it is expired, or its time has not come by the clock there".to_owned()
                    }
                    Alert::CertificateRevoked => "it is in the revocation list there".to_owned(),
                    Alert::BadCertificate => "it is for another node or damaged".to_owned(),
                    other => format!("TLS alert {other:?}"),
                },
            ),
            rustls::Error::InvalidMessage(_) => {
                TransportError::Protocol { peer, why: "it does not speak TLS".to_owned() }
            }
            other => TransportError::Protocol { peer, why: other.to_string() },
        }
    }
}

fn names(presented: &[String]) -> String {
    // rustls gives them as `DnsName("b")`.
    let plain = |name: &String| match name.split('"').nth(1) {
        Some(inner) => format!("node {inner}"),
        None => name.clone(),
    };
    presented.iter().take(3).map(plain).collect::<Vec<_>>().join(", ").chars().filter(|c| !c.is_control()).collect()
}

/// A certificate's fault in words.
pub(crate) fn certificate_fault(e: &CertificateError) -> String {
    match e {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => "it is of an unknown CA".to_owned(),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it is expired".to_owned(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "it is not valid yet".to_owned(),
        CertificateError::Revoked => "it was revoked".to_owned(),
        CertificateError::BadEncoding => "it is damaged".to_owned(),
        other => format!("{other:?}").chars().filter(|c| !c.is_control()).take(200).collect(),
    }
}
