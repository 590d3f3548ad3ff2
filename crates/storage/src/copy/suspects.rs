//! Which files processes may change without a trace in the files' times, and which CRIU will give names of its own.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, statx};
use tranship_sys::process::mapping_lines;

use super::tree;
use crate::Root;

/// A filesystem, by its device numbers.
pub(crate) type Device = (u32, u32);

/// What is known of one filesystem's use.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    /// Inodes that have a shared mapping, or are open for reading and writing, with which one can be made.
    pub suspects: HashSet<u64>,
    /// Those of them that have a shared mapping.
    pub mapped: HashSet<u64>,
    /// There are no others, also among the files that were closed meanwhile.
    pub all: bool,
    /// It is not known which files got shared mappings since the last look.
    pub unsure_of_mappings: bool,
    /// Somebody has something open for writing.
    pub open_for_writing: bool,
    /// Files that somebody has open or mapped by a name that is gone while another one is there: inode, and the mount
    /// that it was opened in. To a file that it does not find under the name that the kernel has for it CRIU gives a
    /// name of its own, in the filesystem, while it dumps, and expects it there when it restores.
    pub renamed: HashSet<(u64, u64)>,
}

impl Use {
    /// Takes for suspects just the files that have a shared mapping, or had one at the look `before`, or got one since: those
    /// that were only open for reading and writing have not been written but by calls that change their times.
    pub fn narrow(&mut self, before: Option<&HashSet<u64>>, since: impl IntoIterator<Item = u64>) {
        self.suspects = self.mapped.iter().chain(before.into_iter().flatten()).copied().chain(since).collect();
        self.all = true;
    }
}

/// The upper directory of an overlay, through which its files are known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer<'a>(pub &'a Root);

impl Layer<'_> {
    /// The file that is `path` in the container, which is where the overlay is mounted as the root.
    fn below(self, path: &[u8]) -> Option<(Device, u64)> {
        let relative = path.strip_prefix(b"/")?;
        let stat = tree::look(tree::open_beneath(self.0, relative, OFlags::PATH).ok()?, b"").ok()?;
        Some(((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
    }
}

/// How the processes `pids` use the filesystems `devices`, and the overlays `merged`, by their devices. A process that ends
/// meanwhile has no say.
pub(crate) fn look(pids: &[u32], devices: &[Device], merged: &HashMap<Device, Layer<'_>>) -> HashMap<Device, Use> {
    let mut uses: HashMap<Device, Use> = devices.iter().map(|device| (*device, Use::default())).collect();
    for pid in pids {
        for line in mapping_lines(*pid).into_iter().flatten().map_while(Result::ok) {
            let Some(mapping) = Mapping::parse(&line).filter(|m| m.shared || m.deleted) else { continue };
            // The table of mappings has other device numbers than the files themselves on some filesystems.
            let file = PathBuf::from(format!("/proc/{pid}/map_files/{}", mapping.range));
            let Ok(target) = statx(CWD, &file, AtFlags::empty(), WITH_MOUNT) else { continue };
            let device = (target.stx_dev_major, target.stx_dev_minor);
            if let Some(found) = uses.get_mut(&device) {
                if mapping.shared {
                    found.suspects.insert(target.stx_ino);
                    found.mapped.insert(target.stx_ino);
                }
                if mapping.deleted && target.stx_nlink > 0 {
                    found.renamed.insert((target.stx_ino, target.stx_mnt_id));
                }
            } else if mapping.shared
                && let Some((device, ino)) = merged.get(&device).and_then(|l| l.below(mapping.path))
            {
                let found = uses.entry(device).or_default();
                found.suspects.insert(ino);
                found.mapped.insert(ino);
            }
        }
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for path in descriptors.map(|entry| entry.path()) {
            let Ok(target) = statx(CWD, &path, AtFlags::empty(), WITH_MOUNT) else { continue };
            let Some(found) = uses.get_mut(&(target.stx_dev_major, target.stx_dev_minor)) else { continue };
            // The permissions of the link say how the file is open (proc_pid_fd(5)).
            let Ok(link) = statx(CWD, &path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::MODE) else { continue };
            let (reads, writes) = (link.stx_mode & 0o400 != 0, link.stx_mode & 0o200 != 0);
            found.open_for_writing |= writes;
            if reads && writes {
                found.suspects.insert(target.stx_ino);
            }
            if target.stx_nlink > 0
                && std::fs::read_link(&path).is_ok_and(|name| name.as_os_str().as_bytes().ends_with(DELETED))
            {
                found.renamed.insert((target.stx_ino, target.stx_mnt_id));
            }
        }
    }
    uses
}

const WITH_MOUNT: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::MNT_ID);
const DELETED: &[u8] = b" (deleted)";

/// A line of proc_pid_maps(5).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapping<'a> {
    range: &'a str,
    shared: bool,
    deleted: bool,
    pub(super) path: &'a [u8],
}

impl<'a> Mapping<'a> {
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.splitn(6, |b| *b == b' ');
        let mut text = || std::str::from_utf8(words.next()?).ok();
        let (range, permissions) = (text()?, text()?);
        let path = words.nth(3)?.trim_ascii_start();
        let shared = permissions.as_bytes().get(3) == Some(&b's');
        Some(Self { range, shared, deleted: path.ends_with(DELETED), path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn mappings_are_read() {
        let line = b"7f0-7f9 rw-s 00000000 00:4a 37                       /tmp/a b (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.range, mapping.shared, mapping.deleted), ("7f0-7f9", true, true));
        assert_eq!(mapping.path, b"/tmp/a b (deleted)");
        assert!(!Mapping::parse(b"7f0-7f9 r--p 00000000 08:01 37 /x").unwrap().shared);
    }

    #[test]
    fn files_in_use_are_found() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (reads, device) = {
            let file = std::fs::File::create(&path).unwrap();
            let stat = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).unwrap();
            (std::fs::File::open(&path).unwrap(), (stat.stx_dev_major, stat.stx_dev_minor))
        };
        let ino = reads.metadata().unwrap().ino();
        let pid = [std::process::id()];
        assert!(!look(&pid, &[device], &HashMap::new())[&device].suspects.contains(&ino));
        let both = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let found = &look(&pid, &[device], &HashMap::new())[&device];
        assert!(found.suspects.contains(&ino) && found.open_for_writing && found.renamed.is_empty());
        std::fs::hard_link(&path, dir.path().join("g")).unwrap();
        std::fs::remove_file(&path).unwrap();
        let found = &look(&pid, &[device], &HashMap::new())[&device].renamed;
        assert!(found.iter().any(|(inode, mount)| *inode == ino && *mount != 0), "{found:?}");
        std::fs::remove_file(dir.path().join("g")).unwrap();
        assert!(
            look(&pid, &[device], &HashMap::new())[&device].renamed.iter().all(|(inode, _)| *inode != ino),
            "a file without any name is CRIU's ghost"
        );
        drop(both);
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in proptest::collection::vec(any::<u8>(), 0..120)) {
            Mapping::parse(&line);
        }
    }
}
