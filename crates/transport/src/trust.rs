//! What a node checks of its peers' certificates besides the CA: pinned fingerprints, revocation lists, and when certificates end.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError, RwLock};

use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer};
use serde::{Deserialize, Serialize};
use tranship_types::NodeName;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use crate::TransportError;

/// SHA-256 of a certificate in DER form, as `openssl x509 -noout -fingerprint -sha256` prints it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// That of a certificate.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let suite = TLS13_AES_128_GCM_SHA256.tls13()?;
        let hash = suite.common.hash_provider.hash(certificate);
        hash.as_ref().try_into().ok().map(Self)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    /// Reads `sha256:` and 64 hexadecimal digits; colons between the bytes are allowed.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no fingerprint; write sha256: and 64 hexadecimal digits");
        let digits: String = text.strip_prefix("sha256:").ok_or_else(wrong)?.chars().filter(|c| *c != ':').collect();
        if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap_or_default();
        Ok(Self(std::array::from_fn(byte)))
    }
}

/// Certificates that a peer may show, by the peer's name. A peer without an entry may show any certificate of the CA.
pub type Pins = BTreeMap<NodeName, Vec<Fingerprint>>;

/// When something that links depend on ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expiry {
    /// What it is, e.g. `this node's certificate`.
    pub what: String,
    /// The file; `None` for a certificate that a peer has shown.
    pub path: Option<PathBuf>,
    /// In seconds since the Unix epoch.
    pub ends_unix: i64,
}

/// What is known of peers' certificates.
#[derive(Debug, Default)]
pub struct Trust {
    pins: RwLock<Pins>,
    /// When the certificate ends that a peer has shown last.
    seen: Mutex<BTreeMap<NodeName, i64>>,
}

impl Trust {
    /// Takes a peer that is named here only if it shows one of these certificates.
    pub fn pin(&self, pins: Pins) {
        *self.pins.write().unwrap_or_else(PoisonError::into_inner) = pins;
    }

    /// Compares a peer's certificate (DER) with what is pinned, and notes when it ends.
    ///
    /// # Errors
    /// It is another one.
    pub fn check(&self, peer: &NodeName, certificate: &[u8]) -> Result<(), String> {
        let certificate = &CertificateDer::from(certificate);
        let pins = self.pins.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(pinned) = pins.get(peer) {
            let shown = Fingerprint::of(certificate);
            if !shown.is_some_and(|shown| pinned.contains(&shown)) {
                let shown = shown.map_or_else(String::new, |shown| format!(" ({shown})"));
                return Err(format!("node {peer} shows another certificate{shown} than the pinned one"));
            }
        }
        drop(pins);
        if let Ok(ends) = not_after(certificate) {
            self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(peer.clone(), ends);
        }
        Ok(())
    }

    /// The certificates that peers have shown.
    pub fn seen(&self) -> Vec<Expiry> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |(peer, ends): (&NodeName, &i64)| Expiry {
            what: format!("the certificate of node {peer}"),
            path: None,
            ends_unix: *ends,
        };
        seen.iter().map(one).collect()
    }
}

/// The end of a certificate's time, in seconds since the Unix epoch.
pub(crate) fn not_after(certificate: &CertificateDer<'_>) -> Result<i64, String> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|e| format!("it cannot be parsed: {e}"))?;
    Ok(parsed.validity().not_after.timestamp())
}

/// Reads revocation lists in PEM form, and when the first of them has to be replaced.
pub(crate) fn load_revocations(
    path: &Path,
) -> Result<(Vec<CertificateRevocationListDer<'static>>, Option<i64>), TransportError> {
    let what = "revocation list";
    let unusable = |why: String| TransportError::Unusable { what, path: path.to_owned(), why };
    let pem = std::fs::read(path).map_err(|source| TransportError::File { what, path: path.to_owned(), source })?;
    let lists = CertificateRevocationListDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| unusable(format!("it is not PEM: {e}")))?;
    if lists.is_empty() {
        return Err(unusable("it has no revocation list in PEM form".to_owned()));
    }
    let mut next = None;
    for list in &lists {
        let (_, parsed) =
            CertificateRevocationList::from_der(list).map_err(|e| unusable(format!("it cannot be parsed: {e}")))?;
        let due = parsed.next_update().map(|time| time.timestamp());
        next = next.into_iter().chain(due).min();
    }
    Ok((lists, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_read_as_openssl_prints_them() {
        let digits = "0f".repeat(32);
        let with_colons = ["0F"; 32].join(":");
        let one: Fingerprint = format!("sha256:{digits}").parse().unwrap();
        assert_eq!(format!("sha256:{with_colons}").parse(), Ok(one));
        assert_eq!(one.to_string(), format!("sha256:{digits}"));
        for wrong in [digits.as_str(), "sha256:", "sha256:0f", &format!("sha256:{}zz", "0f".repeat(31))] {
            assert!(wrong.parse::<Fingerprint>().is_err(), "{wrong}");
        }
    }
}
