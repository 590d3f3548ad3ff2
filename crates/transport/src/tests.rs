//! Two agents over loopback: what opens a link, what does not, and with which error.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tempfile::TempDir;
use time::OffsetDateTime;
use tranship_types::NodeName;
use tranship_wire::{Hello, Purpose, Versions, read_message, write_message};

use crate::{Connection, Connector, Identity, Link, Listener, TransportError, Verdict, pki};

const TIMEOUT: Duration = Duration::from_secs(10);

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn hello(name: &str) -> Hello {
    Hello::new(node(name), Purpose::Control, None)
}

struct Pki(TempDir);

impl Pki {
    fn new(nodes: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        pki::init(dir.path(), &nodes.iter().map(|n| node(n)).collect::<Vec<_>>(), false).unwrap();
        Self(dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn load(&self, name: &str) -> Identity {
        self.load_with(&self.path("ca.crt"), name)
    }

    fn load_with(&self, ca: &Path, name: &str) -> Identity {
        let dir = self.path(name);
        Identity::load(ca, &dir.join("node.crt"), &dir.join("node.key")).unwrap()
    }
}

/// A file with the certificates of both CAs: its holder accepts nodes of either.
fn both(a: &Pki, b: &Pki) -> PathBuf {
    let path = a.path("both.crt");
    let pem = fs::read_to_string(a.path("ca.crt")).unwrap() + &fs::read_to_string(b.path("ca.crt")).unwrap();
    fs::write(&path, pem).unwrap();
    path
}

type Opened<T> = Result<T, TransportError>;

/// Lets `client` dial a server with `server`'s identity as node `dialled`; returns how it went for each.
fn meet_as(
    server: Identity,
    client: Identity,
    dialled: &str,
    hello: &Hello,
) -> (Opened<(Connection, Hello)>, Opened<Connection>) {
    let listener = Listener::bind(server, "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().to_string();
    thread::scope(|s| {
        let taken = s.spawn(|| listener.accept()?.handshake(TIMEOUT));
        let opened = Connector::new(client).connect(&node(dialled), &addr, hello, TIMEOUT);
        (taken.join().unwrap(), opened)
    })
}

fn meet(server: Identity, client: Identity) -> (Opened<(Connection, Hello)>, Opened<Connection>) {
    let (dialled, hello) = (server.node().to_string(), hello(client.node().as_str()));
    meet_as(server, client, &dialled, &hello)
}

fn pair() -> (Connection, Connection) {
    let pki = Pki::new(&["a", "b"]);
    let (taken, opened) = meet(pki.load("b"), pki.load("a"));
    (opened.unwrap(), taken.unwrap().0)
}

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
fn reads_and_writes_of_all_sizes_arrive_unchanged_both_ways() {
    let (mut a, mut b) = pair();
    let sizes = [1, 24, 100, 16383, 16384, 16385, 40_000, 262_144, 262_145, 1 << 20, 3_000_001, 7];
    let content: Vec<u8> = (0..sizes.iter().sum()).map(|i: usize| (i * 31 % 251) as u8).collect();
    let write = |link: &mut Connection| {
        let mut at = 0;
        for size in sizes {
            link.write_all(&content[at..at + size]).unwrap();
            at += size;
        }
        link.flush().unwrap();
    };
    let read = |link: &mut Connection| {
        let (mut got, mut want) = (vec![0; content.len()], [3, 50_000, 1, 2_000_000, 999].iter().cycle());
        let mut at = 0;
        while at < got.len() {
            let end = got.len().min(at + want.next().unwrap());
            link.read_exact(&mut got[at..end]).unwrap();
            at = end;
        }
        assert!(got == content);
    };
    thread::scope(|s| {
        s.spawn(|| {
            write(&mut a);
            read(&mut a);
        });
        read(&mut b);
        write(&mut b);
    });
}

#[test]
fn a_write_while_unread_data_waits_keeps_that_data() {
    let (mut a, mut b) = pair();
    a.write_all(&[1; 100_000]).unwrap();
    a.flush().unwrap();
    let mut first = [0; 10];
    b.read_exact(&mut first).unwrap();
    b.write_all(&[2; 50_000]).unwrap();
    b.flush().unwrap();
    a.read_exact(&mut [0; 50_000]).unwrap();
    let mut rest = vec![0; 99_990];
    b.read_exact(&mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 1));
}

#[test]
fn a_read_sends_what_was_written_before() {
    let (mut a, mut b) = pair();
    a.set_timeout(Some(TIMEOUT)).unwrap();
    let echo = thread::spawn(move || {
        let mut byte = [0];
        b.read_exact(&mut byte).unwrap();
        b.write_all(&byte).unwrap();
        assert_eq!(b.read(&mut byte).unwrap(), 0);
    });
    a.write_all(&[42]).unwrap();
    let mut byte = [0];
    a.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [42]);
    drop(a);
    echo.join().unwrap();
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
    let old = Identity::load_at(&files.0, &files.1, &files.2, then).unwrap();
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
            let tls = rustls::ClientConnection::new(client.client.clone(), ServerName::try_from("b").unwrap()).unwrap();
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
fn a_read_that_times_out_can_be_repeated() {
    let (mut a, mut b) = pair();
    a.set_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(a.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
    b.write_all(&[7]).unwrap();
    b.flush().unwrap();
    let mut byte = [0];
    a.set_timeout(Some(TIMEOUT)).unwrap();
    a.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn a_closer_wakes_whoever_waits_and_both_ends_get_an_error() {
    let (mut a, mut b) = pair();
    let closer = a.closer();
    let waiting = thread::spawn(move || a.read(&mut [0]));
    closer.close();
    assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    b.set_timeout(Some(TIMEOUT)).unwrap();
    b.read(&mut [0]).unwrap_err();
    closer.close();
}

/// Passes bytes on from one caller to `to`, cut after `limit` bytes of the caller's.
fn cutting_proxy(to: String, limit: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (caller, _) = listener.accept().unwrap();
        let callee = TcpStream::connect(to).unwrap();
        let (mut back_from, mut back_to) = (callee.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut back_from, &mut back_to));
        let _ = io::copy(&mut (&caller).take(limit), &mut &callee);
        let _ = callee.shutdown(Shutdown::Both);
        let _ = caller.shutdown(Shutdown::Both);
    });
    addr
}

#[test]
fn a_link_cut_in_the_middle_is_an_error_never_an_end() {
    let pki = Pki::new(&["a", "b"]);
    for limit in [0, 1, 100, 500, 1000, 5_000, 50_000, 300_000] {
        let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
        let addr = cutting_proxy(listener.local_addr().to_string(), limit);
        thread::scope(|s| {
            let server = s.spawn(|| {
                let (mut link, _) = listener.accept().unwrap().handshake(TIMEOUT).map_err(drop)?;
                io::copy(&mut link, &mut io::sink()).map_err(drop)
            });
            if let Ok(mut link) = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT) {
                let _ = link.write_all(&vec![5; 1 << 20]).and_then(|()| link.flush());
                let _ = link.read(&mut [0]).unwrap_err();
                link.write_all(&vec![5; 1 << 20]).unwrap_err();
            }
            assert!(server.join().unwrap().is_err(), "{limit}");
        });
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

#[test]
#[ignore = "measures: cargo test --release -p tranship-transport -- --ignored throughput --nocapture"]
fn throughput() {
    let total: usize = 6 << 30;
    for size in [4 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let (mut a, mut b) = pair();
        let start = Instant::now();
        thread::scope(|s| {
            s.spawn(|| {
                let pages: Vec<u8> = (0..size).map(|i| (i * 7 % 253) as u8).collect();
                let header = [9; 24];
                for _ in 0..total / size {
                    let n = a.write_vectored(&[io::IoSlice::new(&header), io::IoSlice::new(&pages)]).unwrap();
                    assert_eq!(n, size + 24);
                }
                a.flush().unwrap();
            });
            let (mut header, mut pages) = ([0; 24], vec![0; size]);
            for _ in 0..total / size {
                b.read_exact(&mut header).unwrap();
                b.read_exact(&mut pages).unwrap();
            }
        });
        let seconds = start.elapsed().as_secs_f64();
        println!("frames of {:4} KiB: {:.2} GB/s", size >> 10, total as f64 / seconds / 1e9);
    }
    let (mut a, mut b) = pair();
    let rounds = 20_000;
    let start = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            for i in 0..rounds {
                write_message(&mut a, &i).unwrap();
                assert_eq!(read_message::<_, u32>(&mut a).unwrap(), i);
            }
        });
        for _ in 0..rounds {
            let i: u32 = read_message(&mut b).unwrap();
            write_message(&mut b, &i).unwrap();
        }
    });
    println!("round trip of a message: {:.1} µs", start.elapsed().as_secs_f64() / f64::from(rounds) * 1e6);
}
