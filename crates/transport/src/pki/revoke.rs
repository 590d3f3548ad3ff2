//! The revocation list of the CA: `DIR/ca.crl`, made anew with each revocation from the certificates that `DIR/revoked` lists.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use time::{Duration, OffsetDateTime};
use tranship_types::NodeName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{BACKDATED, CA_DAYS, PkiError, ca, read, write};

/// Adds the certificates that `dir` has of `nodes` to the revocation list of the CA in `dir`. Returns the list's path.
///
/// # Errors
/// [`PkiError`]; nothing is changed then.
pub fn revoke(dir: &Path, nodes: &[NodeName]) -> Result<PathBuf, PkiError> {
    let now = OffsetDateTime::from(SystemTime::now());
    let unusable = |why: String| PkiError::Ca { dir: dir.to_owned(), why };
    if !dir.join("ca.key").exists() {
        return Err(unusable("ca.key is missing".to_owned()));
    }
    let (_, issuer, _) = ca(dir, now)?;
    // One line for each: serial number in hexadecimal, time of the revocation in seconds, node.
    let list = dir.join("revoked");
    let mut text = read(&list)?.unwrap_or_default();
    for node in nodes {
        let path = dir.join(node.as_str()).join("node.crt");
        let pem = read(&path)?.ok_or_else(|| unusable(format!("it has no certificate of node {node}")))?;
        let serial = serial(&pem).ok_or_else(|| unusable(format!("{} is no certificate", path.display())))?;
        let digits: String = serial.iter().map(|byte| format!("{byte:02x}")).collect();
        if !text.lines().any(|line| line.split(' ').next() == Some(&digits)) {
            let _ = writeln!(text, "{digits} {} {node}", now.unix_timestamp());
        }
    }
    let revoked: Vec<_> = text.lines().filter_map(entry).collect();
    if revoked.len() != text.lines().count() {
        return Err(unusable(format!("{} has a line that is no serial number, time and node", list.display())));
    }
    let generate = |source| PkiError::Generate { whom: "the revocation list".to_owned(), source };
    let params = CertificateRevocationListParams {
        this_update: now - BACKDATED,
        next_update: now + Duration::days(CA_DAYS),
        crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let pem = params.signed_by(&issuer).and_then(|signed| signed.pem()).map_err(generate)?;
    write(&list, &text, 0o644)?;
    let path = dir.join("ca.crl");
    write(&path, &pem, 0o644)?;
    Ok(path)
}

fn serial(pem: &str) -> Option<Vec<u8>> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, parsed) = X509Certificate::from_der(&der).ok()?;
    Some(parsed.raw_serial().to_vec())
}

fn entry(line: &str) -> Option<RevokedCertParams> {
    let mut fields = line.split(' ');
    let digits = fields.next()?;
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    let serial: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect::<Option<_>>()?;
    let time = OffsetDateTime::from_unix_timestamp(fields.next()?.parse().ok()?).ok()?;
    Some(RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: time,
        reason_code: None,
        invalidity_date: None,
    })
}
