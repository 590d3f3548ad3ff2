//! Filesystems that are full: which one it is, and what to do.

use std::path::Path;

use nix::sys::statvfs::statvfs;
use tranship_coordinator::Failure;

use crate::layout::NO_WORDS;
use crate::node::Node;

/// What the kernel says (ENOSPC), as Rust writes it and as criu does.
const FULL: &str = "No space left on device";
/// A filesystem with less than this free, in bytes, is full.
const LITTLE: u64 = 1 << 20;

/// A failure for want of space with the filesystem that has none, as it is found now. Others stay as they are.
pub fn explained(node: &Node, failure: Failure) -> Failure {
    let config = &node.config;
    let places = [&config.run_dir.join("migrations"), &config.run_dir, &config.state_dir];
    let full = || places.into_iter().find_map(|place| use_of(place).map(|used| (place.display(), used)));
    // Nor can the cause be written to a log then.
    let may_be_meant = [FULL, NO_WORDS].iter().any(|words| failure.message.contains(words));
    if !may_be_meant || failure.message.contains("is full (") {
        return failure;
    }
    match full() {
        Some((place, used)) => {
            let message = &failure.message;
            let here = &config.node;
            let remedy = "free some space there, or make it larger, and try again";
            let message = format!("{message}: the filesystem of {place} on node {here} is full ({used}); {remedy}");
            Failure { message, ..failure }
        }
        None => failure,
    }
}

/// How much of a filesystem is in use, if it is full.
fn use_of(place: &Path) -> Option<String> {
    let found = statvfs(place).ok()?;
    let bytes = |blocks: u64| blocks * found.fragment_size();
    if found.files() > 0 && found.files_available() == 0 {
        return Some(format!("all {} inodes are in use", found.files()));
    }
    (bytes(found.blocks_available()) < LITTLE).then(|| {
        let used = bytes(found.blocks().saturating_sub(found.blocks_free()));
        format!("{} of {} MiB are in use", used >> 20, bytes(found.blocks()) >> 20)
    })
}
