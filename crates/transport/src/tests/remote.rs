//! Handshakes over sockets, as a TLS process does them.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use tranship_sys::descriptor;
use tranship_wire::{read_message, write_message};

use super::*;
use crate::handshake::{Established, Handshakes, Role};
use crate::remote::{Failed, TlsProcess, serve};
use crate::{Closer, Verdict};

/// Handshakes that are done beyond a pair of sockets.
#[derive(Debug)]
struct Remote(TlsProcess);

impl Remote {
    fn of(identity: Identity) -> Self {
        let (ours, theirs) = descriptor::seqpacket_pair().unwrap();
        let node = identity.node().clone();
        let identity: Arc<dyn Handshakes> = Arc::new(identity);
        thread::spawn(move || serve(&theirs, &identity));
        Self(TlsProcess::new(ours, node))
    }
}

impl Handshakes for Remote {
    fn node(&self) -> &NodeName {
        self.0.node()
    }

    fn check_peer(&self, peer: &NodeName, certificate: &[u8]) -> Result<(), String> {
        crate::Trust::default().check(peer, certificate)
    }

    fn shake(&self, stream: &Arc<TcpStream>, role: &Role, deadline: Instant) -> Result<Established, TransportError> {
        self.0.shake(stream, role, deadline).map_err(|failed| match failed {
            Failed::Handshake(error) => error,
            Failed::NotBegun(error) | Failed::Ended(error) | Failed::Silent(error) => TransportError::TlsProcess(error),
        })
    }
}

fn meet(
    server: impl Handshakes + 'static,
    client: impl Handshakes + 'static,
) -> (Opened<(Connection, Hello)>, Opened<Connection>) {
    let hello = hello(client.node().as_str());
    let listener = Listener::bind(server, "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().to_string();
    thread::scope(|s| {
        let taken = s.spawn(|| listener.accept()?.handshake(TIMEOUT));
        let opened = Connector::new(client).connect(&node("b"), &addr, &hello, TIMEOUT);
        (taken.join().unwrap(), opened)
    })
}

#[test]
fn links_are_opened_through_it_and_do_not_depend_on_it() {
    let pki = Pki::new(&["a", "b"]);
    let (taken, opened) = meet(Remote::of(pki.load("b")), Remote::of(pki.load("a")));
    // Both ends of the sockets are closed by now.
    let ((mut b, _), mut a) = (taken.unwrap(), opened.unwrap());
    assert_eq!((a.peer(), b.peer()), (&node("b"), &node("a")));
    write_message(&mut a, "ping").unwrap();
    assert_eq!(read_message::<_, String>(&mut b).unwrap(), "ping");
    write_message(&mut b, "pong").unwrap();
    assert_eq!(read_message::<_, String>(&mut a).unwrap(), "pong");
    assert_eq!((a.bytes_sent(), b.bytes_sent()), (b.bytes_received(), a.bytes_received()));
}

#[test]
fn refusals_are_what_they_are_without_it() {
    let (ours, theirs) = (Pki::new(&["a"]), Pki::new(&["b"]));
    let client = ours.load_with(&both(&ours, &theirs), "a");
    let (taken, opened) = meet(Remote::of(theirs.load("b")), Remote::of(client));
    let (taken, opened) = (taken.unwrap_err(), opened.unwrap_err());
    assert!(matches!(&taken, TransportError::Untrusted { verdict: Verdict::Ours, .. }), "{taken:?}");
    assert!(matches!(&opened, TransportError::Untrusted { verdict: Verdict::Theirs, .. }), "{opened:?}");

    let pki = Pki::new(&["a", "c"]);
    let (_, opened) = meet(Remote::of(pki.load("c")), Remote::of(pki.load("a")));
    let opened = opened.unwrap_err();
    assert!(matches!(&opened, TransportError::WrongNode { found, .. } if found == "node c"), "{opened:?}");
}

#[test]
fn its_end_is_told_and_whether_it_had_the_connection() {
    let role = Role::Client { peer: node("b"), addr: "somewhere".to_owned() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let process = || {
        let (ours, theirs): (OwnedFd, OwnedFd) = descriptor::seqpacket_pair().unwrap();
        (TlsProcess::new(ours, node("a")), theirs)
    };
    let deadline = Instant::now() + TIMEOUT;
    let (gone, theirs) = process();
    drop(theirs);
    assert!(matches!(gone.shake(&stream, &role, deadline), Err(Failed::NotBegun(_))));
    let (dying, theirs) = process();
    thread::scope(|s| {
        s.spawn(move || {
            descriptor::receive(std::os::fd::AsFd::as_fd(&theirs), &mut [0; 4096]).unwrap();
        });
        assert!(matches!(dying.shake(&stream, &role, deadline), Err(Failed::Ended(_))));
    });
}

#[test]
fn one_that_stands_still_is_known_by_its_silence_and_its_full_queue() {
    let role = Role::Client { peer: node("b"), addr: "somewhere".to_owned() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _theirs) = descriptor::seqpacket_pair().unwrap();
    let process = TlsProcess::new(ours, node("a"));
    let silent = |result: Result<Established, Failed>| match result {
        Err(Failed::Silent(error)) => error.kind(),
        other => panic!("{other:?}"),
    };
    thread::scope(|s| {
        let all: Vec<_> = (0..64).map(|_| s.spawn(|| silent(process.shake(&stream, &role, Instant::now())))).collect();
        // Some of them waited for an answer, others for room.
        let kinds: Vec<_> = all.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(kinds.contains(&std::io::ErrorKind::TimedOut), "{kinds:?}");
    });
}

#[test]
fn a_closer_ends_a_handshake_in_it() {
    let pki = Pki::new(&["b"]);
    let listener = Listener::bind(Remote::of(pki.load("b")), "127.0.0.1:0").unwrap();
    let _silent = TcpStream::connect(listener.local_addr()).unwrap();
    let incoming = listener.accept().unwrap();
    let (closer, is_silent): (Closer, _) = (incoming.closer(), incoming.silence());
    assert!(is_silent());
    let taken = thread::spawn(move || incoming.handshake(TIMEOUT).map(drop));
    let begun = Instant::now();
    closer.close();
    assert!(matches!(taken.join().unwrap(), Err(TransportError::HungUp { .. })));
    assert!(begun.elapsed() < TIMEOUT / 2);
}

#[test]
#[ignore = "measures: cargo test --release -p tranship-transport -- --ignored opening_takes --nocapture"]
fn opening_takes() {
    let pki = Pki::new(&["a", "b"]);
    let measure = |what: &str, listener: Listener, connector: Connector| {
        const LINKS: u32 = 500;
        let addr = listener.local_addr().to_string();
        let server =
            thread::spawn(move || (0..LINKS).for_each(|_| drop(listener.accept().unwrap().handshake(TIMEOUT))));
        let begun = Instant::now();
        for _ in 0..LINKS {
            connector.connect(&node("b"), &addr, &hello("a"), TIMEOUT).unwrap();
        }
        println!("to open a link takes {:.2} ms {what}", begun.elapsed().as_secs_f64() * 1e3 / f64::from(LINKS));
        server.join().unwrap();
    };
    let listen = |handshakes| Listener::bind(handshakes, "127.0.0.1:0").unwrap();
    for _ in 0..3 {
        measure("in one process", listen(pki.load("b")), Connector::new(pki.load("a")));
        let listener = Listener::bind(Remote::of(pki.load("b")), "127.0.0.1:0").unwrap();
        measure("through sockets", listener, Connector::new(Remote::of(pki.load("a"))));
    }
}
