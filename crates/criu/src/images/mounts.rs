//! Mounts: each must be one that the configuration has, or that a container with its capabilities can make.

use std::collections::HashSet;
use std::path::Path;

use tranship_sys::mount::Restrictions;

use super::allowed::{Allowed, Configured, plain};
use super::messages::Mount;
use super::{Finding, shown};

/// Options of a mount that take something from a container, in the bits of mount(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags(u32);

const READ_ONLY: u32 = 1;
/// Bits of mount(2) that make it do something else than mount a filesystem (MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC), and
/// those that the kernel has for itself. With MS_BIND the source, which the image names, would be a path of the node.
const OTHER_CALLS: u32 = 32 | 4096 | 8192 | RECURSIVE | 1 << 22 | 1 << 26 | !0 << 27;
const RECURSIVE: u32 = 16384;
const OPTIONS: [(&str, u32); 6] =
    [("ro", READ_ONLY), ("rro", READ_ONLY), ("nosuid", 2), ("nodev", 4), ("noexec", 8), ("rnoexec", 8)];

impl Flags {
    /// Those among a configuration's options; of options that contradict each other runtimes take the last,
    /// so those count for none.
    pub(super) fn of(option: impl Fn(&str) -> bool) -> Self {
        let opposite = |name: &str| match name {
            "ro" | "rro" => option("rw") || option("rrw"),
            "nosuid" => option("suid"),
            "nodev" => option("dev"),
            _ => option("exec"),
        };
        let set = OPTIONS.into_iter().filter(|(name, _)| option(name) && !opposite(name));
        Self(set.fold(0, |bits, (_, bit)| bits | bit))
    }

    fn missing(self, from: u32) -> Vec<&'static str> {
        let named = OPTIONS.into_iter().filter(|(name, _)| !["rro", "rnoexec"].contains(name));
        named.filter(|(_, bit)| self.0 & bit != 0 && from & bit == 0).map(|(name, _)| name).collect()
    }
}

/// Most mounts of all namespaces: each is compared with all others.
const MOST: usize = 4096;
/// Filesystems by CRIU's numbers (`fstype` of mnt.proto), where a container may have them made.
const FILESYSTEMS: [(u32, &str); 13] = [
    (1, "proc"),
    (2, "sysfs"),
    (3, "devtmpfs"),
    (4, "binfmt_misc"),
    (5, "tmpfs"),
    (6, "devpts"),
    (8, "pstore"),
    (9, "securityfs"),
    (10, "fusectl"),
    (11, "debugfs"),
    (19, "tracefs"),
    (14, "mqueue"),
    (12, "cgroup"),
];
const CGROUP_2: u32 = 23;
/// Of those, what a configuration may have made without a further right.
const ORDINARY: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

fn filesystem(number: u32) -> Option<&'static str> {
    if number == CGROUP_2 {
        return Some("cgroup2");
    }
    FILESYSTEMS.iter().find(|(one, _)| *one == number).map(|(_, name)| *name)
}

/// One mount, with its text as text.
struct Read<'a> {
    mount: &'a Mount,
    /// The number of its namespace; that of the container is 0.
    namespace: usize,
    point: String,
    root: String,
    key: Option<String>,
    fstype: Option<&'static str>,
}

impl Read<'_> {
    /// The flags of the mount: those of its filesystem do not hold for a bind.
    fn is_read_only(&self) -> bool {
        self.mount.flags & READ_ONLY != 0
    }

    fn is_root_of_container(&self) -> bool {
        self.point == "/" && self.namespace == 0
    }
}

/// Checks the mounts of all namespaces, of which the container's is the first: CRIU makes the others
/// (`unshare --mount`) from what it has made in any.
pub(super) fn check(namespaces: &[Vec<Mount>], allowed: &Allowed, found: &mut Vec<Finding>) {
    let count = namespaces.iter().map(Vec::len).fold(0, usize::saturating_add);
    if count > MOST {
        return found.push(Finding::new(format!("have {count} mounts")));
    }
    let numbered = namespaces.iter().enumerate();
    let all: Vec<_> = numbered.flat_map(|(at, mounts)| mounts.iter().map(move |mount| read(mount, at))).collect();
    for one in &all {
        if let Some(why) = form(one, &all) {
            found.push(Finding::new(format!("have a mount at {} {why}", shown(one.point.as_bytes()))));
        }
    }
    let mut ids = HashSet::new();
    if all.iter().any(|one| !ids.insert(one.mount.id)) {
        found.push(Finding::new("have two mounts of one number"));
    }
    // CRIU mounts the container's root, with the options of the image, wherever one is at this path.
    let roots = |namespace| all.iter().filter(|one| one.namespace == namespace && one.point == "/").count();
    if namespaces.is_empty() || (0..namespaces.len()).any(|namespace| roots(namespace) != 1) {
        found.push(Finding::new("have no root, or several"));
    }
    if allowed.mounts_freely() {
        return;
    }
    if namespaces.len() > 1 {
        found.push(Finding::new("have another mount namespace, for which the container lacks CAP_SYS_ADMIN"));
    }
    for one in &all {
        if let Some(why) = foreign(one, &all, allowed) {
            let what = format!("mount {} at {}, {why}", source(one), shown(one.point.as_bytes()));
            found.push(Finding::new(what).with_remedy(
                "restart the container, or allow containers with CAP_SYS_ADMIN to come from that peer and give it that",
            ));
        }
    }
    for path in &allowed.guarded {
        let mut whys = (0..namespaces.len()).filter_map(|namespace| unguarded(path, namespace, &all, allowed));
        if let Some(why) = whys.next() {
            let what = format!("leave {} {why}", shown(path.as_bytes()));
            found.push(Finding::new(what));
        }
    }
}

fn source(one: &Read<'_>) -> String {
    let kind = one.fstype.unwrap_or("a directory or file");
    match (&one.key, one.root.as_str()) {
        (Some(key), _) => format!("the external {}", shown(key.as_bytes())),
        (None, "/") => kind.to_owned(),
        (None, root) => format!("{} of {kind}", shown(root.as_bytes())),
    }
}

fn read(mount: &Mount, namespace: usize) -> Read<'_> {
    // Names need not be UTF-8. Those that are not are in no configuration; escaped, they are compared like others.
    let text =
        |bytes: &[u8]| std::str::from_utf8(bytes).map_or_else(|_| bytes.escape_ascii().to_string(), ToOwned::to_owned);
    let key = mount.key.as_deref().map(text);
    let (point, root) = (plain(&text(&mount.point)), text(&mount.root));
    Read { mount, namespace, point, root, key, fstype: filesystem(mount.fstype) }
}

/// Where a mount is, and how it is restricted.
pub(super) fn place_and_restrictions(mount: &Mount) -> (String, Restrictions) {
    (read(mount, 0).point, Restrictions::of_flags(mount.flags))
}

/// What no image may have: paths that lead upwards, plugins, filesystems that CRIU mounts from what the image names.
fn form(one: &Read<'_>, all: &[Read<'_>]) -> Option<&'static str> {
    let upwards = |path: &str| path.split('/').any(|part| part == "..");
    if upwards(&one.point) || upwards(&one.root) || !one.root.starts_with('/') {
        return Some("whose path leads upwards");
    }
    // CRIU has debugfs mounted with what is mounted below it.
    let usual = if one.fstype == Some("debugfs") { OTHER_CALLS & !RECURSIVE } else { OTHER_CALLS };
    if (one.mount.flags | one.mount.sb_flags.unwrap_or_default()) & usual != 0 {
        return Some("with flags that no mount has");
    }
    if one.mount.plugin == Some(true) || one.mount.external == Some(true) || one.mount.fsname.is_some() {
        return Some("that a plugin, or another version of CRIU would make");
    }
    if one.key.is_some() && one.mount.deleted == Some(true) {
        return Some("for which CRIU would make a file of the node anew");
    }
    if one.fstype.is_none() && one.key.is_none() && !one.is_root_of_container() && shows(one, all).next().is_none() {
        return Some("of a filesystem that a container cannot mount");
    }
    None
}

/// The mount of which this one shows a part, and which CRIU would bind there: the root, or an external one.
fn shows<'a>(one: &Read<'_>, all: &'a [Read<'a>]) -> impl Iterator<Item = &'a Read<'a>> {
    let (id, device, root) = (one.mount.id, one.mount.device, one.root.clone());
    all.iter().filter(move |other| {
        let is_other = other.mount.id != id && other.mount.device == device;
        is_other && (other.key.is_some() || other.is_root_of_container()) && Path::new(&root).starts_with(&other.root)
    })
}

/// Why a container without CAP_SYS_ADMIN cannot have this mount.
fn foreign(one: &Read<'_>, all: &[Read<'_>], allowed: &Allowed) -> Option<String> {
    let none = Some("which its configuration does not".to_owned());
    if one.point == "/" {
        let is_open = allowed.read_only_root && !one.is_read_only();
        return is_open.then(|| "which is read-only in its configuration".to_owned());
    }
    if let Some(key) = &one.key {
        // CRIU makes no mount with a key that the engine has not named: what it shows is known, not where and how.
        // Of other keys the engine has those of masks: an empty directory, or /dev/null by whatever name.
        let shows_other = || is_bind(key, allowed) || cgroups(&plain(key), allowed).is_some();
        let is_mask = || allowed.masked.contains(&one.point) && (one.is_read_only() || !shows_other());
        return match allowed.external.get(key) {
            Some(point) if *point == one.point => None,
            None if is_mask() => None,
            None if plain(key) == one.point => match (allowed.mounts.get(&one.point), cgroups(&one.point, allowed)) {
                (Some(configured), _) if configured.is_bind => lost(one, configured),
                (_, Some(configured)) => lost(one, configured),
                _ => none,
            },
            _ => none,
        };
    }
    let is_ours = |other: &Read<'_>| other.key.as_ref().is_some_and(|key| allowed.external.contains_key(key));
    if one.root == "/" && shows(one, all).all(is_ours) {
        if one.fstype == Some("tmpfs") {
            // An empty one, or the container's own: it hides what is there, and shows nothing of the node.
            return None;
        }
        if let Some(configured) = allowed.mounts.get(&one.point) {
            let fits = one.fstype.is_some_and(|fstype| is_like(fstype, &configured.fstype));
            return if fits { lost(one, configured) } else { none };
        }
    }
    let protects = one.is_read_only() && allowed.read_only.contains(&one.point) && of_itself(one, all);
    if protects { None } else { none }
}

fn is_bind(key: &str, allowed: &Allowed) -> bool {
    allowed.mounts.get(&plain(key)).is_some_and(|mount| mount.is_bind)
}

fn is_like(fstype: &str, configured: &str) -> bool {
    let of_cgroups = fstype.starts_with("cgroup") && configured.starts_with("cgroup");
    ORDINARY.contains(&fstype) && (fstype == configured || of_cgroups)
}

/// The mount of the cgroups in a configuration, for a place below it: in version 1 runtimes have one for each
/// hierarchy.
fn cgroups<'a>(point: &str, allowed: &'a Allowed) -> Option<&'a Configured> {
    let is_of =
        |(at, mount): &(&String, &Configured)| mount.fstype.starts_with("cgroup") && Path::new(point).starts_with(at);
    allowed.mounts.iter().find(is_of).map(|(_, mount)| mount)
}

/// Whether a mount shows what is at its own place in the mount below it.
fn of_itself(one: &Read<'_>, all: &[Read<'_>]) -> bool {
    let below = all.iter().find(|other| other.mount.id == one.mount.parent && other.mount.id != one.mount.id);
    below.is_some_and(|below| {
        let within = one.point.strip_prefix(below.point.as_str());
        below.root == "/" && below.mount.device == one.mount.device && within == Some(one.root.as_str())
    })
}

/// Which options of the configuration a mount lacks.
fn lost(one: &Read<'_>, configured: &Configured) -> Option<String> {
    let lost = configured.flags.missing(one.mount.flags);
    (!lost.is_empty()).then(|| format!("without {}, which its configuration has", lost.join(", ")))
}

/// Why a path of the node is open to a container whose configuration masks it, or makes it read-only.
fn unguarded(path: &str, namespace: usize, all: &[Read<'_>], allowed: &Allowed) -> Option<&'static str> {
    let is_proc = |one: &&Read<'_>| {
        one.fstype == Some("proc") && one.root == "/" && one.point != path && Path::new(path).starts_with(&one.point)
    };
    let mut below = all.iter().filter(|one| one.namespace == namespace).filter(is_proc);
    let proc = below.next()?;
    // What is mounted at such a path has been looked at; one above another would leave the upper one without.
    let is_guarded = all.iter().any(|one| one.point == path && one.mount.parent == proc.mount.id);
    if is_guarded && below.next().is_none() {
        return None;
    }
    Some(match allowed.masked.iter().any(|masked| masked == path) {
        true => "unmasked, which its configuration masks",
        false => "writable, which is read-only in its configuration",
    })
}
