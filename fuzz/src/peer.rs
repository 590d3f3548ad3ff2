//! What agents tell each other in messages, and users tell an agent.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tranship_api::{GroupRequest, MoveRequest, PlanRequest, RecoverRequest};
use tranship_criu::cpu::CpuFeatures;
use tranship_criu::fuzz as criu;
use tranship_memory::huge;
use tranship_network::HeldFrame;
use tranship_storage::TreeDigest;
use tranship_storage::copy::Op;
use tranship_storage::tmpfs::TmpfsMount;
use tranship_types::{
    Bandwidth, CniAttachment, EngineName, GroupId, MigrationId, MoveOptions, NetworkIdentity, NodeName, Report, escaped,
};
use tranship_wire::message::{Request, Response};

/// Reads JSON. What is accepted is the same after another round, but for the last bit of numbers with a fraction.
fn json<T: Serialize + DeserializeOwned>(data: &[u8]) -> Option<T> {
    fn shape(value: &mut Value) {
        match value {
            Value::Number(number) if number.is_f64() => *value = Value::Null,
            Value::Array(all) => all.iter_mut().for_each(shape),
            Value::Object(all) => all.values_mut().for_each(shape),
            _ => {}
        }
    }
    let read: T = serde_json::from_slice(data).ok()?;
    let text = serde_json::to_vec(&read).expect("what was read can be written");
    let again: T = serde_json::from_slice(&text).expect("what was written can be read");
    let [mut one, mut other] = [&read, &again].map(|value| serde_json::to_value(value).expect("and written again"));
    shape(&mut one);
    shape(&mut other);
    assert_eq!(one, other);
    Some(read)
}

/// A message on a control link.
pub fn message(data: &[u8]) {
    match json::<Request>(data) {
        Some(Request::Offer(offer) | Request::Check(offer)) => {
            let _ = offer.network_path();
            let part = |value: &Value| serde_json::to_vec(value).expect("a value is plain data");
            offered(&part(&offer.tmpfs));
            offered(&part(&offer.rootfs));
            oci(&part(&offer.config));
            parameters(&part(&offer.parameters));
        }
        Some(Request::HugePages { pages }) => {
            let mut list = Vec::new();
            huge::take_in(&mut list, pages);
            let runs = list.iter().flat_map(|pages| &pages.runs);
            assert!(runs.map(|(_, count)| count).sum::<u64>() <= huge::MOST);
        }
        Some(Request::Held { frames, .. }) => held(&serde_json::to_vec(&frames).expect("frames are plain data")),
        _ => {}
    }
    if let Some(Response::Draining { remote_faults, .. } | Response::Drained { remote_faults, .. }) = json(data) {
        let _ = (remote_faults.count(), remote_faults.quantile(0.5), remote_faults.classes().count());
    }
}

/// An operation on a tree of files, and names in it.
pub fn tree_op(data: &[u8]) {
    let _ = json::<Op>(data);
    tranship_storage::fuzz::copy::name(data);
}

/// Parts of an offer that are other crates'.
pub fn offered(data: &[u8]) {
    let mounts = json::<Vec<TmpfsMount>>(data).unwrap_or_default();
    tranship_storage::fuzz::peer(&mounts, json::<TreeDigest>(data).as_ref());
    let _ = json::<CpuFeatures>(data);
    if let Some(identity) = json::<NetworkIdentity>(data) {
        identity.cni.iter().for_each(tranship_network::cni::fuzz);
    }
    if let Some(attachment) = json::<CniAttachment>(data) {
        tranship_network::cni::fuzz(&attachment);
    }
}

/// A container's OCI configuration, or its state as a runtime has written it.
pub fn oci(data: &[u8]) {
    tranship_engine::fuzz::oci(data);
}

/// What engines need to make a container again, and their descriptions of containers.
pub fn parameters(data: &[u8]) {
    tranship_engine::fuzz::engines(data);
}

/// The rules of nftables that a container comes with.
pub fn ruleset(data: &[u8]) {
    tranship_network::fuzz::ruleset(data);
}

/// The tracked connections that a container comes with.
pub fn conntrack(data: &[u8]) {
    tranship_network::fuzz::conntrack(data);
}

/// Packets and states of sockets that follow a container.
pub fn held(data: &[u8]) {
    let _ = json::<Vec<HeldFrame>>(data);
    tranship_network::fuzz::peer(data);
}

/// A certificate. A chain that does not lead to the CA is refused by rustls before.
pub fn certificate(data: &[u8]) {
    tranship_transport::fuzz_certificate(data);
}

/// An archive of an image.
pub fn archive(data: &[u8]) {
    tranship_engine::fuzz::archive(data);
}

/// A request to the agent's API, an id in its path, and names.
pub fn api(data: &[u8]) {
    if let Some(request) = json::<MoveRequest>(data) {
        let _ = request.options.check();
    }
    let _ = (json::<PlanRequest>(data), json::<GroupRequest>(data), json::<RecoverRequest>(data));
    let _ = (json::<MoveOptions>(data), json::<Report>(data));
    let Ok(text) = std::str::from_utf8(data) else { return };
    fn same<T: std::str::FromStr + std::fmt::Display>(text: &str) {
        if let Ok(read) = text.parse::<T>() {
            assert_eq!(read.to_string(), text);
        }
    }
    same::<MigrationId>(text);
    same::<GroupId>(text);
    same::<NodeName>(text);
    same::<EngineName>(text);
    let _ = text.parse::<Bandwidth>();
    assert!(!escaped(text).chars().any(char::is_control));
}

/// CRIU's images, before criu restores them.
pub fn criu_images(data: &[u8]) {
    criu::images(data);
}
