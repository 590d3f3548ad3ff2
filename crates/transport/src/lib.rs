//! Links between agents: TLS 1.3 over TCP with certificates on both sides, and an in-memory link for tests.
//!
//! Blocking, one thread for each link; no async runtime. A link is opened by a [`Connector`] and taken by a [`Listener`]:
//!
//! ```text
//! Connector::connect                          Listener::accept → Incoming::handshake
//!   TCP, TLS 1.3 ◀────────────────────────────▶ each checks the other's certificate against the CA;
//!   the server's must name the node dialled      the client's names the client
//!   Hello ────────────────────────────────────▶ names the same node, has a common version
//!   ◀──────────────────────────────────────────  Welcome, or a refusal with its reason
//!   Connection                                   Connection
//! ```
//!
//! [`pki`] makes the CA and the nodes' certificates.

mod connection;
mod connector;
mod error;
mod handshake;
mod identity;
mod link;
mod listener;
mod memory;
mod pacer;
pub mod pki;
mod records;
pub mod remote;
mod socket;
#[cfg(test)]
mod tests;
mod trust;

pub use connection::Connection;
pub use connector::Connector;
pub use error::{TransportError, Verdict};
pub use handshake::{Established, Handshakes, Role};
#[doc(hidden)]
pub use identity::fuzz_certificate;
pub use identity::{Files, Identity};
pub use link::{Closer, Counters, Link};
pub use listener::{Incoming, Listener};
pub use memory::{MemoryLink, memory_pair, memory_pair_between};
pub use trust::{Expiry, Fingerprint, Pins, Trust};
