//! Two agents over loopback.

mod opening;
mod remote;
mod streaming;
mod trust;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tranship_types::NodeName;
use tranship_wire::{Hello, Purpose};

use crate::{Connection, Connector, Identity, Link, Listener, TransportError, pki};

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
