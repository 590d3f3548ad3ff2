//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

pub use crate::copy::fuzz as copy;
use crate::tmpfs::TmpfsMount;
use crate::{TreeDigest, leases, mounts, tmpfs};

/// `/proc/PID/mountinfo` and `/proc/locks`.
pub fn tables(data: &[u8], text: &str) {
    for mount in text.lines().filter_map(mounts::mounted) {
        assert!(mount.source.len() + mount.options.len() <= text.len());
    }
    assert!(mounts::mount_points(data).map(|path| path.as_os_str().len()).sum::<usize>() <= data.len());
    for mount in tmpfs::fuzz(text) {
        assert!(mount.options.are_known());
    }
    assert!(leases::parse(text).len() <= text.lines().count());
}

/// What a peer tells of its tmpfs mounts and of its root filesystem.
pub fn peer(mounts: &[TmpfsMount], digest: Option<&TreeDigest>) {
    tmpfs::fuzz_options(mounts);
    if let Some(digest) = digest {
        assert_eq!(digest.difference(digest), None);
        let other = TreeDigest { hash: format!("{}0", digest.hash), subtrees: None, entries: 0 };
        assert!(digest.difference(&other).is_some() && other.difference(digest).is_some());
    }
}
