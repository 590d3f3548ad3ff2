//! The certificate authority of a set of nodes and the nodes' certificates.
//!
//! ```text
//! DIR/ca.crt            the CA's certificate (ten years)
//! DIR/ca.key            its key, 0600: stays where certificates are made, no node needs it
//! DIR/revoked          the certificates that were revoked
//! DIR/ca.crl           the list of them that nodes read ([`revoke`])
//! DIR/NODE/ca.crt       for the node: copy the directory to /etc/tranship/tls there
//! DIR/NODE/node.crt     its certificate (two years), client and server, DNS name = node name
//! DIR/NODE/node.key     its key, 0600
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData, SanType,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use tranship_types::NodeName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::server_name;

mod revoke;
pub use revoke::revoke;

const CA_DAYS: i64 = 3653;
const NODE_DAYS: i64 = 730;
/// By how much certificates are valid from before they are made: clocks differ.
const BACKDATED: Duration = Duration::days(1);

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PkiReport {
    /// Path of the CA's certificate.
    pub ca: PathBuf,
    /// Whether the CA was made now, as opposed to being there already.
    pub ca_created: bool,
    /// The nodes that got a certificate, and the directory that it is in.
    pub nodes: Vec<(NodeName, PathBuf)>,
}

/// The certificates cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file or directory.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried, e.g. `create`.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A node has a certificate.
    #[error("node {node} has a certificate already ({}); give --renew to replace it", path.display())]
    Exists {
        /// Which node.
        node: NodeName,
        /// The certificate, or the key.
        path: PathBuf,
    },
    /// The name cannot be a host name, which certificates need.
    #[error("{node} cannot be the name of a node: it must be usable as a host name, e.g. node-1")]
    Name {
        /// The name.
        node: NodeName,
    },
    /// The CA that is there cannot be used.
    #[error("the CA in {} is not usable: {why}; restore its files or begin anew in another directory", dir.display())]
    Ca {
        /// Its directory.
        dir: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate for {whom}")]
    Generate {
        /// For whom.
        whom: String,
        /// Why not.
        #[source]
        source: rcgen::Error,
    },
}

/// Makes the CA in `dir`, or takes the one that is there, and a certificate for each of `nodes`. With `renew` existing
/// certificates of these nodes are replaced, key and all; without it they are an error and nothing at all is made.
///
/// # Errors
/// [`PkiError`].
pub fn init(dir: &Path, nodes: &[NodeName], renew: bool) -> Result<PkiReport, PkiError> {
    let now = OffsetDateTime::from(SystemTime::now());
    init_at(dir, nodes, renew, now)
}

pub(crate) fn init_at(dir: &Path, nodes: &[NodeName], renew: bool, now: OffsetDateTime) -> Result<PkiReport, PkiError> {
    for node in nodes {
        server_name(node).map_err(|_| PkiError::Name { node: node.clone() })?;
        for file in ["node.crt", "node.key"] {
            let path = dir.join(node.as_str()).join(file);
            if !renew && path.symlink_metadata().is_ok() {
                return Err(PkiError::Exists { node: node.clone(), path });
            }
        }
    }
    make_dir(dir, 0o755)?;
    let (ca_pem, issuer, ca_created) = ca(dir, now)?;
    let mut report = PkiReport { ca: dir.join("ca.crt"), ca_created, nodes: Vec::new() };
    for node in nodes {
        let generate = |source| PkiError::Generate { whom: format!("node {node}"), source };
        let key = KeyPair::generate().map_err(generate)?;
        let certificate = node_params(node, now).and_then(|p| p.signed_by(&key, &issuer)).map_err(generate)?;
        let directory = dir.join(node.as_str());
        make_dir(&directory, 0o700)?;
        write(&directory.join("ca.crt"), &ca_pem, 0o644)?;
        write(&directory.join("node.key"), &key.serialize_pem(), 0o600)?;
        write(&directory.join("node.crt"), &certificate.pem(), 0o644)?;
        report.nodes.push((node.clone(), directory));
    }
    Ok(report)
}

fn node_params(node: &NodeName, now: OffsetDateTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, node.as_str());
    params.subject_alt_names = vec![SanType::DnsName(node.as_str().try_into()?)];
    params.not_before = now - BACKDATED;
    params.not_after = now + Duration::days(NODE_DAYS);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// The CA's certificate, what signs with it, and whether it is new.
fn ca(dir: &Path, now: OffsetDateTime) -> Result<(String, Issuer<'static, KeyPair>, bool), PkiError> {
    let (cert_path, key_path) = (dir.join("ca.crt"), dir.join("ca.key"));
    let unusable = |why: &str| PkiError::Ca { dir: dir.to_owned(), why: why.to_owned() };
    let (cert, key) = (read(&cert_path)?, read(&key_path)?);
    let (cert, key) = match (cert, key) {
        (None, None) => {
            let (pem, issuer) = new_ca(dir, now)?;
            return Ok((pem, issuer, true));
        }
        (Some(cert), Some(key)) => (cert, key),
        (Some(_), None) => return Err(unusable("ca.key is missing")),
        (None, Some(_)) => return Err(unusable("ca.crt is missing")),
    };
    let key = KeyPair::from_pem(&key).map_err(|_| unusable("ca.key has no private key in PEM form"))?;
    let der = CertificateDer::from_pem_slice(cert.as_bytes())
        .map_err(|_| unusable("ca.crt has no certificate in PEM form"))?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| unusable("ca.crt cannot be parsed"))?;
    if parsed.public_key().raw != key.subject_public_key_info() {
        return Err(unusable("ca.key does not belong to ca.crt"));
    }
    if !parsed.is_ca() {
        return Err(unusable("ca.crt is not the certificate of a CA"));
    }
    if parsed.validity().not_after.timestamp() < (now + Duration::days(1)).unix_timestamp() {
        return Err(unusable("it has expired"));
    }
    let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|_| unusable("ca.crt cannot be parsed"))?;
    Ok((cert, issuer, false))
}

fn new_ca(dir: &Path, now: OffsetDateTime) -> Result<(String, Issuer<'static, KeyPair>), PkiError> {
    let generate = |source| PkiError::Generate { whom: "the CA".to_owned(), source };
    let key = KeyPair::generate().map_err(generate)?;
    let mut params = CertificateParams::default();
    // CAs of one name but of different keys would make "unknown CA" look like a forged signature.
    let id: String = key.public_key_raw().iter().skip(1).take(4).map(|b| format!("{b:02x}")).collect();
    params.distinguished_name.push(DnType::CommonName, format!("Tranship CA {id}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = now - BACKDATED;
    params.not_after = now + Duration::days(CA_DAYS);
    let certificate = params.self_signed(&key).map_err(generate)?;
    // The key first: a certificate without its key could not be told from a lost key.
    write(&dir.join("ca.key"), &key.serialize_pem(), 0o600)?;
    write(&dir.join("ca.crt"), &certificate.pem(), 0o644)?;
    Ok((certificate.pem(), Issuer::new(params, key)))
}

fn make_dir(path: &Path, mode: u32) -> Result<(), PkiError> {
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(|source| PkiError::File {
        action: "create",
        path: path.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::File { action: "read", path: path.to_owned(), source }),
    }
}

/// Puts a file in its place in one step, so that a crash leaves the old or the new one.
fn write(path: &Path, content: &str, mode: u32) -> Result<(), PkiError> {
    let failed = |action| move |source| PkiError::File { action, path: path.to_owned(), source };
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file: File =
        OpenOptions::new().write(true).create_new(true).mode(mode).open(&new).map_err(failed("create"))?;
    file.write_all(content.as_bytes()).and_then(|()| file.sync_all()).map_err(failed("write"))?;
    fs::rename(&new, path).map_err(failed("replace"))
}
