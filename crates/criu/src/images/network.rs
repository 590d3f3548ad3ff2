//! Network namespaces that CRIU makes: of containers whose namespace has no name, and nothing but a loopback interface.

use super::allowed::Allowed;
use super::messages::Device;
use super::{Finding, Images};

/// Kinds of which the content is looked at.
pub(super) const READ: [&str; 6] = ["ip6tables", "iptables", "netdev", "netns-ct", "netns-exp", "nftables"];
/// Rules and tracked connections, which `iptables-restore` and libnftables read.
const RULES: [&str; 5] = ["ip6tables", "iptables", "netns-ct", "netns-exp", "nftables"];
/// What else there is of a namespace: first of one of processes, which CRIU is given.
const OTHERS: [&str; 7] = ["pidns", "ifaddr", "netdev", "netns", "route", "route6", "rule"];
/// `nd_type` of CRIU's netdev.proto.
const LOOPBACK: u32 = 1;

pub(super) fn check(images: &Images, allowed: &Allowed, found: &mut Vec<Finding>) -> Result<(), Finding> {
    if allowed.mounts_freely() {
        return Ok(());
    }
    let may_be_made = !allowed.in_network && allowed.has_namespace("network");
    let none = if may_be_made { &OTHERS[..1] } else { &OTHERS[..] };
    if let Some(kind) = none.iter().find(|kind| images.has_any(kind)) {
        found.push(Finding::new(format!("have {kind} images, of a namespace that CRIU would make")));
    }
    if let Some(kind) = RULES.iter().find(|kind| images.has_content(kind)).filter(|_| !allowed.sets_rules()) {
        found.push(Finding::new(format!("have {kind} images, for which it lacks CAP_NET_ADMIN")));
    }
    for number in images.numbers("netdev") {
        for device in images.each::<Device>("netdev", Some(number))? {
            let kind = device?.kind;
            if kind != LOOPBACK {
                found.push(Finding::new(format!("make a network interface of kind {kind}, which is none of its own")));
            }
        }
    }
    Ok(())
}
