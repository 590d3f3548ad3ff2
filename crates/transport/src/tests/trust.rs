//! Pinned and revoked certificates, and new files for an agent that runs.

use super::*;
use crate::{Files, Fingerprint, Verdict};

fn fingerprint(pki: &Pki, name: &str) -> Fingerprint {
    use rustls_pki_types::pem::PemObject;
    let der = rustls_pki_types::CertificateDer::from_pem_file(pki.path(name).join("node.crt")).unwrap();
    Fingerprint::of(&der).unwrap()
}

fn with_crl(pki: &Pki, name: &str) -> Opened<Identity> {
    let dir = pki.path(name);
    let (ca, crl) = (pki.path("ca.crt"), pki.path("ca.crl"));
    Identity::load_files(&Files { ca: &ca, cert: &dir.join("node.crt"), key: &dir.join("node.key"), crl: Some(&crl) })
}

#[test]
fn another_certificate_than_the_pinned_one_is_refused_on_either_side() {
    let pki = Pki::new(&["a", "b"]);
    let pin = |identity: Identity, peer: &str, pinned: Fingerprint| {
        identity.pin([(node(peer), vec![pinned])].into());
        identity
    };
    let (of_a, of_b) = (fingerprint(&pki, "a"), fingerprint(&pki, "b"));
    let (taken, opened) = meet(pin(pki.load("b"), "a", of_a), pin(pki.load("a"), "b", of_b));
    assert!(taken.is_ok() && opened.is_ok());

    let (taken, opened) = meet(pin(pki.load("b"), "a", of_b), pki.load("a"));
    assert!(matches!(taken.unwrap_err(), TransportError::Refused { .. }));
    let opened = opened.unwrap_err().to_string();
    assert!(opened.contains("node a shows another certificate") && opened.contains(&of_a.to_string()), "{opened}");

    let (_, opened) = meet(pki.load("b"), pin(pki.load("a"), "b", of_a));
    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Untrusted { verdict: Verdict::Ours, .. }), "{opened}");
}

#[test]
fn a_revoked_certificate_is_refused_on_either_side_and_by_its_own_node() {
    let pki = Pki::new(&["a", "b", "c"]);
    let list = pki::revoke(pki.0.path(), &[node("a")]).unwrap();
    assert_eq!(list, pki.path("ca.crl"));
    let (taken, opened) = meet(with_crl(&pki, "b").unwrap(), pki.load("a"));
    let (taken, opened) = (taken.unwrap_err().to_string(), opened.unwrap_err().to_string());
    assert!(taken.contains("it was revoked"), "{taken}");
    assert!(opened.contains("revocation list there"), "{opened}");
    let (_, opened) = meet(pki.load("a"), with_crl(&pki, "b").unwrap());
    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Untrusted { verdict: Verdict::Ours, .. }), "{opened}");
    let (taken, opened) = meet(with_crl(&pki, "b").unwrap(), with_crl(&pki, "c").unwrap());
    assert!(taken.is_ok() && opened.is_ok());
    let own = with_crl(&pki, "a").unwrap_err().to_string();
    assert!(own.contains("it was revoked"), "{own}");

    // The first one stays in the list when a second one is revoked, and a new certificate of the same node is good.
    pki::revoke(pki.0.path(), &[node("c")]).unwrap();
    let (taken, _) = meet(with_crl(&pki, "b").unwrap(), pki.load("a"));
    assert!(taken.unwrap_err().to_string().contains("it was revoked"));
    pki::init(pki.0.path(), &[node("a")], true).unwrap();
    let (taken, opened) = meet(with_crl(&pki, "b").unwrap(), with_crl(&pki, "a").unwrap());
    assert!(taken.is_ok() && opened.is_ok());
}

#[test]
fn new_files_hold_from_the_next_link_on_and_open_links_go_on() {
    let pki = Pki::new(&["a", "b"]);
    let server = pki.load("b");
    let (taken, opened) = meet(server.clone(), pki.load("a"));
    let (mut taken, mut opened) = (taken.unwrap().0, opened.unwrap());
    let listener = Listener::bind(server.clone(), "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().to_string();

    pki::revoke(pki.0.path(), &[node("a")]).unwrap();
    server.replace(&with_crl(&pki, "b").unwrap()).unwrap();
    assert!(matches!(server.replace(&pki.load("a")), Err(TransportError::OtherNode { .. })));
    let refused = thread::scope(|s| {
        let taken = s.spawn(|| listener.accept()?.handshake(TIMEOUT).map(drop));
        let _ = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT);
        taken.join().unwrap()
    });
    assert!(refused.unwrap_err().to_string().contains("it was revoked"));
    tranship_wire::write_message(&mut opened, "still here").unwrap();
    assert_eq!(tranship_wire::read_message::<_, String>(&mut taken).unwrap(), "still here");
}

#[test]
fn it_is_known_when_certificates_end() {
    let pki = Pki::new(&["a", "b"]);
    pki::revoke(pki.0.path(), &[]).unwrap();
    let server = with_crl(&pki, "b").unwrap();
    let (taken, _) = meet(server.clone(), pki.load("a"));
    taken.unwrap();
    let all = server.expiries();
    let whats: Vec<_> = all.iter().map(|one| one.what.as_str()).collect();
    let expected =
        ["this node's certificate", "the certificate of the CA", "the revocation list", "the certificate of node a"];
    assert_eq!(whats, expected);
    assert!(all[1].ends_unix > all[0].ends_unix && all[0].ends_unix - all[3].ends_unix < 60);
}
