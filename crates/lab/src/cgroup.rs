//! The cgroups of the lab: every node has a parent of its own in each hierarchy, because all nodes share one kernel and
//! a second container of the same name would else be refused.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{LabError, Result};

/// The lab's own directory in each hierarchy.
const PARENT: &str = "tranship-lab";

/// The cgroup path that a node's containers are put below.
pub(crate) fn parent_of(node: &str) -> String {
    format!("/{PARENT}/{node}")
}

/// Where the hierarchies are mounted, v1 and v2.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().filter_map(hierarchy).collect()
}

fn hierarchy(line: &str) -> Option<PathBuf> {
    let (before, after) = line.split_once(" - ")?;
    let kind = after.split(' ').next()?;
    (kind == "cgroup" || kind == "cgroup2").then(|| before.split(' ').nth(4).map(PathBuf::from))?
}

/// Makes a node's parent in every hierarchy.
pub(crate) fn create(node: &str) -> Result<()> {
    for root in hierarchies() {
        let mut directory = root;
        for part in [PARENT, node] {
            let above = directory.clone();
            directory.push(part);
            if !directory.exists() {
                fs::create_dir(&directory).map_err(LabError::file("make the cgroup", &directory))?;
            }
            // A v1 cpuset takes no task before it has been told its CPUs and memory nodes.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if directory.join("cpuset.cpu_exclusive").exists() {
                    let value = fs::read(above.join(file)).map_err(LabError::file("read", above.join(file)))?;
                    fs::write(directory.join(file), value).map_err(LabError::file("write", directory.join(file)))?;
                }
            }
        }
    }
    Ok(())
}

/// Lets every frozen task below the lab's cgroups go on: a task frozen by the v1 freezer does not even die.
pub(crate) fn thaw() {
    for root in hierarchies() {
        for directory in tree(&root.join(PARENT)) {
            for (file, value) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
                let path = directory.join(file);
                if path.exists() {
                    // What cannot be thawed shows as a process that does not die, which is reported.
                    let _ = fs::write(path, value);
                }
            }
        }
    }
}

/// Removes the lab's cgroups, the innermost first; returns those that could not be removed (yet).
pub(crate) fn remove() -> Vec<PathBuf> {
    let mut left = Vec::new();
    for root in hierarchies() {
        for directory in tree(&root.join(PARENT)).into_iter().rev() {
            if fs::remove_dir(&directory).is_err() && directory.exists() {
                left.push(directory);
            }
        }
    }
    left
}

/// A directory and all below it, parents first; empty if there is no such directory.
pub(crate) fn tree(top: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![top.to_owned()];
    while let Some(directory) = open.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        open.extend(entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
        found.push(directory);
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found_in_mountinfo() {
        let v1 = "33 28 0:30 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu";
        assert_eq!(hierarchy(v1), Some(PathBuf::from("/sys/fs/cgroup/cpu")));
        let v2 = "33 28 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
        assert_eq!(hierarchy(v2), Some(PathBuf::from("/sys/fs/cgroup")));
        assert_eq!(hierarchy("28 22 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw"), None);
    }
}
