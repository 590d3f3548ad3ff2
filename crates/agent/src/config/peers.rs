//! The other nodes: where they are, which certificate they show, and which containers may come from them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tranship_transport::Fingerprint;
use tranship_types::EngineName;

/// One of `[peers]`: `b = "ADDRESS"`, or a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// Where its agent listens, `host:port`.
    pub address: String,
    /// The certificates that it may show; empty: any of the CA with its name.
    pub fingerprint: Vec<Fingerprint>,
    /// What may come from it; `None`: what `[accept]` says.
    pub accept: Option<Accept>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    address: String,
    #[serde(default)]
    fingerprint: OneOrMore,
    accept: Option<Accept>,
}

#[derive(Deserialize, Default)]
#[serde(untagged)]
enum OneOrMore {
    #[default]
    None,
    One(String),
    More(Vec<String>),
}

impl<'de> Deserialize<'de> for Peer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Peer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the address of the node's agent, or a table with `address`, `fingerprint` and `accept`")
            }

            fn visit_str<E: Error>(self, address: &str) -> Result<Peer, E> {
                Ok(Peer { address: address.to_owned(), fingerprint: Vec::new(), accept: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Peer, A::Error> {
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                let pins = match table.fingerprint {
                    OneOrMore::None => Vec::new(),
                    OneOrMore::One(text) => vec![text],
                    OneOrMore::More(texts) => texts,
                };
                let fingerprint =
                    pins.iter().map(|text| text.parse().map_err(A::Error::custom)).collect::<Result<_, _>>()?;
                Ok(Peer { address: table.address, fingerprint, accept: table.accept })
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// Which containers may come from a peer. What is not named here is refused, except for what every container has.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Accept {
    /// Names, with `*` and `?`. Empty: no container may come.
    pub containers: Vec<String>,
    /// Engines; `None`: all of this node's.
    pub engines: Option<Vec<EngineName>>,
    /// Directories and files of this node, with all below them, that may be mounted into a container.
    pub binds: Vec<AllowedBind>,
    /// Root filesystems of runc's containers: these directories and those below them. Empty: any that is not part of the system.
    pub roots: Vec<PathBuf>,
    /// Devices of this node that a container may use besides those that every container has.
    pub devices: Vec<PathBuf>,
    /// Capabilities that amount to root on this node, and that a container may have all the same; `ALL` for all.
    pub capabilities: Vec<String>,
    /// Programs of this node that a container's configuration may name to be run outside of it, as root: OCI hooks, and log programs.
    pub programs: Vec<PathBuf>,
    /// Containers may be privileged: host namespaces, no masked paths, no security profiles, every capability and device.
    pub privileged: bool,
    /// Containers must have a seccomp filter.
    pub seccomp: bool,
    /// Most MiB of directory trees that may come with a container.
    pub trees_mib: Option<u64>,
    /// Calls of the API that the peer passes on are answered: its root may do here what root can do with `tranship`.
    pub control: bool,
}

impl Default for Accept {
    fn default() -> Self {
        Self {
            containers: vec!["*".to_owned()],
            engines: None,
            binds: Vec::new(),
            roots: Vec::new(),
            devices: Vec::new(),
            capabilities: Vec::new(),
            programs: Vec::new(),
            privileged: false,
            seccomp: false,
            trees_mib: None,
            control: false,
        }
    }
}

impl Accept {
    /// Whether its paths can be meant: what is wrong, and what to do.
    pub fn check(&self) -> Result<(), String> {
        let binds = self.binds.iter().map(|bind| ("binds", &bind.path));
        let others = [("roots", &self.roots), ("devices", &self.devices), ("programs", &self.programs)];
        let others = others.into_iter().flat_map(|(key, paths)| paths.iter().map(move |path| (key, path)));
        for (key, path) in binds.chain(others) {
            if !is_plain(path) {
                return Err(format!("{key}: {path:?} is no absolute path without . and ..; give the path from / on"));
            }
        }
        match self
            .capabilities
            .iter()
            .find(|name| name.is_empty() || !name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'))
        {
            Some(name) => Err(format!("capabilities: {name:?} is no capability; write them like SYS_ADMIN")),
            None => Ok(()),
        }
    }
}

/// Whether a path is absolute, and leads where it says: without `.`, `..` and zero bytes.
pub fn is_plain(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    let named = |part: &[u8]| part != b"." && part != b"..";
    path.is_absolute() && text.split(|b| *b == b'/').all(named) && !text.contains(&0)
}

/// A directory or file of this node that may be mounted into containers: `PATH`, or `PATH:ro`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedBind {
    pub path: PathBuf,
    /// It may be written to.
    pub writable: bool,
}

impl FromStr for AllowedBind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, writable) = match text.rsplit_once(':') {
            Some((path, "ro")) => (path, false),
            Some((path, "rw")) => (path, true),
            Some((_, other)) => return Err(format!("binds: {other:?} in {text:?} is neither ro nor rw")),
            None => (text, true),
        };
        Ok(Self { path: path.into(), writable })
    }
}

impl<'de> Deserialize<'de> for AllowedBind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn read(text: &str) -> Result<Peer, String> {
        let all: BTreeMap<String, Peer> = toml::from_str(text).map_err(|e| e.message().to_owned())?;
        all.into_values().next().ok_or_else(|| "nothing".to_owned())
    }

    #[test]
    fn a_peer_is_an_address_or_a_table() {
        let short = read("b = \"10.0.0.2:7077\"").unwrap();
        assert_eq!(short, read("[b]\naddress = \"10.0.0.2:7077\"").unwrap());
        assert_eq!((short.accept, short.fingerprint.len()), (None, 0));
        let pin = format!("sha256:{}", "0f".repeat(32));
        let full = format!(
            "[b]\naddress = \"b:1\"\nfingerprint = [\"{pin}\", \"{pin}\"]\naccept = {{ containers = [\"web-*\"], \
             engines = [\"runc\"], binds = [\"/srv\", \"/usr:ro\"] }}"
        );
        let full = read(&full).unwrap();
        let accept = full.accept.unwrap();
        assert_eq!((full.fingerprint.len(), accept.containers), (2, vec!["web-*".to_owned()]));
        assert_eq!(accept.binds.iter().map(|bind| bind.writable).collect::<Vec<_>>(), [true, false]);
        assert!(!accept.privileged && accept.engines == Some(vec![EngineName::Runc]));
        for (wrong, why) in [
            ("b = 7", "the address of the node's agent, or a table"),
            ("[b]\naddress = \"b:1\"\nadress = 1", "unknown field `adress`"),
            ("[b]\naddress = \"b:1\"\nfingerprint = \"0f\"", "is no fingerprint"),
            ("[b]\naddress = \"b:1\"\naccept = { bind = [] }", "unknown field `bind`"),
            ("[b]\naddress = \"b:1\"\naccept = { binds = [\"/x:y\"] }", "neither ro nor rw"),
            ("[b]\naccept = { }", "missing field `address`"),
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn paths_lead_where_they_say() {
        for good in ["/", "/srv", "/srv/a.b/..c"] {
            assert!(is_plain(Path::new(good)), "{good}");
        }
        for bad in ["", "srv", "./srv", "/srv/../etc", "/srv/./x", "/..", "/srv/.", "/a\0b"] {
            assert!(!is_plain(Path::new(bad)), "{bad:?}");
        }
        let accept = Accept { binds: vec!["/srv/../etc".parse().unwrap()], ..Accept::default() };
        assert!(accept.check().unwrap_err().contains("binds: "));
        let accept = Accept { capabilities: vec!["sys_admin".to_owned()], ..Accept::default() };
        assert!(accept.check().unwrap_err().contains("write them like SYS_ADMIN"));
        Accept::default().check().unwrap();
    }
}
