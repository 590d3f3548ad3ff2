//! What opens a link, what does not, and with which error.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use time::OffsetDateTime;
use tranship_wire::{Hello, Purpose, Versions, read_message, write_message};

use super::*;
use crate::Verdict;
use crate::identity::provider;

#[test]
fn two_agents_of_one_ca_know_each_other_and_talk() {
    let pki = Pki::new(&["a", "b"]);
    let greeting = Hello::new(node("a"), Purpose::Pages { stream: 2 }, Some("m-1".parse().unwrap()));
    let (taken, opened) = meet_as(pki.load("b"), pki.load("a"), "b", &greeting);
    let (mut server, got) = taken.unwrap();
    let mut client = opened.unwrap();
    assert_eq!((client.peer(), server.peer(), &got), (&node("b"), &node("a"), &greeting));
    assert_eq!(client.version(), Versions::OURS.max);

    write_message(&mut client, "ping").unwrap();
    assert_eq!(read_message::<_, String>(&mut server).unwrap(), "ping");
    write_message(&mut server, "pong").unwrap();
    assert_eq!(read_message::<_, String>(&mut client).unwrap(), "pong");
    assert_eq!((client.bytes_sent(), server.bytes_sent()), (server.bytes_received(), client.bytes_received()));

    drop(client);
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 0, "a link that was dropped ends in good order");
}

#[test]
fn a_listeners_closer_ends_the_wait_for_callers() {
    let pki = Pki::new(&["b"]);
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let closer = listener.closer().unwrap();
    let waiting = thread::spawn(move || listener.accept().map(drop));
    closer.close();
    assert!(matches!(waiting.join().unwrap(), Err(TransportError::Accept(_))));
}

#[test]
fn a_server_of_another_ca_is_refused_by_the_client() {
    let (ours, theirs) = (Pki::new(&["a"]), Pki::new(&["b"]));
    let (taken, opened) = meet(theirs.load("b"), ours.load("a"));
    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Untrusted { verdict: Verdict::Ours, .. }), "{opened}");
    let taken = taken.unwrap_err();
    assert!(matches!(taken, TransportError::Untrusted { verdict: Verdict::Theirs, .. }), "{taken}");
}

#[test]
fn a_client_of_another_ca_is_refused_by_the_server_and_told_so() {
    let (ours, theirs) = (Pki::new(&["a"]), Pki::new(&["b"]));
    let client = ours.load_with(&both(&ours, &theirs), "a");
    for _ in 0..20 {
        let (taken, opened) = meet(theirs.load("b"), client.clone());
        let opened = opened.unwrap_err();
        assert!(matches!(opened, TransportError::Untrusted { verdict: Verdict::Theirs, .. }), "{opened:?}");
        let taken = taken.unwrap_err();
        assert!(matches!(taken, TransportError::Untrusted { verdict: Verdict::Ours, .. }), "{taken:?}");
    }
}

#[test]
fn a_client_without_a_certificate_is_refused_before_a_byte_of_the_protocol_is_read() {
    let pki = Pki::new(&["b"]);
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let addr = listener.local_addr();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pki.path("ca.crt")).unwrap()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stranger = thread::spawn(move || {
        let tls = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from("b").unwrap()).unwrap();
        let mut stream = rustls::StreamOwned::new(tls, TcpStream::connect(addr).unwrap());
        let _ = stream.write_all(&hello("a").encode());
        stream.read_to_end(&mut Vec::new()).unwrap_err().to_string()
    });
    let error = listener.accept().unwrap().handshake(TIMEOUT).unwrap_err();
    let TransportError::Untrusted { verdict: Verdict::Ours, why, .. } = error else { panic!("{error:?}") };
    assert_eq!(why, "it shows none");
    assert!(stranger.join().unwrap().contains("CertificateRequired"));
}

#[test]
fn another_node_at_the_address_is_refused_by_name() {
    let pki = Pki::new(&["a", "b", "c"]);
    let (taken, opened) = meet_as(pki.load("c"), pki.load("a"), "b", &hello("a"));
    let opened = opened.unwrap_err();
    assert!(
        matches!(&opened, TransportError::WrongNode { expected, found, .. }
        if *expected == node("b") && found == "node c"),
        "{opened:?}"
    );
    assert!(opened.to_string().contains("answers node c, not node b"), "{opened}");
    assert!(taken.is_err());
}

#[test]
fn a_greeting_in_another_name_than_the_certificates_is_refused() {
    let pki = Pki::new(&["a", "b"]);
    let (taken, opened) = meet_as(pki.load("b"), pki.load("a"), "b", &hello("x"));
    assert!(matches!(taken.unwrap_err(), TransportError::Refused { .. }));
    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Refused { .. }), "{opened}");
}

#[test]
fn certificates_that_expire_while_an_agent_runs_are_refused_by_the_other() {
    let pki = Pki::new(&["a", "b"]);
    let past = OffsetDateTime::from(SystemTime::now()) - time::Duration::days(800);
    let then = UnixTime::since_unix_epoch(Duration::from_secs(past.unix_timestamp() as u64));
    pki::init_at(pki.0.path(), &[node("old")], false, past).unwrap();
    let dir = pki.path("old");
    let files = (pki.path("ca.crt"), dir.join("node.crt"), dir.join("node.key"));
    let error = Identity::load(&files.0, &files.1, &files.2).unwrap_err();
    assert!(matches!(error, TransportError::Expired { not_yet: false, .. }), "{error}");

    // The CA itself is newer than the node's certificate here; chains are checked for the moment, not for each other.
    let old = Identity::load_at(&files.0, &files.1, &files.2, then, provider()).unwrap();
    let (taken, opened) = meet(pki.load("b"), old.clone());
    let (taken, opened) = (taken.unwrap_err(), opened.unwrap_err());
    assert!(matches!(&taken, TransportError::Untrusted { verdict: Verdict::Ours, why, .. } if why.contains("expired")));
    assert!(
        matches!(&opened, TransportError::Untrusted { verdict: Verdict::Theirs, why, .. } if why.contains("expired"))
    );
    let (taken, opened) = meet(old, pki.load("a"));
    let (taken, opened) = (taken.unwrap_err(), opened.unwrap_err());
    assert!(
        matches!(&opened, TransportError::Untrusted { verdict: Verdict::Ours, why, .. } if why.contains("expired"))
    );
    assert!(matches!(&taken, TransportError::Untrusted { verdict: Verdict::Theirs, .. }));
}

#[test]
fn versions_without_overlap_are_named_on_both_sides() {
    let pki = Pki::new(&["a", "b"]);
    let mut hello = hello("a");
    hello.versions = Versions { min: 90, max: 91 };
    let (taken, opened) = meet_as(pki.load("b"), pki.load("a"), "b", &hello);
    for error in [taken.unwrap_err(), opened.unwrap_err()] {
        assert!(matches!(&error, TransportError::Version { why, .. } if why.contains("90 to 91")), "{error}");
    }
}

#[test]
fn a_listener_can_refuse_with_a_reason() {
    let pki = Pki::new(&["a", "b"]);
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().to_string();
    thread::scope(|s| {
        let refused =
            s.spawn(|| listener.accept().unwrap().handshake_if(TIMEOUT, |_| Err("no such migration".to_owned())));
        let opened = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT);
        assert!(matches!(opened, Err(TransportError::Refused { why, .. }) if why == "no such migration"));
        assert!(refused.join().unwrap().is_err());
    });
}

#[test]
fn hostile_greetings_of_a_trusted_node_are_refused() {
    let pki = Pki::new(&["a", "b"]);
    let mut huge = tranship_wire::MAGIC.to_vec();
    huge.extend([0xff, 0xff]);
    let mut lying = hello("a").encode();
    lying[12] = 200;
    for greeting in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), huge, lying, vec![0; 5000]] {
        let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
        let addr = listener.local_addr();
        let client = pki.load("a");
        let hostile = thread::spawn(move || {
            let tls = rustls::ClientConnection::new(client.client(), ServerName::try_from("b").unwrap()).unwrap();
            let mut stream = rustls::StreamOwned::new(tls, TcpStream::connect(addr).unwrap());
            stream.write_all(&greeting).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = listener.accept().unwrap().handshake(TIMEOUT).unwrap_err();
        assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
        hostile.join().unwrap();
    }
}

#[test]
fn a_peer_that_hangs_up_in_the_middle_is_dialled_once_more() {
    let pki = Pki::new(&["a", "b"]);
    for times in [1, 2] {
        let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
        let addr = listener.local_addr().to_string();
        let server = thread::spawn(move || {
            // As an agent whose TLS process has ended in the middle of a handshake.
            (0..times).for_each(|_| drop(listener.accept().unwrap()));
            (times == 1).then(|| listener.accept().unwrap().handshake(TIMEOUT).unwrap())
        });
        let opened = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT);
        assert_eq!(server.join().unwrap().is_some(), opened.is_ok());
        if times == 2 {
            let error = opened.unwrap_err();
            assert!(matches!(error, TransportError::HungUp { .. }) && error.is_transient(), "{error}");
        }
    }
}

#[test]
fn callers_that_do_not_speak_tls_are_refused() {
    let pki = Pki::new(&["b"]);
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let mut caller = TcpStream::connect(listener.local_addr()).unwrap();
    caller.write_all(b"GET / HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
    let incoming = listener.accept().unwrap();
    let taken = thread::spawn(move || incoming.handshake(TIMEOUT));
    let _ = caller.read_to_end(&mut Vec::new());
    drop(caller);
    let error = taken.join().unwrap().unwrap_err();
    assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
}

#[test]
fn silent_peers_and_slow_ones_run_out_of_time() {
    let pki = Pki::new(&["a", "b"]);
    let allowed = Duration::from_millis(300);
    let within = |start: Instant| assert!(start.elapsed() >= allowed && start.elapsed() < TIMEOUT);

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let start = Instant::now();
    let error = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), allowed).unwrap_err();
    assert!(matches!(&error, TransportError::Unreachable { source, .. } if source.kind() == ErrorKind::TimedOut));
    within(start);

    // A byte now and then must not extend the time.
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let mut caller = TcpStream::connect(listener.local_addr()).unwrap();
    let incoming = listener.accept().unwrap();
    let start = Instant::now();
    let taken = thread::spawn(move || incoming.handshake(allowed));
    caller.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    for byte in [0x16, 3, 1, 1, 0, 1].into_iter().chain(std::iter::repeat(0)) {
        if caller.write_all(&[byte]).is_err()
            || !matches!(caller.read(&mut [0; 64]), Err(e) if e.kind() == ErrorKind::WouldBlock)
        {
            break;
        }
    }
    drop(caller);
    let error = taken.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, TransportError::Unreachable { source, .. } if source.kind() == ErrorKind::TimedOut),
        "{error:?}"
    );
    within(start);
}

#[test]
fn nobody_at_the_address_is_unreachable() {
    let pki = Pki::new(&["a"]);
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let connector = Connector::new(pki.load("a"));
    for addr in [free.as_str(), "no port", "127.0.0.1:99999"] {
        let error = connector.connect(&node("b"), addr, &hello("a"), TIMEOUT).unwrap_err();
        assert!(matches!(error, TransportError::Unreachable { .. }), "{error:?}");
    }
}

#[test]
fn files_of_an_identity_that_are_wrong_are_named() {
    let (pki, other) = (Pki::new(&["a", "b"]), Pki::new(&["a"]));
    let (ca, cert, key) = (pki.path("ca.crt"), pki.path("a/node.crt"), pki.path("a/node.key"));
    let garbage = pki.path("garbage");
    fs::write(&garbage, "nothing in here").unwrap();
    let missing = pki.path("missing");
    let error = |ca: &Path, cert: &Path, key: &Path| Identity::load(ca, cert, key).unwrap_err();

    for (ca, cert, key) in [(&missing, &cert, &key), (&ca, &missing, &key), (&ca, &cert, &missing)] {
        let e = error(ca, cert, key);
        assert!(matches!(&e, TransportError::File { path, .. } if *path == missing), "{e}");
    }
    for (ca, cert, key) in [(&garbage, &cert, &key), (&ca, &garbage, &key), (&ca, &cert, &garbage)] {
        let e = error(ca, cert, key);
        assert!(matches!(&e, TransportError::Unusable { path, .. } if *path == garbage), "{e}");
    }
    assert!(matches!(error(&ca, &cert, &pki.path("b/node.key")), TransportError::KeyMismatch { .. }));
    assert!(matches!(error(&other.path("ca.crt"), &cert, &key), TransportError::NotIssued { .. }));
    let identity = Identity::load(&ca, &cert, &key).unwrap();
    identity.expect_node(&node("a")).unwrap();
    assert!(matches!(identity.expect_node(&node("b")), Err(TransportError::OtherNode { .. })));
}
