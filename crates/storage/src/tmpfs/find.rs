//! Which of a container's mounts are tmpfs mounts of its own whose content can be copied.

use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};

use crate::copy::CopyError;
use crate::mounts::unescape_text;

/// A mount's options, as the kernel shows them and as a mount takes them; only those whose meaning does not depend on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Options(Vec<(String, String)>);

impl Options {
    const KNOWN: [&'static str; 7] = ["size", "nr_inodes", "mode", "uid", "gid", "huge", "noswap"];
    /// Say how numbers of inodes look to programs; each kernel has its default.
    const LEFT_OUT: [&'static str; 3] = ["rw", "ro", "inode64"];

    /// Reads what mountinfo says last; `None` if one is not known here.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let words = text.split(',').filter(|word| !Self::LEFT_OUT.contains(word) && *word != "inode32");
        let pairs = words.map(|word| {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            Some((key.to_owned(), value.to_owned())).filter(|_| Self::acceptable(key, value))
        });
        pairs.collect::<Option<_>>().map(Self)
    }

    fn acceptable(key: &str, value: &str) -> bool {
        Self::KNOWN.contains(&key) && value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    }

    /// Whether all of them are known here: they may come from a peer.
    pub fn are_known(&self) -> bool {
        self.0.iter().all(|(key, value)| Self::acceptable(key, value))
    }

    fn text(pairs: impl Iterator<Item = (String, String)>) -> String {
        let word = |(key, value): (String, String)| if value.is_empty() { key } else { format!("{key}={value}") };
        pairs.map(word).collect::<Vec<_>>().join(",")
    }

    /// The limits, in the form that a mount or remount takes them; empty if the defaults hold.
    pub(super) fn limits(&self) -> String {
        Self::text(self.0.iter().filter(|(key, _)| matches!(key.as_str(), "size" | "nr_inodes")).cloned())
    }

    /// All of them, with the limits doubled: what is copied from a running container is not one moment's state, and may for a
    /// while need more than any one moment's.
    pub(super) fn roomy(&self) -> String {
        let roomy = |(key, value): (String, String)| {
            let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            match (key.as_str(), digits.parse::<u64>()) {
                ("size" | "nr_inodes", Ok(number)) => {
                    (key, format!("{}{}", number.saturating_mul(2), &value[digits.len()..]))
                }
                _ => (key, value),
            }
        };
        Self::text(self.0.iter().cloned().map(roomy))
    }
}

/// A tmpfs mount of a container, as it is offered to the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsMount {
    /// Where it is in the container.
    pub point: String,
    /// What it was mounted "from": a name without a meaning, shown in the table of mounts.
    pub source: String,
    /// Its options.
    pub options: Options,
    /// The filesystem as a whole is read-only.
    pub read_only: bool,
    /// Bytes in use.
    pub bytes: u64,
    /// Containers that move with this one have it mounted, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// Its line in the table of mounts, but for flags that CRIU carries: on the source, to tell whether it is still the same.
    #[serde(skip)]
    pub(super) identity: String,
    #[serde(skip)]
    pub(super) id: u64,
}

impl TmpfsMount {
    /// Whether it is the mount that was offered, as far as an offer can tell.
    pub fn is_as_offered(&self, offered: &Self) -> bool {
        let told = |m: &Self| (m.point.clone(), m.source.clone(), m.options.clone(), m.read_only);
        told(self) == told(offered)
    }
}

/// The tmpfs mounts of the container whose first process is `init`. `external` are the mount points that its engine provides:
/// they are not the container's own.
///
/// Not among them, and so left to CRIU: mounts that propagate, parts of a filesystem, a second mount of the same one, and
/// those with options that are not known here.
///
/// # Errors
/// If the table of mounts cannot be read.
pub fn find(init: u32, external: &[PathBuf]) -> Result<Vec<TmpfsMount>, CopyError> {
    let mut found = candidates(&table(init)?, external);
    for mount in &mut found {
        let path = PathBuf::from(format!("/proc/{init}/root{}", mount.point));
        mount.bytes = statvfs(&path).map_or(0, |s| (s.blocks() - s.blocks_free()) * s.fragment_size());
    }
    Ok(found)
}

pub(super) fn table(init: u32) -> Result<String, CopyError> {
    let path = PathBuf::from(format!("/proc/{init}/mountinfo"));
    let text = std::fs::read(&path).map_err(|e| CopyError::refused("read", &path, e))?;
    Ok(tranship_sys::process::escaped(&text))
}

/// One line of the table (proc_pid_mountinfo(5)).
struct Line<'a> {
    id: u64,
    device: &'a str,
    root: &'a str,
    point: &'a str,
    /// Has no tag of propagation.
    private: bool,
    fstype: &'a str,
    source: &'a str,
    options: &'a str,
    identity: String,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let front: Vec<&str> = front.split(' ').collect();
        let &[id, parent, device, root, point, _flags, ref tags @ ..] = front.as_slice() else { return None };
        let mut back = back.splitn(3, ' ');
        let (fstype, source, options) = (back.next()?, back.next()?, back.next()?);
        let identity = format!("{id} {parent} {device} {root} {point} {tags:?} {fstype} {source} {options}");
        let id = id.parse().ok()?;
        Some(Self { id, device, root, point, private: tags.is_empty(), fstype, source, options, identity })
    }
}

pub(super) fn candidates(table: &str, external: &[PathBuf]) -> Vec<TmpfsMount> {
    let lines: Vec<Line<'_>> = table.lines().filter_map(Line::parse).collect();
    let provided = |line: &Line<'_>| {
        unescape_text(line.point).is_some_and(|point| external.iter().any(|path| path == Path::new(&point)))
    };
    let mut devices = Vec::new();
    let mut found = Vec::new();
    for line in lines.iter().filter(|l| l.fstype == "tmpfs" && l.root == "/" && l.private) {
        // What the engine provides is the node's, wherever else it shows.
        let foreign = lines.iter().any(|l| l.device == line.device && l.root == "/" && provided(l));
        let (Some(point), Some(source)) = (unescape_text(line.point), unescape_text(line.source)) else { continue };
        let Some(options) = Options::parse(line.options) else { continue };
        if foreign || devices.contains(&line.device) || point == "/" {
            continue;
        }
        devices.push(line.device);
        found.push(TmpfsMount {
            point,
            source,
            options,
            read_only: line.options.split(',').any(|word| word == "ro"),
            bytes: 0,
            shared: false,
            identity: line.identity.clone(),
            id: line.id,
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str = "\
600 500 0:50 / / ro,relatime - overlay overlay rw,lowerdir=/l
602 600 0:52 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
603 602 0:53 / /dev/pts rw - devpts devpts rw
605 602 0:57 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
606 600 0:58 / /srv\\040x rw - tmpfs none rw,mode=1777,uid=7
608 601 0:52 /null /proc/kcore rw - tmpfs tmpfs rw,size=65536k,mode=755,inode64
609 600 0:60 / /provided rw - tmpfs tmpfs rw
610 600 0:61 / /shared rw shared:7 - tmpfs tmpfs rw
611 600 0:62 / /odd rw - tmpfs tmpfs rw,usrquota
612 600 0:58 / /again rw - tmpfs none rw,mode=1777,uid=7
613 600 0:63 / /sys/firmware ro - tmpfs tmpfs ro
614 600 0:60 / /provided2 rw - tmpfs tmpfs rw
";

    #[test]
    fn a_container_s_own_tmpfs_mounts_are_found() {
        let external = ["/provided".into(), "/proc/kcore".into()];
        let found = candidates(TABLE, &external);
        let points: Vec<&str> = found.iter().map(|m| m.point.as_str()).collect();
        assert_eq!(points, ["/dev", "/dev/shm", "/srv x", "/sys/firmware"]);
        assert_eq!(found.iter().map(|m| m.read_only).collect::<Vec<_>>(), [false, false, false, true]);
        assert_eq!(found[0].options.limits(), "size=65536k");
        assert_eq!(found[0].options.roomy(), "size=131072k,mode=755");
        assert_eq!(found[2].options.roomy(), "mode=1777,uid=7");
        assert_eq!(found[1].source, "shm");
    }

    #[test]
    fn a_mount_that_was_made_anew_or_has_other_options_is_another_one() {
        let changed = TABLE.replace("602 600 0:52", "702 600 0:52").replace("shm rw,size=65536k", "shm rw,size=1k");
        let (old, new) = (candidates(TABLE, &[]), candidates(&changed, &[]));
        assert_ne!(old[0].identity, new[0].identity);
        assert_ne!(old[1].identity, new[1].identity);
        assert_eq!(old[2].identity, new[2].identity);
        let flags = candidates(&TABLE.replace("/dev rw,nosuid", "/dev ro,noexec"), &[]);
        assert_eq!(old[0].identity, flags[0].identity);
    }

    #[test]
    fn options_of_a_peer_are_believed_only_if_they_are_known() {
        let options = |text: &str| serde_json::from_str::<Options>(text).unwrap().are_known();
        assert!(options(r#"[["size","64k"],["noswap",""]]"#));
        assert!(!options(r#"[["size","64k,x=y"]]"#));
        assert!(!options(r#"[["context","x"]]"#));
    }

    proptest! {
        #[test]
        fn no_table_makes_it_panic(table in "([0-9:/ a-z,=-]{0,60}\n){0,4}") {
            candidates(&table, &[]);
        }
    }
}
