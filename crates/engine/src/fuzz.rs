//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use std::path::Path;

use serde_json::Value;

use crate::archive::{Known, copy_without, first_layers};
use crate::{
    Container, Engine, EtcFiles, Limits, MountTree, Runc, State, containerd, docker, etc_files, limits, podman,
};
use crate::{described, mounts, runc};

/// An OCI configuration or state, as a peer or a runtime has written it.
pub fn oci(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(data) else { return };
    for parent in [None, Some("/lab/b".into())] {
        let adopted = Runc::new("runc".into(), None, parent.clone()).adopt("c", value.clone());
        assert!(parent.is_none() || adopted["linux"]["cgroupsPath"] == "/lab/b/c");
    }
    let container =
        Container { config: value.clone(), parameters: value.clone(), ..Container::at_rest("c", State::Running) };
    let _ = (container.labels(), container.rootfs(), container.network_namespace(), container.bind_mounts());
    let _ = (container.joins_namespace("ipc"), container.own_shared_memory());
    let _ = (runc::runc_s_cgroups(&value), runc::crun_s_cgroups(&value, Path::new("/nowhere")));
    let _ = serde_json::from_slice::<runc::Row>(data);
    let (mut one, mut other) = (value.clone(), value.clone());
    let _ = MountTree::of(&value).give_to(&mut one, Path::new("/nowhere"));
    for is_v2 in [false, true] {
        Limits::of(&value).give_to(&mut other, is_v2);
    }
    limits::update(&mut other, &container.cgroups);
    let _ = EtcFiles::of(&value);
    let _ = (described::published("c", &value), described::layers(&value));
}

/// Descriptions by engines, and parameters that a peer has sent, as JSON.
pub fn engines(data: &[u8]) {
    docker::fuzz(data);
    let Ok(value) = serde_json::from_slice::<Value>(data) else { return };
    docker::fuzz_parameters(&value);
    podman::fuzz_parameters(&value);
}

/// Messages of containerd's.
pub fn containerd(data: &[u8]) {
    containerd::fuzz(data);
}

/// An archive of an image, as an engine writes it and a peer sends it: its copy is no longer than it.
pub fn archive(data: &[u8]) {
    let Ok(known) = first_layers(data, 1) else { return };
    for left in [Known::LeftOut, Known::Empty] {
        let mut copy = Vec::new();
        let _ = copy_without(data, (&known, left), &mut copy);
        assert!(copy.len() <= 2 * data.len() + 2048, "{} of {}", copy.len(), data.len());
    }
}

/// Words of runtimes, and tables of mounts.
pub fn texts(text: &str) {
    let _ = runc::version_in(text);
    let _ = mounts::private_in(text, Path::new("/run/a"));
    if let Some(bytes) = etc_files::from_digits(text) {
        assert_eq!(etc_files::to_digits(&bytes), text.to_ascii_lowercase());
    }
}
