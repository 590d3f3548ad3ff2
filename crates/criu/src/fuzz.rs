//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use std::path::Path;

use prost::Message;

use crate::images::{self, Allowed, Images};
pub use crate::preflight::fuzz as preflight;
use crate::rpc::{ExternalMount, Overrides, RequestHead, Response, edit};
use crate::{affinity, cpu, find, hidden, smaps};

/// Messages of CRIU's RPC, as an engine and CRIU send them. An edited request reads as the request did, but for what was changed.
pub fn rpc(data: &[u8]) {
    let overrides = Overrides {
        images_dir_fd: Some(12),
        lazy_pages: Some(true),
        ext_mnt: vec![ExternalMount { key: "/tmp".into(), val: "tmpfs-0".into() }],
        ..Overrides::default()
    };
    if let Ok(edited) = edit(data, &overrides) {
        assert!(edited.len() <= data.len() + 128);
        if let Ok(before) = RequestHead::decode(data) {
            let after = RequestHead::decode(&*edited).expect("an edit keeps a request readable");
            assert_eq!(after.kind, before.kind);
            let opts = after.opts.expect("an edit adds options");
            assert_eq!(opts.images_dir_fd, Some(12));
            assert_eq!(opts.work_dir_fd, before.opts.and_then(|opts| opts.work_dir_fd));
        }
    }
    if let Ok(response) = Response::decode(data) {
        assert_eq!(Response::decode(&*response.encode_to_vec()).as_ref(), Ok(&response));
    }
}

/// CRIU's images, as a peer sends them: for each a byte that chooses its name, two bytes of its length, and its content.
pub fn images(data: &[u8]) {
    const NAMES: [&str; 16] = [
        "inventory.img",
        "pstree.img",
        "core-1.img",
        "ids-1.img",
        "mountpoints-12.img",
        "files.img",
        "seccomp.img",
        "core-6.img",
        "core-7.img",
        "ids-6.img",
        "ids-7.img",
        "userns-9.img",
        "ghost-file-1.img",
        "apparmor.img",
        "mountpoints-13.img",
        "netns-9.img",
    ];
    let (mut all, mut rest) = (Images::default(), data);
    while let [name, low, high, after @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        all.add(NAMES[usize::from(*name) % NAMES.len()], after[..length].to_vec());
        rest = &after[length..];
    }
    for privileged in [false, true] {
        let mut allowed = Allowed::of(&serde_json::Value::Null);
        allowed.privileged = privileged;
        for found in images::check(&all, &allowed).err().unwrap_or_default() {
            assert!(!found.what.is_empty() && !found.what.contains(char::is_control), "{found:?}");
        }
    }
}

/// `/proc/PID/smaps`.
pub fn smaps(data: &[u8]) {
    let _ = smaps::has_protected_part(data);
}

/// The table of shared memory that the preloaded library reads.
pub fn table(text: &str) {
    assert!(hidden::parsed(text).len() <= text.lines().count());
}

/// `/proc/cpuinfo`, lists of processors, `/proc/PID/cgroup`, the words of `criu --version`.
pub fn system(text: &str) {
    let features = cpu::parse("x86_64", text);
    assert!(features.flags.iter().map(String::len).sum::<usize>() <= text.len());
    let _ = affinity::set(text);
    for directory in affinity::directories(text, Path::new("/sys/fs/cgroup")) {
        assert!(directory.starts_with("/sys/fs/cgroup"), "{directory:?}");
    }
    let _ = find::version_in(text);
}
