//! The networks of an engine, as a container sees them.

use std::net::IpAddr;

use serde_json::Value;

/// A network of an engine that a container is attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedNetwork {
    /// The network's name.
    pub name: String,
    /// The container's addresses there.
    pub addresses: Vec<IpAddr>,
    /// The gateways that the engine has given it there.
    pub gateways: Vec<IpAddr>,
    /// The names that the engine's resolver has for the container there. Empty where the network has no resolver.
    pub names: Vec<String>,
}

impl AttachedNetwork {
    /// One with these addresses, of which those that are none are left out, and names: the container's own and its
    /// aliases.
    pub(crate) fn new<'a>(
        name: &str,
        addresses: impl Iterator<Item = &'a str>,
        gateways: Vec<IpAddr>,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let mut all: Vec<String> = Vec::new();
        for name in names {
            if !all.iter().any(|known| known == name) {
                all.push(name.to_owned());
            }
        }
        let addresses = addresses.filter_map(|text| text.parse().ok()).collect();
        Self { name: name.to_owned(), addresses, gateways, names: all }
    }
}

/// The gateways of an endpoint, as both Docker and Podman describe it.
pub(crate) fn gateways(endpoint: &Value) -> Vec<IpAddr> {
    let texts = ["Gateway", "IPv6Gateway"].into_iter().filter_map(|key| endpoint[key].as_str());
    texts.filter_map(|text| text.parse().ok()).collect()
}
