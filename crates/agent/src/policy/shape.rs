//! What no offer may have, whatever is configured: names in it become parts of paths here, and paths are opened as root.

use std::net::IpAddr;
use std::path::Path;

use tranship_coordinator::Failure;
use tranship_engine::misplaced_mount;
use tranship_network::VXLAN_BITS;
use tranship_types::{Attachment, EngineName, MigrationId, OfferedPath, TreeKind};
use tranship_wire::message::Offer;

use super::keys;
use crate::config::is_plain;
use crate::trees::TREES;

/// Most of what a container has once for each of its interfaces, mounts and sizes of huge pages.
const MANY: usize = 4096;
/// Most objects that standard streams may lead to: three that the first process has, and those that a
/// shell keeps under other numbers.
const STREAMS: usize = 16;

/// Whether an offer can be worked with at all.
///
/// # Errors
/// What is wrong with it.
pub fn acceptable(offer: &Offer) -> Result<(), Failure> {
    wrong(offer).map_or(Ok(()), |why| {
        Err(Failure::new(format!("the offer of container {:?} is not acceptable: {why}", offer.container)))
    })
}

fn is_name(text: &str) -> bool {
    text.parse::<MigrationId>().is_ok()
}

fn wrong(offer: &Offer) -> Option<String> {
    if !is_name(&offer.container) {
        return Some("its name can have letters, digits, '-', '_' and '.' only, at most 40".to_owned());
    }
    if offer.network_owner.as_deref().is_some_and(|owner| !is_name(owner)) {
        return Some("the container that brings its network has a name that cannot be one".to_owned());
    }
    if offer.joined_network.is_some() && (offer.network_owner.is_none() || offer.network.is_some()) {
        return Some("it joins a network namespace that no container brings".to_owned());
    }
    if offer.config["linux"]["cgroupsPath"].as_str().is_some_and(|path| path.split('/').any(|part| part == "..")) {
        return Some("its cgroup's path leads upwards".to_owned());
    }
    if offer.streams == 0 {
        return Some("no stream would bring its memory".to_owned());
    }
    if offer.streams_of_node.len() > STREAMS {
        return Some(format!("it has more than {STREAMS} standard streams"));
    }
    if let Some(why) = offer.config["mounts"].as_array().into_iter().flatten().find_map(misplaced_mount) {
        return Some(format!("{why}, where no link of its image can lead"));
    }
    trees(offer).or_else(|| network(offer)).or_else(|| {
        let (key, other) = mistaken_key(offer)?;
        Some(format!("its configuration has the key {key:?}, which the engine takes for {other:?}"))
    })
}

fn mistaken_key(offer: &Offer) -> Option<(&str, &'static str)> {
    let parameters = &offer.parameters;
    let volumes = parameters["volumes"].as_array().into_iter().flatten();
    keys::of_oci(&offer.config)
        .or_else(|| keys::of_oci(&parameters["spec"]))
        .or_else(|| keys::of_docker(&parameters["body"]))
        .or_else(|| volumes.map(|volume| &volume["body"]).find_map(keys::of_docker))
}

fn trees(offer: &Offer) -> Option<String> {
    if offer.trees.len() > TREES {
        let count = offer.trees.len();
        return Some(format!(
            "it has {count} directory trees, more than the {TREES} that are possible; mount fewer of them"
        ));
    }
    if offer.binds.len() > MANY || offer.huge_pages.len() > MANY {
        return Some(format!("it has more than {MANY} mounts or sizes of huge pages"));
    }
    for (at, tree) in offer.trees.iter().enumerate() {
        if !is_plain(&tree.path) || tree.path == Path::new("/") {
            return Some(format!(
                "the path {:?} of one of its directories is not absolute and without . and ..",
                tree.path
            ));
        }
        let alike = |other: &&tranship_types::CarriedTree| {
            let bound = tree.kind == TreeKind::Bind && other.kind == TreeKind::Bind;
            let one_in_the_other = other.path.starts_with(&tree.path) || tree.path.starts_with(&other.path);
            (bound && one_in_the_other) || (other.kind, &other.inside) == (tree.kind, &tree.inside)
        };
        if let Some(other) = offer.trees[at + 1..].iter().find(alike) {
            return Some(format!("the {tree} and the {other} lie one in the other"));
        }
    }
    None
}

fn network(offer: &Offer) -> Option<String> {
    // These attach the container themselves, in a namespace that is named here.
    let attaches = matches!(offer.engine.parse(), Ok(EngineName::Docker | EngineName::Podman));
    if let Some(path) = offer.network_path().filter(|_| !attaches)
        && let Err(why) = tranship_network::check_name(path)
    {
        return Some(why);
    }
    let (_, identity) = offer.network.as_ref()?;
    if identity.interfaces.len() > MANY {
        return Some("it has too many interfaces".to_owned());
    }
    if let Some(why) = offer.paths.iter().find_map(path) {
        return Some(why.to_owned());
    }
    let outer = |attachment: &Attachment| match attachment {
        Attachment::Macvlan { parent: name } | Attachment::Bridge { bridge: name } => name.clone(),
    };
    let names = identity.interfaces.iter().flat_map(|one| [one.name.clone(), outer(&one.attachment)]);
    names.into_iter().find(|name| !is_interface(name)).map(|name| format!("{name:?} is no name of an interface"))
}

const FIRST_UNPRIVILEGED_PORT: u16 = 1024;
const LONGEST_NAME: usize = 255;

/// What is wrong with a path that is to be kept.
fn path(path: &OfferedPath) -> Option<&'static str> {
    if path.id == 0 || path.id >> VXLAN_BITS != 0 || path.port < FIRST_UNPRIVILEGED_PORT {
        return Some("the number of a VXLAN, or its port, is none");
    }
    let is_host = |address: IpAddr| !address.is_loopback() && !address.is_unspecified() && !address.is_multicast();
    let (source, destination) = (path.source, path.destination);
    let is_pair = source != destination && source.is_ipv4() == destination.is_ipv4();
    if !is_pair || !is_host(source) || !is_host(destination) {
        return Some("the addresses of a path are not those of two nodes");
    }
    let is_name = |text: &String| text.len() <= LONGEST_NAME && !text.contains(char::is_control);
    let containers = path.ends.iter().map(|end| &end.container);
    if !is_interface(&path.interface) || !path.names.iter().chain([&path.network]).chain(containers).all(is_name) {
        return Some("a name on one of its networks is none");
    }
    let is_long = path.ends.len() > MANY || path.guarded.len() > MANY || path.names.len() > MANY;
    is_long.then_some("too many containers, names or addresses are on one of its networks")
}

/// As the kernel has it (`dev_valid_name`).
fn is_interface(name: &str) -> bool {
    !name.is_empty()
        && name.len() < 16
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace() || c.is_control())
}
