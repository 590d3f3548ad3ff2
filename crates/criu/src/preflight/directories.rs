//! Directories of a container that are mounted into others, too.
//!
//! A directory that moves with its container is copied. Whoever else has it mounted would go on with the old copy.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::procfs::{self, Mount, Status};

/// A process outside of the container that has one of its directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharer {
    /// Its pid on this node.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
    /// The directory, as the container sees it.
    pub directory: PathBuf,
}

fn mounts(pid: u32) -> Vec<Mount> {
    procfs::text(format!("/proc/{pid}/mountinfo")).map(|text| Mount::parse_all(&text)).unwrap_or_default()
}

/// The first one for each of the container's mount points `directories` that is mounted, or in part, in a mount namespace which is neither the
/// node's nor one of the processes `inside`.
pub fn sharers(init: u32, inside: &[u32], directories: &[PathBuf]) -> Vec<Sharer> {
    let namespace = |pid: u32| procfs::link(format!("/proc/{pid}/ns/mnt")).ok();
    let node = [std::process::id(), 1];
    let mut seen: HashSet<String> =
        inside.iter().chain(&node).chain([&init]).filter_map(|pid| namespace(*pid)).collect();
    let of_node: Vec<Mount> = node.into_iter().flat_map(mounts).collect();
    let own = mounts(init);
    let mut left: Vec<&PathBuf> = directories.iter().collect();
    let mut found = Vec::new();
    for pid in procfs::numbers("/proc").unwrap_or_default() {
        if left.is_empty() || namespace(pid).is_none_or(|namespace| !seen.insert(namespace)) {
            continue;
        }
        let theirs = mounts(pid);
        left.retain(|directory| {
            let shares = has(&theirs, &of_node, &own, directory);
            if let Some(status) = Status::read(pid, None).ok().filter(|_| shares) {
                found.push(Sharer { pid, name: status.name, directory: (*directory).clone() });
            }
            !shares
        });
    }
    found
}

/// Whether what `own` has at a mount point is mounted among `theirs`. What is mounted in the same way on the node was inherited from it.
fn has(theirs: &[Mount], of_node: &[Mount], own: &[Mount], point: &Path) -> bool {
    let Some(own) = own.iter().rev().find(|mount| mount.place == point) else { return false };
    let is_inherited = |mount: &Mount| {
        of_node.iter().any(|n| (&n.device, &n.root, &n.point) == (&mount.device, &mount.root, &mount.point))
    };
    let is_within = |mount: &Mount| mount.device == own.device && Path::new(&mount.root).starts_with(&own.root);
    theirs.iter().any(|mount| is_within(mount) && !is_inherited(mount))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_shared_where_it_or_a_part_of_it_is_mounted() {
        let mounts = |text: &str| Mount::parse_all(text);
        let node = mounts("1 0 8:1 / / rw - ext4 d rw\n2 1 8:1 /vol /mnt rw - ext4 d rw\n");
        let own = mounts("9 0 0:9 / / rw - overlay o rw\n10 9 8:1 /srv/data /data rw - ext4 d rw\n");
        let theirs = |line: &str| mounts(&format!("19 0 0:19 / / rw - overlay o rw\n{line}\n"));
        let shared = |line: &str| has(&theirs(line), &node, &own, Path::new("/data"));
        assert!(shared("20 19 8:1 /srv/data /x rw - ext4 d rw"));
        assert!(shared("20 19 8:1 /srv/data/sub /x rw - ext4 d rw"));
        assert!(!shared("20 19 8:1 /srv/database /x rw - ext4 d rw"));
        assert!(!shared("20 19 8:2 /srv/data /x rw - ext4 e rw"));
        // One who sees all of the node's disk has not been given this directory.
        assert!(!shared("20 19 8:1 / /host ro - ext4 d rw"));
        let own = mounts("10 9 8:1 /vol /data rw - ext4 d rw\n");
        assert!(!has(&theirs("20 19 8:1 /vol /mnt rw - ext4 d rw"), &node, &own, Path::new("/data")));
    }
}
