//! What is mounted in a container: its restore finds there what was there at the dump, also where another engine, or another version of
//! one, mounts something else.

use std::collections::HashSet;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind};

use crate::json::section;
use crate::links::{Root, absolute};
use crate::note;

/// Where it is noted in a bundle.
const NOTE: &str = "mounts.json";
/// Files that an engine binds into its containers and that are empty: which engine it is does not matter to a container that runs.
const EMPTY: [&str; 1] = ["/run/.containerenv"];

/// In a mount that is elsewhere than its configuration writes, because a symbolic link leads there:
/// what the configuration writes. No runtime reads it.
const CONFIGURED: &str = "configuredDestination";
/// Places that no link of an image leads to or from: what the kernel shows there is the engine's.
const OF_KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Puts the mounts of a running container's configuration where the container has them: runtimes
/// follow the symbolic links of the root filesystem (`/var/run`, `/sbin`).
pub(crate) fn follow_links(config: &mut Value, init: u32) {
    let table = tranship_sys::process::text(format!("/proc/{init}/mountinfo")).unwrap_or_default();
    let points: HashSet<&str> = table.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    place(config, |path| points.contains(as_in_table(path).as_str()), || Root::of_process(init));
}

/// Puts mounts that are not on mount points where links lead, if there is a mount point.
fn place(config: &mut Value, is_point: impl Fn(&Path) -> bool, root: impl FnOnce() -> io::Result<Root>) {
    let elsewhere =
        |mount: &&mut Value| mount["destination"].as_str().is_some_and(|place| !is_point(&absolute(Path::new(place))));
    let mounts = config.get_mut("mounts").and_then(Value::as_array_mut).into_iter().flatten();
    let mounts: Vec<&mut Value> = mounts.filter(elsewhere).collect();
    if mounts.is_empty() {
        return;
    }
    let Ok(root) = root().inspect_err(|error| tracing::debug!(%error, "no links are followed")) else { return };
    for mount in mounts {
        let written = mount["destination"].as_str().unwrap_or_default().to_owned();
        let place = root.place_of(Path::new(&written)).filter(|place| is_point(place));
        let Some(place) = place.as_deref().and_then(Path::to_str) else { continue };
        let mut moved = mount.clone();
        moved["destination"] = place.into();
        if moved[CONFIGURED].is_null() {
            moved[CONFIGURED] = written.into();
        }
        if misplaced(&moved).is_none() {
            *mount = moved;
        }
    }
}

/// A path as the kernel writes it in a table of mounts.
fn as_in_table(path: &Path) -> String {
    let text = path.to_string_lossy().replace('\\', "\\134");
    text.replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012")
}

/// The mounts of a configuration that are behind symbolic links, as they were configured.
pub fn behind_links(config: &Value) -> impl Iterator<Item = &str> {
    let mounts = config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    mounts.iter().filter_map(|mount| mount.get(CONFIGURED)?.as_str())
}

/// Why a mount that a peer has sent cannot be behind a symbolic link, if it says that it is.
pub fn misplaced(mount: &Value) -> Option<String> {
    let written = mount.get(CONFIGURED).filter(|written| !written.is_null())?;
    let plain = |value: &Value| value.as_str().map(|path| absolute(Path::new(path)));
    let (from, to) = (plain(written), plain(&mount["destination"]));
    let named = |path: &PathBuf| !path.components().any(|part| part == Component::ParentDir);
    let of_kernel = |path: &PathBuf| OF_KERNEL.iter().any(|top| path.starts_with(top));
    let may_be = match (&from, &to) {
        (Some(from), Some(to)) => {
            [from, to].into_iter().all(named) && (from == to || ![from, to].into_iter().any(of_kernel))
        }
        _ => false,
    };
    (!may_be).then(|| format!("the mount that is configured on {written} is on {} there", mount["destination"]))
}

/// Takes [`follow_links`] back in a configuration that a runtime has read: some engines (Podman)
/// look for what the user has written. Says whether there was anything to take back.
pub fn write_as_configured(config: &mut Value) -> bool {
    let mut found = false;
    for mount in config["mounts"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        if let Some(configured) = mount.remove(CONFIGURED) {
            mount.insert("destination".to_owned(), configured);
            found = true;
        }
    }
    found
}

/// Names the file or directory that a mount binds by its own path: criu follows no symbolic link to it.
fn name_source(mount: &mut Value) {
    let source = mount["source"].as_str().filter(|_| binds(mount)).map(Path::new);
    if let Some(target) = source.filter(|source| source.is_symlink()).and_then(|source| source.canonicalize().ok()) {
        mount["source"] = target.to_string_lossy().into_owned().into();
    }
}

/// Where the configuration of a mount writes it.
fn configured(mount: &Value) -> &Value {
    mount.get(CONFIGURED).unwrap_or(&mount["destination"])
}

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
            if let Some(why) = misplaced(theirs) {
                return Err(io::Error::other(format!("{why}, where no link of its image can lead")));
            }
            let own = here.iter().find(|own| own["destination"] == *configured(theirs));
            // The source's word alone has nothing of this node mounted into a container.
            let empty = EMPTY.iter().any(|inside| *configured(theirs) == **inside);
            if own.is_none() && !empty && !is_own(theirs) {
                let (inside, source) = (&theirs["destination"], &theirs["source"]);
                return Err(io::Error::other(format!(
                    "{source} is mounted on {inside} there, which the engine here does not do"
                )));
            }
            let mut mount = own.unwrap_or(theirs).clone();
            for key in ["destination", CONFIGURED] {
                if let Some(value) = theirs.get(key) {
                    mount[key] = value.clone();
                }
            }
            name_source(&mut mount);
            if let Some(inside) = EMPTY.iter().find(|inside| own.is_none() && *configured(theirs) == **inside) {
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

    fn moved(&self) -> impl Iterator<Item = &Value> {
        self.mounts.iter().filter(|mount| mount.get(CONFIGURED).is_some())
    }

    /// Whether any of them is behind a symbolic link.
    pub fn has_links(&self) -> bool {
        self.moved().next().is_some()
    }

    /// Whether the root filesystem that has come has each mount's place where its symbolic links
    /// lead: the source's word alone moves no mount of this node.
    ///
    /// # Errors
    /// A mount that is elsewhere, or a root that cannot be read.
    pub fn check_places(&self, root: &Path) -> io::Result<()> {
        let root = Root::at(root)?;
        self.moved().try_for_each(|mount| {
            let path = |value: &Value| PathBuf::from(value.as_str().unwrap_or_default());
            let (written, place) = (path(configured(mount)), absolute(&path(&mount["destination"])));
            let leads_to = root.place_of(&written);
            if leads_to.as_ref() == Some(&place) {
                return Ok(());
            }
            let leads_to = leads_to.map_or("nowhere".to_owned(), |path| format!("to {}", path.display()));
            let (written, place) = (written.display(), place.display());
            Err(io::Error::other(format!(
                "something is mounted on {written} in the container, which is {place} at the source, and leads {leads_to} here"
            )))
        })
    }
}

/// Filesystems that are empty, or show what the container's own namespaces have, wherever they are mounted. Of proc, sysfs and cgroups
/// the engine has parts masked or read-only where it mounts them itself.
const OWN: [&str; 3] = ["tmpfs", "devpts", "mqueue"];

/// Whether a mount is of such a filesystem, and binds nothing.
fn is_own(mount: &Value) -> bool {
    mount["type"].as_str().is_some_and(|kind| OWN.contains(&kind)) && !binds(mount)
}

/// Whether a mount of a configuration shows a file or directory of the node.
pub(crate) fn binds(mount: &Value) -> bool {
    let option = |option: &Value| option == "bind" || option == "rbind";
    mount["type"] == "bind" || mount["options"].as_array().is_some_and(|all| all.iter().any(option))
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
    fn a_mount_is_where_the_links_of_the_image_lead() {
        let root = tempfile::tempdir().unwrap();
        let link = |to: &str, from: &str| std::os::unix::fs::symlink(to, root.path().join(from)).unwrap();
        std::fs::create_dir_all(root.path().join("run/x")).unwrap();
        std::fs::create_dir(root.path().join("var")).unwrap();
        link("/run", "var/run");
        link("usr/sbin", "sbin");
        let mut config = json!({"mounts": [
            {"destination": "/var/run/x", "type": "bind", "source": "/a"}, {"destination": "/proc", "type": "proc"},
            {"destination": "/var/run/unmounted", "type": "tmpfs"},
        ]});
        let points = ["/run/x", "/proc"].map(Path::new);
        place(&mut config, |path| points.contains(&path), || Root::at(root.path()));
        assert_eq!(behind_links(&config).collect::<Vec<_>>(), ["/var/run/x"]);
        assert_eq!(
            (&config["mounts"][0]["destination"], configured(&config["mounts"][0])),
            (&json!("/run/x"), &json!("/var/run/x"))
        );
        let same =
            json!([{"destination": "/proc", "type": "proc"}, {"destination": "/var/run/unmounted", "type": "tmpfs"}]);
        assert_eq!(json!(config["mounts"].as_array().unwrap()[1..]), same);
        place(&mut config.clone(), |_| true, || unreachable!("all are on mount points"));
        config["mounts"].as_array_mut().unwrap().pop();
        MountTree::of(&config).check_places(root.path()).unwrap();
        // The next engine makes it with what the user has written.
        for _ in 0..2 {
            let mut here = json!({"mounts": [
                {"destination": "/proc", "type": "proc"}, {"destination": "/var/run/x", "type": "bind", "source": "/b"},
            ]});
            MountTree::of(&config).give_to(&mut here, root.path()).unwrap();
            assert_eq!(
                (&here["mounts"][0]["destination"], &here["mounts"][0]["source"]),
                (&json!("/run/x"), &json!("/b"))
            );
            config = here;
        }
        let mut written = config.clone();
        assert!(write_as_configured(&mut written) && !write_as_configured(&mut written));
        assert_eq!(written["mounts"][0]["destination"], "/var/run/x");
        let mut here =
            json!({"mounts": [{"destination": "/var/run/x", "type": "bind", "source": root.path().join("sbin")}]});
        std::fs::create_dir_all(root.path().join("usr/sbin")).unwrap();
        MountTree::of(&json!({"mounts": [&config["mounts"][0]]})).give_to(&mut here, root.path()).unwrap();
        let source = root.path().canonicalize().unwrap().join("usr/sbin");
        assert_eq!(here["mounts"][0]["source"], json!(source), "criu follows no link to it");
    }

    #[test]
    fn a_mount_that_no_link_of_the_image_moves_stays_in_its_place() {
        let root = tempfile::tempdir().unwrap();
        let mount = |written: &str, place: &str| json!({"configuredDestination": written, "destination": place});
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::os::unix::fs::symlink("/etc", root.path().join("data")).unwrap();
        std::os::unix::fs::symlink("/proc", root.path().join("kernel")).unwrap();
        let mut config = json!({"mounts": [{"destination": "/kernel/x", "type": "bind", "source": "/a"}]});
        place(&mut config, |path| path == Path::new("/proc/x"), || Root::at(root.path()));
        assert_eq!(config["mounts"][0]["destination"], "/kernel/x", "the plan refuses it");
        for (written, place, is_refused, is_elsewhere) in [
            ("/data", "/etc", false, false),
            ("/data/x", "/etc/x", false, false),
            ("/dev/x", "/dev/x", false, false),
            ("/data", "/usr", false, true),
            ("/other", "/etc", false, true),
            ("/data", "/proc/sys", true, true),
            ("/data", "dev/../proc", true, true),
            ("/data", "/data/../etc", true, true),
            ("/proc", "/etc", true, true),
        ] {
            let theirs = mount(written, place);
            assert_eq!(misplaced(&theirs).is_some(), is_refused, "{theirs}");
            let tree = MountTree::of(&json!({"mounts": [theirs]}));
            assert_eq!(tree.check_places(root.path()).is_err(), is_elsewhere, "{theirs}");
            let mut here = json!({"mounts": [{"destination": written, "type": "bind", "source": "/b"}]});
            assert_eq!(tree.give_to(&mut here, root.path()).is_err(), is_refused, "{theirs}");
        }
        assert!(misplaced(&json!({"configuredDestination": ["/data"], "destination": "/etc"})).is_some());
        let elsewhere = MountTree::of(&json!({"mounts": [mount("/data", "/usr")]})).check_places(root.path());
        assert!(elsewhere.unwrap_err().to_string().contains("leads to /etc here"));
    }

    #[test]
    fn a_path_is_written_as_the_kernel_does() {
        assert_eq!(as_in_table(Path::new("/a b\t\\c")), "/a\\040b\\011\\134c");
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
