//! Which files processes may change without a trace in the files' times, and which CRIU will give names of its own.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// A filesystem, by its device numbers.
pub(super) type Device = (u32, u32);

/// What is known of one filesystem's use.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Use {
    /// Inodes that have a shared mapping, or are open for reading and writing, with which one can be made.
    pub suspects: HashSet<u64>,
    /// Somebody has something open for writing.
    pub open_for_writing: bool,
    /// Somebody has a file open by a name that is gone while another one is there. CRIU gives such a file a name of its own,
    /// in the filesystem, while it dumps, and expects it there when it restores.
    pub renamed_by_criu: bool,
}

/// How the processes `pids` use the filesystems `devices`. A process that ends meanwhile has no say.
pub(super) fn look(pids: &[u32], devices: &[Device]) -> HashMap<Device, Use> {
    let mut uses: HashMap<Device, Use> = devices.iter().map(|device| (*device, Use::default())).collect();
    for pid in pids {
        let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        for mapping in maps.split(|b| *b == b'\n').filter_map(Mapping::parse) {
            let Some(found) = uses.get_mut(&mapping.device) else { continue };
            if mapping.shared {
                found.suspects.insert(mapping.ino);
            }
            if mapping.deleted {
                let file = PathBuf::from(format!("/proc/{pid}/map_files/{}", mapping.range));
                found.renamed_by_criu |= links(&file) != Some(0);
            }
        }
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for path in descriptors.map(|entry| entry.path()) {
            let Ok(target) = statx(CWD, &path, AtFlags::empty(), StatxFlags::BASIC_STATS) else { continue };
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
                found.renamed_by_criu = true;
            }
        }
    }
    uses
}

const DELETED: &[u8] = b" (deleted)";

fn links(path: &PathBuf) -> Option<u32> {
    statx(CWD, path, AtFlags::empty(), StatxFlags::NLINK).ok().map(|s| s.stx_nlink)
}

/// A line of proc_pid_maps(5).
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    range: &'a str,
    shared: bool,
    device: Device,
    ino: u64,
    deleted: bool,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.splitn(6, |b| *b == b' ');
        let mut text = || std::str::from_utf8(words.next()?).ok();
        let (range, permissions, _offset, device, ino) = (text()?, text()?, text()?, text()?, text()?);
        let (major, minor) = device.split_once(':')?;
        let number = |digits: &str| u32::from_str_radix(digits, 16).ok();
        Some(Self {
            range,
            shared: permissions.as_bytes().get(3) == Some(&b's'),
            device: (number(major)?, number(minor)?),
            ino: ino.parse().ok()?,
            deleted: line.ends_with(DELETED),
        })
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
        assert_eq!((mapping.device, mapping.ino), ((0, 0x4a), 37));
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
        assert!(!look(&pid, &[device])[&device].suspects.contains(&ino));
        let both = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let found = &look(&pid, &[device])[&device];
        assert!(found.suspects.contains(&ino) && found.open_for_writing && !found.renamed_by_criu);
        std::fs::hard_link(&path, dir.path().join("g")).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(look(&pid, &[device])[&device].renamed_by_criu);
        std::fs::remove_file(dir.path().join("g")).unwrap();
        assert!(!look(&pid, &[device])[&device].renamed_by_criu, "a file without any name is CRIU's ghost");
        drop(both);
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in proptest::collection::vec(any::<u8>(), 0..120)) {
            Mapping::parse(&line);
        }
    }
}
