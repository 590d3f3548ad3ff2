//! Open files: kinds that CRIU would take from outside of the container, and paths that lead out of it.

use super::allowed::Allowed;
use super::messages::{File, Ghost};
use super::{Finding, Images, shown};

/// Kinds of `fd_types` (fdinfo.proto) that may come: from regular files to memfds, and pidfds.
const REGULAR: u32 = 1;
const UNIX: u32 = 5;
const TUN: u32 = 15;
const EXTERNAL: u32 = 16;
const BPF_MAP: u32 = 19;
const LAST: u32 = 20;
/// `USK_EXTERN` and `USK_CALLBACK` of CRIU's sk-unix.c: a socket whose other end is the node's, or a plugin's.
const OUTSIDE: u32 = 1 | 4;
const TYPE: u32 = 0o170_000;
const DEVICES: [u32; 2] = [0o020_000, 0o060_000];

pub(super) fn check(images: &Images, allowed: &Allowed, found: &mut Vec<Finding>) -> Result<(), Finding> {
    for file in images.each::<File>("files", None)? {
        if let Some(why) = one(&file?, allowed) {
            found.push(Finding::new(why));
        }
    }
    if images.has_any("bpfmap-file") && !allowed.uses_bpf() {
        found.push(Finding::new("have BPF maps, for which it lacks CAP_BPF"));
    }
    if images.has_any("binfmt-misc") && !allowed.mounts_freely() {
        found.push(Finding::new("register program formats, for which it lacks CAP_SYS_ADMIN"));
    }
    for number in images.numbers("ghost-file") {
        // Its content follows, which is no entry.
        let ghost = images.first::<Ghost>("ghost-file", Some(number))?;
        if DEVICES.contains(&(ghost.mode & TYPE)) && !allowed.makes_devices() {
            found.push(Finding::new("make a device, for which it lacks CAP_MKNOD"));
        }
    }
    Ok(())
}

fn one(file: &File, allowed: &Allowed) -> Option<String> {
    match file.kind {
        0 | TUN | EXTERNAL => {
            return Some(format!("have a file of kind {}, which CRIU would take from the node", file.kind));
        }
        BPF_MAP if !allowed.uses_bpf() => return Some("have a BPF map, for which it lacks CAP_BPF".to_owned()),
        0..=LAST => {}
        kind => return Some(format!("have a file of kind {kind}, which is not known here")),
    }
    if file.kind == UNIX && file.unix.as_ref().is_some_and(|socket| socket.uflags & OUTSIDE != 0) {
        return Some("have a Unix socket that is connected to the node's".to_owned());
    }
    let path = file.regular.as_ref().filter(|_| file.kind == REGULAR).map(|regular| &regular.name)?;
    path.split(|byte| *byte == b'/')
        .any(|part| part == b"..")
        .then(|| format!("open {}, a path that leads upwards", shown(path)))
}
