//! What CNI plugins keep on a node about a container that they have attached, besides its interfaces: host-local's reservations of
//! addresses, the result that libcni has cached for the day of `DEL`, and the rules of the plugins behind the first one.
//!
//! The interfaces themselves are made as any others ([`crate::create`]); so the plugin that made them is not asked again.

mod chained;
mod files;
mod holding;

pub use chained::is_plugin;
pub use holding::{HeldReservation, held, hold, hold_if_free, holder, owner, release_held};
use std::net::IpAddr;
use std::path::Path;

use serde_json::Value;
use tranship_types::{Attachment, CniAttachment, Interface, NetworkIdentity};

use crate::NetworkError;
use crate::capture::open_rtnl;
use crate::link::{self, Link};
use crate::namespace::inside;
use files::Reservation;

/// What CNI has noted about the interfaces of the network namespace `netns`. Where libcni has cached no result, a reservation is the
/// container's if it was made for an interface of that name, under the container's name or the namespace's.
///
/// # Errors
/// Files that are there and cannot be read.
pub fn attachments(container: &str, netns: &Path) -> Result<Vec<CniAttachment>, NetworkError> {
    let results = files::results()?;
    let mut all = Vec::new();
    for (interface, addresses) in interfaces(netns)? {
        let own = results.iter().find(|(_, result)| is_result_of(result, netns, &interface));
        let reserved = files::reservations(&addresses)?;
        let found = match own {
            Some((text, result)) => {
                Some((word(result, "networkName"), word(result, "containerId"), Some(text.clone())))
            }
            None => {
                let space = netns.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                let ours =
                    |r: &&Reservation| (r.container == container || r.container == space) && r.interface == interface;
                reserved.iter().find(ours).map(|r| (r.network.clone(), r.container.clone(), None))
            }
        };
        let Some((network, id, cached)) = found else { continue };
        let is_ours = |r: &&Reservation| {
            r.network == network && r.container == id && (r.interface.is_empty() || r.interface == interface)
        };
        let addresses = reserved.iter().filter(is_ours).map(|r| r.address).collect();
        all.push(CniAttachment { container: id, network, interface, addresses, cached });
    }
    Ok(all)
}

fn word(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

/// Whether a cached result is about an interface of that name in a namespace.
fn is_result_of(cached: &Value, netns: &Path, interface: &str) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let made = cached["result"]["interfaces"].as_array().into_iter().flatten();
    cached["ifName"] == interface
        && made.into_iter().any(|i| {
            i["name"] == interface && i["sandbox"].as_str().is_some_and(|path| real(Path::new(path)) == real(netns))
        })
}

/// What stands in the way of [`attach`] of a container of this name on this node: each with a remedy.
pub fn obstacles(name: &str, attachments: &[CniAttachment]) -> Vec<(String, String)> {
    let (mut all, own) = (Vec::new(), holder(name));
    for attachment in attachments {
        let CniAttachment { network, container, .. } = attachment;
        if let Err(error) = files::names_are_plain(attachment) {
            all.push((error.to_string(), "update both agents".into()));
            continue;
        }
        for address in &attachment.addresses {
            if let Ok(Some(other)) = files::reservation(network, *address)
                && other.container != *container
                && other.container != own
            {
                if let Some(away) = holding::held_for(&other.container) {
                    all.push((
                        format!(
                            "CNI's network {network} holds {address} for container {away}, which has left this node"
                        ),
                        format!("give one of them another address, or `tranship release {away}` there"),
                    ));
                    continue;
                }
                all.push((
                    format!("CNI's network {network} has given {address} to container {} already", other.container),
                    format!(
                        "detach that one, remove {} if there is no such container any more, or give each node a range of its own",
                        files::reservation_path(network, *address).display()
                    ),
                ));
            }
        }
        all.extend(chained::obstacles(attachment));
    }
    all
}

/// What a user should know about how the attachment moves.
pub fn remarks(attachments: &[CniAttachment]) -> Vec<String> {
    attachments.iter().flat_map(chained::remarks).collect()
}

/// Has this node's CNI know the container as the source's did: reserves its addresses, keeps the result that its `DEL` will need,
/// publishes its ports (portmap) and lets its packets through (firewall). Success if that is so already. `name` is the container's:
/// addresses that are held for it are given to it.
///
/// # Errors
/// An address that is somebody else's, a plugin's failure, the system's refusals. What was done is for [`detach`] to undo.
pub fn attach(netns: &Path, name: &str, identity: &NetworkIdentity) -> Result<(), NetworkError> {
    for attachment in &identity.cni {
        files::names_are_plain(attachment)?;
        for address in &attachment.addresses {
            files::reserve(attachment, *address, &holder(name))?;
        }
        let Some(mut cached) = chained::parsed(attachment) else { continue };
        if let Some(interface) = identity.interfaces.iter().find(|i| i.name == attachment.interface) {
            adapt(&mut cached, netns, interface)?;
        }
        files::keep_result(attachment, &cached)?;
        chained::call("ADD", netns, attachment, &cached)?;
    }
    Ok(())
}

/// The bridge on this node and the end of a veth there have other hardware addresses than on the source, and the end has another name.
fn adapt(cached: &mut Value, netns: &Path, interface: &Interface) -> Result<(), NetworkError> {
    let Attachment::Bridge { bridge } = &interface.attachment else { return Ok(()) };
    let what = || format!("look for the other end of {} in network namespace {}", interface.name, netns.display());
    let refused = |e| NetworkError::refused(what(), e);
    let inner = inside(netns, || link::by_name(&mut open_rtnl(netns)?, &interface.name).map_err(refused))?;
    let Some(below) = inner.and_then(|link| link.below) else { return Ok(()) };
    let mut rtnl = open_rtnl(netns)?;
    let end = link::by_index(&mut rtnl, below).map_err(refused)?;
    let bridged = link::by_name(&mut rtnl, bridge).map_err(refused)?;
    rename(cached, bridge, bridged.as_ref(), end.as_ref());
    Ok(())
}

/// Puts what a bridge and the end of a veth are on this node into a result, which another node has sent.
fn rename(cached: &mut Value, bridge: &str, bridged: Option<&Link>, end: Option<&Link>) {
    let made = cached.pointer_mut("/result/interfaces").and_then(Value::as_array_mut).into_iter().flatten();
    for made in made.filter_map(Value::as_object_mut) {
        let text = |key: &str| made.get(key).and_then(Value::as_str).unwrap_or_default();
        let here = if text("name") == bridge { bridged } else { end };
        if let (Some(Link { name, mac: Some(mac), .. }), true) = (here, text("sandbox").is_empty()) {
            made.insert("name".into(), name.as_str().into());
            made.insert("mac".into(), mac.map(|byte| format!("{byte:02x}")).join(":").into());
        }
    }
}

/// For the fuzz targets: reads the cached result of an attachment as a peer sends it.
#[doc(hidden)]
pub fn fuzz(attachment: &CniAttachment) {
    let _ = (chained::remarks(attachment), files::names_are_plain(attachment));
    let Some(mut cached) = chained::parsed(attachment) else { return };
    let link = Link { name: "veth0".into(), mac: Some([2; 6]), ..Link::default() };
    rename(&mut cached, "br0", Some(&link), Some(&link));
}

/// Has this node's CNI forget the container: takes back the rules, the result and the reservations that are in its name. Success if
/// there are none.
///
/// # Errors
/// The first failure; the rest is done all the same.
pub fn detach(netns: &Path, attachments: &[CniAttachment]) -> Result<(), NetworkError> {
    let mut failure = None;
    for attachment in attachments.iter().filter(|a| files::names_are_plain(a).is_ok()) {
        let mut attempt = |done: Result<(), NetworkError>| {
            if let Err(error) = done {
                failure.get_or_insert(error);
            }
        };
        if let Some(cached) = chained::parsed(attachment) {
            attempt(chained::call("DEL", netns, attachment, &cached));
            attempt(files::forget_result(attachment));
        }
        for address in &attachment.addresses {
            attempt(files::release(&attachment.network, &attachment.container, *address));
        }
    }
    failure.map_or(Ok(()), Err)
}

/// The names and addresses of the interfaces in a namespace, in whatever state they are.
fn interfaces(netns: &Path) -> Result<Vec<(String, Vec<IpAddr>)>, NetworkError> {
    inside(netns, || {
        let mut rtnl = open_rtnl(netns)?;
        let refused =
            |e| NetworkError::refused(format!("read the addresses in network namespace {}", netns.display()), e);
        let links = link::links(&mut rtnl).map_err(refused)?;
        let addresses = link::addresses(&mut rtnl).map_err(refused)?;
        let of =
            |index: u32| addresses.iter().filter(|(of, ..)| *of == index).map(|(_, address, _)| *address).collect();
        Ok(links.into_iter().filter(|l| !l.loopback).map(|l| (l.name, of(l.index))).collect())
    })
}
