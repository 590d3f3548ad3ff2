//! What of the configuration can be changed while the agent runs: peers, what may come from them, certificates and revocation lists.
//!
//! SIGHUP (`systemctl reload transhipd`) has the file read again. All of it takes effect, or nothing: a file or a certificate that is
//! wrong leaves everything as it is, which the log and `tranship doctor` say. Links that are open go on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use tranship_api::{Leftover, LeftoverKind};
use tranship_transport::{Expiry, Pins};
use tranship_types::NodeName;

use crate::config::{Accept, Config, Peer, Tls};
use crate::node::{Node, sentence};

/// Seconds before the end of a certificate from which on that is told.
const SOON: i64 = 30 * 24 * 3600;
const DAY: i64 = 24 * 3600;

/// The peers, and what may come from them.
#[derive(Debug, Default)]
pub struct PeerTable {
    peers: BTreeMap<NodeName, Peer>,
    accept: Accept,
}

impl PeerTable {
    /// That of a configuration.
    pub fn of(config: &Config) -> Self {
        Self { peers: config.peers.clone(), accept: config.accept.clone() }
    }

    /// Whether a node is a peer.
    pub fn has(&self, peer: &NodeName) -> bool {
        self.peers.contains_key(peer)
    }

    /// Where a peer's agent listens.
    pub fn address(&self, peer: &NodeName) -> Option<&str> {
        self.peers.get(peer).map(|peer| peer.address.as_str())
    }

    /// What may come from a peer; `None` for a node that is none.
    pub fn accept_of(&self, peer: &NodeName) -> Option<&Accept> {
        self.peers.get(peer).map(|peer| peer.accept.as_ref().unwrap_or(&self.accept))
    }

    /// All peers with their addresses.
    pub fn all(&self) -> impl Iterator<Item = (&NodeName, &str)> {
        self.peers.iter().map(|(name, peer)| (name, peer.address.as_str()))
    }

    fn pins(&self) -> Pins {
        let pinned = self.peers.iter().filter(|(_, peer)| !peer.fingerprint.is_empty());
        pinned.map(|(name, peer)| (name.clone(), peer.fingerprint.clone())).collect()
    }
}

/// The certificates of this node, and what it checks of its peers'.
pub trait Certificates: std::fmt::Debug + Send + Sync {
    /// Takes other files, from the next link on. Links that are open go on.
    ///
    /// # Errors
    /// What is wrong with them; those from before hold then.
    fn replace(&self, files: &Tls) -> Result<(), String>;

    /// Takes links from, and to, a peer that is named here only if it shows one of these certificates.
    fn pin(&self, pins: Pins);

    /// When the certificates of this node, of the CA and of the peers that it has met end, and the revocation list is due.
    fn expiries(&self) -> Vec<Expiry>;
}

/// What can be changed while the agent runs.
#[derive(Debug)]
pub struct Live {
    file: PathBuf,
    certificates: Box<dyn Certificates>,
    table: RwLock<Arc<PeerTable>>,
    /// Why the file was not taken when it was read last.
    refused: Mutex<Option<String>>,
}

impl Live {
    /// What `config`, which was read from `file`, says; `certificates` are made from its files.
    pub fn new(file: PathBuf, config: &Config, certificates: Box<dyn Certificates>) -> Self {
        let table = PeerTable::of(config);
        certificates.pin(table.pins());
        Self { file, certificates, table: RwLock::new(Arc::new(table)), refused: Mutex::default() }
    }

    /// The peers as they are configured now.
    pub fn peers(&self) -> Arc<PeerTable> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the file and the certificates again. `running` is what the agent was started with. Returns the keys whose change takes a
    /// restart.
    ///
    /// # Errors
    /// What is wrong; nothing is changed then.
    pub fn reload(&self, running: &Config) -> Result<Vec<&'static str>, String> {
        let read = self.read(running);
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = read.as_ref().err().cloned();
        let config = read?;
        let table = PeerTable::of(&config);
        self.certificates.pin(table.pins());
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
        Ok(running.differences(&config))
    }

    /// Reads the file, and replaces the certificates.
    fn read(&self, running: &Config) -> Result<Config, String> {
        let config = Config::load(&self.file).map_err(|e| sentence(e.as_ref()))?;
        if config.node != running.node {
            return Err(format!(
                "node is {} now, and was {}; an agent keeps its name, restart it",
                config.node, running.node
            ));
        }
        self.certificates.replace(&config.tls)?;
        Ok(config)
    }

    /// What an operator has to see to, for `tranship doctor`: certificates that end soon or have ended, and a file that was not taken.
    pub fn notices(&self, now_unix: i64) -> Vec<Leftover> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let refused = refused.map(|why| Leftover {
            kind: LeftoverKind::Configuration,
            name: self.file.display().to_string(),
            removed: false,
            warning: false,
            note: format!("it was not taken at the last reload, and what was read before holds: {why}"),
        });
        let expiries = self.certificates.expiries();
        refused.into_iter().chain(expiries.iter().filter_map(|expiry| notice(expiry, now_unix))).collect()
    }
}

fn notice(expiry: &Expiry, now_unix: i64) -> Option<Leftover> {
    let left = expiry.ends_unix - now_unix;
    if left > SOON {
        return None;
    }
    let Expiry { what, path, .. } = expiry;
    let when = match left {
        left if left <= 0 => "has ended".to_owned(),
        left => format!("ends in {} days", left / DAY),
    };
    let remedy = if what.contains("revocation list") {
        "make it anew with `tranship init --revoke`, copy it here and reload the agent"
    } else if what.contains("CA") {
        "replace the CA (docs/peers.md), all of whose certificates end with it"
    } else {
        "renew it with `tranship init --renew`, copy it to its node and reload the agent there"
    };
    Some(Leftover {
        kind: LeftoverKind::Certificate,
        name: path.as_ref().map_or_else(|| what.clone(), |path| path.display().to_string()),
        removed: false,
        warning: left > 0,
        note: format!("{what} {when}; {remedy}"),
    })
}

/// Reads the configuration again, and says in the log what came of it.
pub fn reload(node: &Node) {
    match node.live.reload(&node.config) {
        Ok(kept) if kept.is_empty() => tracing::info!("the configuration was read again"),
        Ok(kept) => {
            let keys = kept.join(", ");
            tracing::warn!(keys, "the configuration was read again; these keys have changed and take a restart");
        }
        Err(why) => tracing::error!(why, "the configuration was not taken; what was read before holds"),
    }
}

#[cfg(test)]
mod tests {
    use tranship_transport::{Files, Identity, TransportError};

    use super::*;

    fn load(tls: &Tls) -> Result<Identity, TransportError> {
        Identity::load_files(&Files { ca: &tls.ca, cert: &tls.cert, key: &tls.key, crl: tls.crl.as_deref() })
    }

    /// As the TLS process has them, without another process.
    impl Certificates for Identity {
        fn replace(&self, files: &Tls) -> Result<(), String> {
            load(files).and_then(|new| self.replace(&new)).map_err(|e| sentence(&e))
        }

        fn pin(&self, pins: Pins) {
            self.pin(pins);
        }

        fn expiries(&self) -> Vec<Expiry> {
            self.expiries()
        }
    }

    fn expiry(what: &str, ends_unix: i64) -> Expiry {
        Expiry { what: what.to_owned(), path: None, ends_unix }
    }

    #[test]
    fn certificates_are_told_thirty_days_before_they_end() {
        let of = |left: i64| notice(&expiry("this node's certificate", 1_000_000_000 + left), 1_000_000_000);
        assert_eq!(of(SOON + 1), None);
        let soon = of(12 * DAY + 5).unwrap();
        assert!(soon.warning && soon.note.contains("ends in 12 days; renew it"), "{soon:?}");
        let over = of(-1).unwrap();
        assert!(!over.warning && over.note.contains("has ended"), "{over:?}");
    }

    #[test]
    fn a_reload_takes_everything_or_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path().join("pki");
        let names = ["a", "b"].map(|name| name.parse::<NodeName>().unwrap());
        tranship_transport::pki::init(&pki, &names, false).unwrap();
        let file = directory.path().join("agent.toml");
        let tls = |name: &str| {
            let files = pki.join(name);
            format!(
                "[tls]\nca = {0:?}\ncert = {1:?}\nkey = {2:?}\n",
                files.join("ca.crt"),
                files.join("node.crt"),
                files.join("node.key")
            )
        };
        let write = |listen: &str, name: &str, peers: &str| {
            std::fs::write(&file, format!("node = \"a\"\nlisten = \"{listen}\"\n{}[peers]\n{peers}", tls(name)))
                .unwrap();
        };
        write("127.0.0.1:1", "a", "b = \"127.0.0.2:1\"\n");
        let config = Config::load(&file).unwrap();
        let live = Live::new(file.clone(), &config, Box::new(load(&config.tls).unwrap()));
        let b = &names[1];

        write("127.0.0.1:2", "a", "b = { address = \"127.0.0.3:1\", accept = { containers = [] } }\n");
        assert_eq!(live.reload(&config), Ok(vec!["listen"]));
        let table = live.peers();
        assert_eq!((table.address(b), table.accept_of(b).map(|a| a.containers.len())), (Some("127.0.0.3:1"), Some(0)));
        assert_eq!(live.notices(0), []);

        for (name, peers, words) in [
            ("a", "b = 7\n", "line"),
            ("b", "b = \"127.0.0.9:1\"\n", "is for node b, but this node is a"),
            ("c", "b = \"127.0.0.9:1\"\n", "cannot read the"),
        ] {
            write("127.0.0.1:1", name, peers);
            let why = live.reload(&config).unwrap_err();
            assert!(why.contains(words), "{words:?} not in {why}");
            assert_eq!(live.peers().address(b), Some("127.0.0.3:1"));
            let notices = live.notices(0);
            assert!(notices.len() == 1 && !notices[0].warning && notices[0].note.contains(words), "{notices:?}");
        }
        write("127.0.0.1:1", "a", "");
        assert_eq!(live.reload(&config), Ok(Vec::new()));
        assert!(!live.peers().has(b) && live.notices(0).is_empty());
    }
}
