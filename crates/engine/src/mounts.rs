//! What is mounted in a container: its restore finds there what was there at the dump, also where another engine, or another version of
//! one, mounts something else.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind};

use crate::json::section;
use crate::note;

/// Where it is noted in a bundle.
const NOTE: &str = "mounts.json";
/// Files that an engine binds into its containers and that are empty: which engine it is does not matter to a container that runs.
const EMPTY: [&str; 1] = ["/run/.containerenv"];

/// The mounts of an OCI configuration, and the paths in it that it hides or protects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountTree {
    mounts: Vec<Value>,
    masked: Value,
    protected: Value,
}

impl MountTree {
    /// Those of this configuration.
    pub fn of(config: &Value) -> Self {
        Self {
            mounts: config["mounts"].as_array().cloned().unwrap_or_default(),
            masked: config["linux"]["maskedPaths"].clone(),
            protected: config["linux"]["readonlyPaths"].clone(),
        }
    }

    /// Notes them in a bundle.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn note(&self, bundle: &Path) -> io::Result<()> {
        note::write(bundle, NOTE, self)
    }

    /// Those that were noted in a bundle; `None` if none were, or of a container that had no configuration.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn noted(bundle: &Path) -> io::Result<Option<Self>> {
        Ok(note::read(bundle, NOTE)?.filter(|tree: &Self| !tree.mounts.is_empty()))
    }

    /// Puts them into the configuration that the engine here has made. What is mounted there is this engine's wherever it mounts
    /// something at the same place. An empty file that it does not know is made in the bundle.
    ///
    /// # Errors
    /// If that file cannot be made.
    pub fn give_to(&self, config: &mut Value, bundle: &Path) -> io::Result<()> {
        let here = config["mounts"].as_array().cloned().unwrap_or_default();
        let mut mounts = Vec::new();
        for theirs in &self.mounts {
            let own = here.iter().find(|own| own["destination"] == theirs["destination"]);
            // The source's word alone has nothing of this node mounted into a container.
            let empty = EMPTY.iter().any(|inside| theirs["destination"] == **inside);
            if own.is_none() && !empty && !is_own(theirs) {
                let (inside, source) = (&theirs["destination"], &theirs["source"]);
                return Err(io::Error::other(format!(
                    "{source} is mounted on {inside} there, which the engine here does not do"
                )));
            }
            let mut mount = own.unwrap_or(theirs).clone();
            if let Some(inside) = EMPTY.iter().find(|inside| own.is_none() && theirs["destination"] == **inside) {
                let file = bundle.join(inside.rsplit('/').next().unwrap_or_default());
                std::fs::write(&file, "")?;
                mount["source"] = file.to_string_lossy().into_owned().into();
            }
            mounts.push(mount);
        }
        section(config, "linux");
        config["mounts"] = mounts.into();
        for (key, paths) in [("maskedPaths", &self.masked), ("readonlyPaths", &self.protected)] {
            section(config, "linux")[key] = paths.clone();
        }
        Ok(())
    }
}

/// Filesystems that are empty, or show what the container's own namespaces have, wherever they are mounted. Of proc, sysfs and cgroups
/// the engine has parts masked or read-only where it mounts them itself.
const OWN: [&str; 3] = ["tmpfs", "devpts", "mqueue"];

/// Whether a mount is of such a filesystem, and binds nothing.
fn is_own(mount: &Value) -> bool {
    let binds = |option: &Value| option == "bind" || option == "rbind";
    mount["type"].as_str().is_some_and(|kind| OWN.contains(&kind))
        && !mount["options"].as_array().is_some_and(|all| all.iter().any(binds))
}

/// Where nothing can be made to follow the mount that Podman's storage is on: what Docker's volumes do cannot be restored there.
pub(crate) fn not_followed(storage: &Path) -> Option<Blocker> {
    let mount = private_in(&tranship_sys::process::text("/proc/self/mountinfo").ok()?, storage)?;
    let mount = mount.display();
    let cause = format!(
        "Podman's storage there is on the private mount {mount}, which Docker's volumes, that follow the node's mounts, cannot be on"
    );
    Some(Blocker::new(BlockerKind::Mount, cause, format!("share it there (`mount --make-shared {mount}`)")))
}

/// The mount that a path is on, if it has no peers and no master, by what /proc/PID/mountinfo says (proc_pid_mountinfo(5)): the optional fields follow the sixth, up to a dash.
pub(crate) fn private_in(table: &str, path: &Path) -> Option<PathBuf> {
    let row = |line: &str| {
        let mut fields = line.split(' ').skip(4);
        let point = PathBuf::from(fields.next()?);
        Some((point, fields.skip(1).take_while(|field| *field != "-").any(|field| !field.is_empty())))
    };
    let on = table.lines().filter_map(row).filter(|(point, _)| path.starts_with(point));
    // Of those at one place the last covers the others.
    on.max_by_key(|(point, _)| point.as_os_str().len()).filter(|(_, follows)| !follows).map(|(point, _)| point)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_finds_the_mounts_that_it_had() {
        let theirs = json!({"mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/etc/hosts", "type": "bind", "source": "/a/hosts"},
            {"destination": "/run/.containerenv", "type": "bind", "source": "/a/env"},
        ], "linux": {"maskedPaths": ["/proc/keys"]}});
        let mut here = json!({"mounts": [
            {"destination": "/etc/hosts", "type": "bind", "source": "/b/hosts"},
            {"destination": "/proc", "type": "proc"},
            {"destination": "/dev/own", "type": "bind", "source": "/b/own"},
        ], "linux": {"maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/bus"]}});
        let bundle = tempfile::tempdir().unwrap();
        MountTree::of(&theirs).note(bundle.path()).unwrap();
        MountTree::noted(bundle.path()).unwrap().unwrap().give_to(&mut here, bundle.path()).unwrap();
        assert_eq!(here["mounts"].as_array().unwrap().len(), 3);
        assert_eq!(here["mounts"][1]["source"], "/b/hosts");
        let made = Path::new(here["mounts"][2]["source"].as_str().unwrap());
        assert!(made.starts_with(bundle.path()) && std::fs::read(made).unwrap().is_empty());
        assert_eq!(
            (&here["linux"]["maskedPaths"], &here["linux"]["readonlyPaths"]),
            (&json!(["/proc/keys"]), &Value::Null)
        );
    }

    #[test]
    fn a_mount_of_the_node_that_only_the_source_names_is_refused() {
        for theirs in [
            json!({"destination": "/x", "type": "bind", "source": "/"}),
            json!({"destination": "/x", "type": "tmpfs", "source": "/etc", "options": ["rbind"]}),
            json!({"destination": "/x", "type": "ext4", "source": "/dev/sda1"}),
            json!({"destination": "/x", "type": "proc", "source": "proc"}),
            json!({"destination": "/x", "type": "overlay", "source": "x", "options": ["lowerdir=/etc:/usr"]}),
        ] {
            let bundle = tempfile::tempdir().unwrap();
            let mut here = json!({"mounts": [{"destination": "/proc", "type": "proc"}]});
            MountTree::of(&json!({"mounts": [&theirs]})).note(bundle.path()).unwrap();
            let tree = MountTree::noted(bundle.path()).unwrap().unwrap();
            let error = tree.give_to(&mut here, bundle.path()).unwrap_err().to_string();
            assert!(error.contains("is mounted on \"/x\" there"), "{theirs}: {error}");
        }
    }

    #[test]
    fn a_mount_that_nothing_can_follow_is_found() {
        let table = "21 1 254:0 / / rw - ext4 /dev/vda rw\n22 21 0:58 / /run rw,nosuid shared:9 - tmpfs tmpfs rw\n\
                     23 22 0:58 /x /run/x rw master:9 - tmpfs tmpfs rw\n24 22 0:59 / /run/own rw - tmpfs tmpfs rw\n";
        let found = |path: &str| private_in(table, Path::new(path));
        assert_eq!((found("/run/volumes"), found("/run/x/y")), (None, None));
        assert_eq!((found("/run/own/v"), found("/var")), (Some("/run/own".into()), Some("/".into())));
    }

    #[test]
    fn what_is_not_noted_changes_nothing() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(MountTree::noted(bundle.path()).unwrap(), None);
        MountTree::of(&Value::Null).note(bundle.path()).unwrap();
        assert_eq!(MountTree::noted(bundle.path()).unwrap(), None);
    }
}
