use serde::{Deserialize, Serialize};
use tranship_types::NodeName;
use utoipa::ToSchema;

/// A bridge network of this node that is held together with another node's by a VXLAN, for containers that have moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptPath {
    /// What its engine or CNI calls the network; the bridge's name where neither knows it.
    pub network: String,
    /// The bridge of this node.
    pub bridge: String,
    /// The other node.
    pub peer: NodeName,
    /// The VXLAN device of this node, which is a port of the bridge.
    pub device: String,
    /// The containers for which it is.
    pub containers: Vec<KeptContainer>,
    /// What is wrong with it; absent where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A container for which a path is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptContainer {
    /// Its name.
    pub container: String,
    /// The node that it is on.
    pub node: NodeName,
}

impl std::fmt::Display for KeptPath {
    /// One sentence without a full stop.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { network, bridge, peer, device, .. } = self;
        f.write_str("network ")?;
        f.write_str(network)?;
        if bridge != network {
            write!(f, " (bridge {bridge})")?;
        }
        let for_whom: Vec<String> =
            self.containers.iter().map(|one| format!("{} (on {})", one.container, one.node)).collect();
        write!(f, " is held together with node {peer} by VXLAN {device}, not encrypted, for {}", for_whom.join(", "))?;
        self.trouble.iter().try_for_each(|trouble| write!(f, "; {trouble}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_sentence() {
        let container = KeptContainer { container: "app".into(), node: "b".parse().unwrap() };
        let mut path = KeptPath {
            network: "shop".into(),
            bridge: "br-15a3".into(),
            peer: "b".parse().unwrap(),
            device: "tship-00000a".into(),
            containers: vec![container],
            trouble: None,
        };
        assert_eq!(
            path.to_string(),
            "network shop (bridge br-15a3) is held together with node b by VXLAN tship-00000a, not encrypted, for app (on b)"
        );
        (path.bridge, path.trouble) = ("shop".into(), Some("node b does not answer".into()));
        assert!(
            path.to_string().starts_with("network shop is held")
                && path.to_string().ends_with("; node b does not answer")
        );
    }
}
