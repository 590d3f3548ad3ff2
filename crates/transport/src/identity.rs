use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, DnsName, PrivateKeyDer, ServerName, UnixTime};
use tranship_types::NodeName;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::TransportError;
use crate::error::certificate_fault;
use crate::trust::{Expiry, Pins, Trust, load_revocations, not_after};

/// Who this node is on the wire: its certificate and key, and the CA whose certificates it accepts. Cheap to clone; clones have
/// their files replaced together.
#[derive(Clone)]
pub struct Identity {
    node: NodeName,
    cert_path: PathBuf,
    current: Arc<RwLock<Current>>,
    trust: Arc<Trust>,
}

/// What was read from the files.
#[derive(Clone)]
struct Current {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    ends: Vec<Expiry>,
}

/// The files of an identity.
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    /// The CA's certificate, or several, where the CA is being replaced.
    pub ca: &'a Path,
    /// This node's certificate.
    pub cert: &'a Path,
    /// Its key.
    pub key: &'a Path,
    /// Certificates that the CA has revoked.
    pub crl: Option<&'a Path>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("node", &self.node).field("cert", &self.cert_path).finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads the PEM files: the CA's certificate (or several, where the CA is being replaced), this node's certificate and
    /// its key.
    ///
    /// # Errors
    /// A file that is missing or not what it should be, a key of another certificate, a certificate that has expired or is
    /// not of this CA.
    pub fn load(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TransportError> {
        Self::load_files(&Files { ca, cert, key, crl: None })
    }

    /// Reads the PEM files, a revocation list among them where one is given.
    ///
    /// # Errors
    /// As [`Identity::load`]; a list that cannot be read, or that has this node's own certificate.
    pub fn load_files(files: &Files<'_>) -> Result<Self, TransportError> {
        Self::load_all(files, UnixTime::now(), provider())
    }

    /// Takes the files of `new` for all clones of this identity, from the next link on. Links that are open go on.
    ///
    /// # Errors
    /// [`TransportError::OtherNode`].
    pub fn replace(&self, new: &Self) -> Result<(), TransportError> {
        new.expect_node(&self.node)?;
        let taken = new.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = taken;
        Ok(())
    }

    /// Takes links from, and to, a peer that is named here only if it shows one of these certificates.
    pub fn pin(&self, pins: Pins) {
        self.trust.pin(pins);
    }

    /// When the certificates of this node, of the CA and of the peers that it has met end, and the revocation list is due.
    pub fn expiries(&self) -> Vec<Expiry> {
        let own = self.current.read().unwrap_or_else(PoisonError::into_inner).ends.clone();
        own.into_iter().chain(self.trust.seen()).collect()
    }

    pub(crate) fn trust(&self) -> &Trust {
        &self.trust
    }

    pub(crate) fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).client)
    }

    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).server)
    }

    /// This node's name, from its certificate.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Checks that the certificate is the one of `node`.
    ///
    /// # Errors
    /// [`TransportError::OtherNode`].
    pub fn expect_node(&self, node: &NodeName) -> Result<(), TransportError> {
        if &self.node == node {
            return Ok(());
        }
        Err(TransportError::OtherNode {
            path: self.cert_path.clone(),
            expected: node.clone(),
            found: self.node.clone(),
        })
    }

    #[cfg(test)]
    pub(crate) fn load_at(
        ca: &Path,
        cert: &Path,
        key: &Path,
        now: UnixTime,
        provider: CryptoProvider,
    ) -> Result<Self, TransportError> {
        Self::load_all(&Files { ca, cert, key, crl: None }, now, provider)
    }

    fn load_all(files: &Files<'_>, now: UnixTime, provider: CryptoProvider) -> Result<Self, TransportError> {
        let Files { ca, cert, key, crl } = *files;
        let provider = Arc::new(provider);
        let (roots, ca_ends) = load_roots(ca)?;
        let roots = Arc::new(roots);
        let (revoked, due) = crl.map_or_else(|| Ok((Vec::new(), None)), load_revocations)?;
        let chain = load_certificates("node's certificate", cert)?;
        let key_der = load_key(key)?;
        let unusable = |what, path: &Path, why: String| TransportError::Unusable { what, path: path.to_owned(), why };

        let signing_key =
            provider.key_provider.load_private_key(key_der).map_err(|e| unusable("node's key", key, e.to_string()))?;
        let certified = CertifiedKey::new(chain, signing_key);
        certified.keys_match().map_err(|e| match e {
            rustls::Error::InconsistentKeys(_) => {
                TransportError::KeyMismatch { cert: cert.to_owned(), key: key.to_owned() }
            }
            other => unusable("node's certificate", cert, other.to_string()),
        })?;
        let node = node_of(&certified.cert[0]).map_err(|why| unusable("node's certificate", cert, why))?;
        let name = server_name(&node).map_err(|why| unusable("node's certificate", cert, why))?;

        let builder_failed = |e: String| unusable("CA's certificate", ca, e);
        // While a CA is being replaced there need not be a list of each.
        let mut server_verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone());
        let mut client_verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        if !revoked.is_empty() {
            server_verifier = server_verifier
                .with_crls(revoked.clone())
                .only_check_end_entity_revocation()
                .allow_unknown_revocation_status();
            client_verifier =
                client_verifier.with_crls(revoked).only_check_end_entity_revocation().allow_unknown_revocation_status();
        }
        let server_verifier = server_verifier.build().map_err(|e| builder_failed(e.to_string()))?;
        let client_verifier = client_verifier.build().map_err(|e| builder_failed(e.to_string()))?;
        server_verifier.verify_server_cert(&certified.cert[0], &certified.cert[1..], &name, &[], now).map_err(|e| {
            use CertificateError as Fault;
            match e {
                rustls::Error::InvalidCertificate(Fault::Expired | Fault::ExpiredContext { .. }) => {
                    TransportError::Expired { path: cert.to_owned(), not_yet: false }
                }
                rustls::Error::InvalidCertificate(Fault::NotValidYet | Fault::NotValidYetContext { .. }) => {
                    TransportError::Expired { path: cert.to_owned(), not_yet: true }
                }
                rustls::Error::InvalidCertificate(fault) => TransportError::NotIssued {
                    cert: cert.to_owned(),
                    ca: ca.to_owned(),
                    why: certificate_fault(&fault),
                },
                other => unusable("node's certificate", cert, other.to_string()),
            }
        })?;

        let own_ends = not_after(&certified.cert[0]).map_err(|why| unusable("node's certificate", cert, why))?;
        let end = |what: &str, path: &Path, ends_unix| Expiry {
            what: what.to_owned(),
            path: Some(path.to_owned()),
            ends_unix,
        };
        let mut ends =
            vec![end("this node's certificate", cert, own_ends), end("the certificate of the CA", ca, ca_ends)];
        ends.extend(crl.zip(due).map(|(path, due)| end("the revocation list", path, due)));

        let resolver = Arc::new(rustls::sign::SingleCertAndKey::from(certified));
        let versions = [&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&versions)
            .map_err(|e| builder_failed(e.to_string()))?
            .with_webpki_verifier(server_verifier)
            .with_client_cert_resolver(resolver.clone());
        // A resumed session would skip the check of the certificates, and links are few.
        client.resumption = rustls::client::Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|e| builder_failed(e.to_string()))?
            .with_client_cert_verifier(client_verifier)
            .with_cert_resolver(resolver);
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;

        let current = Current { client: Arc::new(client), server: Arc::new(server), ends };
        let (current, trust) = (Arc::new(RwLock::new(current)), Arc::default());
        Ok(Self { node, cert_path: cert.to_owned(), current, trust })
    }
}

/// ring with the two fast suites: AES-128-GCM first where the CPU has AES instructions, else ChaCha20-Poly1305. The
/// dialling side's order decides.
pub(crate) fn provider() -> CryptoProvider {
    use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256 as AES, TLS13_CHACHA20_POLY1305_SHA256 as CHACHA};
    #[cfg(target_arch = "x86_64")]
    let aes = std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let aes = std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let aes = false;
    CryptoProvider {
        cipher_suites: if aes { vec![AES, CHACHA] } else { vec![CHACHA, AES] },
        ..ring::default_provider()
    }
}

/// A node's name as TLS wants it.
pub(crate) fn server_name(node: &NodeName) -> Result<ServerName<'static>, String> {
    DnsName::try_from(node.as_str().to_owned())
        .map(ServerName::DnsName)
        .map_err(|_| format!("{node} cannot be a host name"))
}

/// The node that a certificate is for: its only DNS name.
pub(crate) fn node_of(cert: &CertificateDer<'_>) -> Result<NodeName, String> {
    let (_, parsed) = X509Certificate::from_der(cert).map_err(|e| format!("it cannot be parsed: {e}"))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|e| format!("its names cannot be parsed: {e}"))?
        .map(|extension| &extension.value.general_names);
    let mut nodes = names.into_iter().flatten().filter_map(|name| match name {
        GeneralName::DNSName(dns) => Some(*dns),
        _ => None,
    });
    match (nodes.next(), nodes.next()) {
        (Some(one), None) => one.parse().map_err(|e| format!("{e}")),
        (None, _) => Err("it names no node".to_owned()),
        (Some(a), Some(b)) => Err(format!("it names several nodes ({a:.80}, {b:.80}, …)")),
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TransportError> {
    fs::read(path).map_err(|source| TransportError::File { what, path: path.to_owned(), source })
}

fn load_certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TransportError> {
    let pem = read(what, path)?;
    let unusable = |why: String| TransportError::Unusable { what, path: path.to_owned(), why };
    let certificates = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| unusable(format!("it is not PEM: {e}")))?;
    if certificates.is_empty() {
        return Err(unusable("it has no certificate in PEM form".to_owned()));
    }
    Ok(certificates)
}

/// The CA's certificates, and when the last of them ends.
fn load_roots(path: &Path) -> Result<(RootCertStore, i64), TransportError> {
    let what = "CA's certificate";
    let (mut roots, mut ends) = (RootCertStore::empty(), i64::MIN);
    for certificate in load_certificates(what, path)? {
        ends = ends.max(not_after(&certificate).unwrap_or(i64::MIN));
        roots.add(certificate).map_err(|e| TransportError::Unusable {
            what,
            path: path.to_owned(),
            why: e.to_string(),
        })?;
    }
    Ok((roots, ends))
}

fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, TransportError> {
    let what = "node's key";
    PrivateKeyDer::from_pem_slice(&read(what, path)?).map_err(|_| TransportError::Unusable {
        what,
        path: path.to_owned(),
        why: "it has no private key in PEM form".to_owned(),
    })
}

/// For the fuzz targets: reads a certificate as a peer shows it.
#[doc(hidden)]
pub fn fuzz_certificate(data: &[u8]) {
    let _ = node_of(&CertificateDer::from(data));
}
