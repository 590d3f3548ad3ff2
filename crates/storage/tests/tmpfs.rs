//! A tmpfs that is changed at random is copied, pass by pass, and the copy is compared. Needs root.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use tempfile::TempDir;
use tranship_storage::tmpfs::{self, Op, Replica, Sink, Source, TmpfsMount};
use tranship_storage::unmount_below;

/// Two directories, one of them with a tmpfs on it; both are unmounted at the end.
struct Stage {
    dir: TempDir,
    found: TmpfsMount,
}

impl Stage {
    fn new(options: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (source, copies) = (dir.path().join("source"), dir.path().join("copies"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(copies).unwrap();
        mount(Some("orig"), &source, Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let all = tmpfs::find(std::process::id(), &[]).unwrap();
        let found = all.into_iter().find(|m| Path::new(&m.point) == source).expect("the mount is found");
        Self { dir, found }
    }

    fn source(&self) -> PathBuf {
        self.dir.path().join("source")
    }

    fn copy(&self) -> PathBuf {
        self.dir.path().join("copies/0")
    }

    fn open(&self) -> (Source, Replica) {
        // What is offered crosses the wire as JSON.
        let offered = serde_json::from_str(&serde_json::to_string(&vec![&self.found]).unwrap()).unwrap();
        let offered: Vec<TmpfsMount> = offered;
        let replica = tmpfs::make(&self.dir.path().join("copies"), &offered).unwrap();
        (Source::open(std::process::id(), std::slice::from_ref(&self.found)), replica)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        unmount_below(self.dir.path()).unwrap();
    }
}

/// Applies what is sent at once, and counts.
struct Direct<'a> {
    replica: &'a mut Replica,
    ops: usize,
}

impl Sink for Direct<'_> {
    fn op(&mut self, op: &Op) -> io::Result<()> {
        self.ops += 1;
        let text = serde_json::to_string(op).unwrap();
        self.replica.apply(serde_json::from_str(&text).unwrap()).map_err(io::Error::other)
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.replica.data(offset, bytes).map_err(io::Error::other)
    }
}

const NOBODY: &[u32] = &[];

fn pass(source: &mut Source, replica: &mut Replica) -> (tmpfs::Moved, usize) {
    let mut sink = Direct { replica, ops: 0 };
    let moved = source.pass(NOBODY, &mut sink).unwrap();
    (moved, sink.ops)
}

/// Everything that a program can see in a tree, by path; hard links by the first path of the inode.
fn picture(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut seen = BTreeMap::new();
    let mut inodes = BTreeMap::new();
    look(root, root, &mut seen, &mut inodes);
    seen
}

fn look(root: &Path, path: &Path, seen: &mut BTreeMap<PathBuf, String>, inodes: &mut BTreeMap<u64, PathBuf>) {
    let stat = fs::symlink_metadata(path).unwrap();
    let name = path.strip_prefix(root).unwrap().to_owned();
    let first = inodes.entry(stat.ino()).or_insert_with(|| name.clone()).clone();
    let content = match stat.file_type() {
        t if t.is_file() => blake3::hash(&fs::read(path).unwrap()).to_hex().to_string(),
        t if t.is_symlink() => format!("{:?}", fs::read_link(path).unwrap()),
        _ => String::new(),
    };
    let mut xattrs: Vec<_> = xattrs(path);
    xattrs.sort();
    let size = if stat.is_dir() { 0 } else { stat.size() };
    seen.insert(
        name,
        format!(
            "{:o} {}:{} {size} {} {}.{} {:x} first {first:?} {content} {xattrs:?}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.nlink(),
            stat.mtime(),
            stat.mtime_nsec(),
            stat.rdev()
        ),
    );
    if stat.is_dir() {
        let mut entries: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for entry in entries {
            look(root, &entry, seen, inodes);
        }
    }
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut list = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap_or(0);
    let names = list[..length].split(|b| *b == 0).filter(|n| !n.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 4096];
            let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
            (name.to_vec(), value[..length].to_vec())
        })
        .collect()
}

fn assert_same(stage: &Stage, what: &str) {
    let used = |path: PathBuf| nix::sys::statvfs::statvfs(&path).map(|s| s.blocks() - s.blocks_free()).unwrap();
    assert!(used(stage.copy()) <= used(stage.source()), "{what}: the copy needs more memory");
    let (source, copy) = (picture(&stage.source()), picture(&stage.copy()));
    for (path, is) in &source {
        assert_eq!(Some(is), copy.get(path), "{what}: {path:?}");
    }
    assert_eq!(
        source.len(),
        copy.len(),
        "{what}: {:?}",
        copy.keys().filter(|k| !source.contains_key(*k)).collect::<Vec<_>>()
    );
}

#[test]
fn files_of_every_kind_are_copied() {
    let stage = Stage::new("size=64m,mode=1770,uid=3");
    let at = |name: &str| stage.source().join(name);
    fs::create_dir_all(at("d/e")).unwrap();
    fs::write(at("d/file"), b"content").unwrap();
    fs::set_permissions(at("d/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(at("d/file"), at("linked")).unwrap();
    symlink("/nowhere/at all", at("sym")).unwrap();
    symlink("d/file", at("d/sym")).unwrap();
    let make = |name, kind, device| mknod(&at(name), kind, Mode::from_bits_truncate(0o640), device).unwrap();
    make("fifo", SFlag::S_IFIFO, 0);
    make("null", SFlag::S_IFCHR, makedev(1, 3));
    make("block", SFlag::S_IFBLK, makedev(7, 9));
    let _socket = std::os::unix::net::UnixListener::bind(at("sock")).unwrap();
    std::os::unix::fs::lchown(at("sym"), Some(5), Some(6)).unwrap();
    std::os::unix::fs::chown(at("d"), Some(1000), Some(1001)).unwrap();
    let sparse = fs::File::create(at("sparse")).unwrap();
    sparse.write_all_at(b"x", 30 << 20).unwrap();
    sparse.write_all_at(b"y", 5 << 20).unwrap();
    sparse.set_len(200 << 20).unwrap();
    drop(sparse);
    fs::write(at(std::str::from_utf8(b"odd %41 \n\t name").unwrap()), b"").unwrap();
    fs::write(stage.source().join(std::ffi::OsStr::from_bytes(b"\xff\xfe")), b"z").unwrap();
    let xattr = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::setxattr(at(name), key, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    xattr("d/file", "trusted.a", b"1\0\xff");
    xattr("d", "trusted.b", b"");
    // cap_net_raw, effective, version 2.
    xattr("linked", "security.capability", &[1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);

    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    assert_same(&stage, "first pass");

    rustix::fs::removexattr(at("d"), "trusted.b").unwrap();
    fs::rename(at("d"), at("d2")).unwrap();
    fs::rename(at("fifo"), at("d2/e/fifo")).unwrap();
    fs::remove_file(at("null")).unwrap();
    fs::create_dir(at("null")).unwrap();
    fs::rename(at("linked"), at("sparse")).unwrap();
    pass(&mut source, &mut replica);
    assert_same(&stage, "second pass");

    let decision = source.decide(NOBODY).unwrap();
    assert_eq!(decision.external.len(), 1, "{decision:?}");
    fs::write(at("late"), vec![7; 100_000]).unwrap();
    source.finish(&mut Direct { replica: &mut replica, ops: 0 }).unwrap();
    assert_same(&stage, "last pass");
    let limit = nix::sys::statvfs::statvfs(&stage.copy()).unwrap();
    assert_eq!(limit.blocks() * limit.fragment_size(), 64 << 20, "the copy has the original's size");
}

#[test]
fn a_quiet_filesystem_costs_nothing() {
    let stage = Stage::new("mode=755");
    for n in 0..100 {
        fs::write(stage.source().join(n.to_string()), vec![1; 5000]).unwrap();
    }
    let (mut source, mut replica) = stage.open();
    let (moved, _) = pass(&mut source, &mut replica);
    assert_eq!((moved.files, moved.bytes), (100, 500_000));
    let (moved, ops) = pass(&mut source, &mut replica);
    assert_eq!((moved.files, ops), (0, 0));
    fs::write(stage.source().join("7"), b"z").unwrap();
    let (moved, _) = pass(&mut source, &mut replica);
    assert_eq!(moved.bytes, 1);
    assert_same(&stage, "after one change");
}

#[test]
fn writes_through_a_mapping_are_found_while_it_is_there_and_when_it_is_gone() {
    let stage = Stage::new("mode=755");
    let path = stage.source().join("mapped");
    fs::write(&path, vec![1; 300_000]).unwrap();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    // The times must be old enough to be believed, so that it is not they that give it away.
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(5);
    fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
    std::thread::sleep(2 * tmpfs::GRAIN);
    pass(&mut source, &mut replica);
    std::thread::sleep(2 * tmpfs::GRAIN);
    pass(&mut source, &mut replica);
    let writer = "
import mmap, sys
f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()
sys.stdin.readline()
m[200000] = 9; print('written', flush=True)
sys.stdin.readline()
m[100000] = 8";
    let mut child = std::process::Command::new("python3")
        .args(["-c", writer])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    io::Write::write_all(&mut input, b"\n").unwrap();
    io::BufRead::read_line(&mut output, &mut line).unwrap();
    let mut sink = Direct { replica: &mut replica, ops: 0 };
    let moved = source.pass(&[child.id()], &mut sink).unwrap();
    assert_eq!((moved.files, moved.bytes), (1, 16 << 10), "one chunk of the mapped file");
    assert_same(&stage, "while it is mapped");
    io::Write::write_all(&mut input, b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    let (moved, _) = pass(&mut source, &mut replica);
    assert_eq!((moved.files, moved.bytes), (1, 16 << 10), "the process is gone, and its write is not");
    assert_same(&stage, "after it was mapped");
}

#[test]
fn what_the_source_does_at_random_is_followed() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("SEED={seed}");
    for round in 0..20 {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(round));
        let stage = Stage::new("size=32m,mode=755");
        for _ in 0..chance.below(40) {
            chance.change(&stage.source());
        }
        let (mut source, mut replica) = stage.open();
        for n in 0..12 {
            pass(&mut source, &mut replica);
            assert_same(&stage, &format!("seed {seed} round {round} pass {n}"));
            for _ in 0..chance.below(30) {
                chance.change(&stage.source());
            }
        }
        assert_eq!(source.decide(NOBODY).unwrap().external.len(), 1);
        source.finish(&mut Direct { replica: &mut replica, ops: 0 }).unwrap();
        assert_same(&stage, &format!("seed {seed} round {round} end"));
    }
}

#[test]
fn a_source_that_changes_while_it_is_read_is_right_once_it_stops() {
    let stage = Stage::new("size=64m,mode=755");
    let (mut source, mut replica) = stage.open();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let root = stage.source();
        let busy = scope.spawn(|| {
            let (root, mut chance) = (root, Chance(4711));
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                chance.change(&root);
            }
        });
        for _ in 0..30 {
            let mut sink = Direct { replica: &mut replica, ops: 0 };
            source.pass(NOBODY, &mut sink).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        busy.join().unwrap();
    });
    source.decide(NOBODY).unwrap();
    source.finish(&mut Direct { replica: &mut replica, ops: 0 }).unwrap();
    assert_same(&stage, "in the end");
}

#[test]
fn hostile_operations_are_refused() {
    let hostile = [
        r#"{"op":"make","ino":5,"parent":2,"name":"..","kind":"file"}"#,
        r#"{"op":"make","ino":5,"parent":2,"name":"a/b","kind":"file"}"#,
        r#"{"op":"make","ino":5,"parent":2,"name":"","kind":"file"}"#,
        r#"{"op":"make","ino":5,"parent":77,"name":"x","kind":"file"}"#,
        r#"{"op":"make","ino":5,"parent":4,"name":"x","kind":"file"}"#,
        r#"{"op":"make","ino":3,"parent":2,"name":"again","kind":"file"}"#,
        r#"{"op":"make","ino":18446744073709551615,"parent":2,"name":"x","kind":"directory"}"#,
        r#"{"op":"make","ino":5,"parent":18446744073709551615,"name":"x","kind":"file"}"#,
        r#"{"op":"name","ino":9,"parent":2,"name":"loop"}"#,
        r#"{"op":"name","ino":99,"parent":2,"name":"x"}"#,
        r#"{"op":"park","ino":2,"parent":2,"name":"f"}"#,
        r#"{"op":"park","ino":3,"parent":2,"name":"d"}"#,
        r#"{"op":"unname","ino":3,"parent":2,"name":"nothing"}"#,
        r#"{"op":"unpark"}"#,
        r#"{"op":"content","ino":4,"size":10}"#,
        r#"{"op":"content","ino":9,"size":10}"#,
        r#"{"op":"zero","offset":0,"length":1}"#,
        r#"{"op":"mount","index":1,"root":2}"#,
        r#"{"op":"mount","index":0,"root":3}"#,
    ];
    for text in hostile {
        let stage = Stage::new("mode=755");
        let (_, mut replica) = stage.open();
        let mut apply = |text: &str| replica.apply(serde_json::from_str(text).unwrap());
        apply(r#"{"op":"mount","index":0,"root":2}"#).unwrap();
        apply(r#"{"op":"make","ino":3,"parent":2,"name":"f","kind":"file"}"#).unwrap();
        apply(r#"{"op":"make","ino":4,"parent":2,"name":"s","kind":"symlink","target":"/etc"}"#).unwrap();
        apply(r#"{"op":"make","ino":9,"parent":2,"name":"d","kind":"directory"}"#).unwrap();
        let refused = apply(text);
        assert!(refused.is_err(), "{text} was accepted");
        apply(r#"{"op":"content","ino":3,"size":10}"#).unwrap();
        assert!(replica.data(8, b"abc").is_err(), "beyond the end of the file");
    }
    let stage = Stage::new("mode=755");
    let mut bad = serde_json::to_value(&stage.found).unwrap();
    bad["options"] = serde_json::json!([["size", "1k,mpol=x"]]);
    let bad: TmpfsMount = serde_json::from_value(bad).unwrap();
    assert!(tmpfs::make(&stage.dir.path().join("copies"), &[bad]).is_err());
}

/// A small generator, so that a seed says everything.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// Does something to the tree; what cannot be done is not done.
    fn change(&mut self, root: &Path) {
        let mut paths = vec![PathBuf::new()];
        collect(root, Path::new(""), &mut paths);
        let pick = |chance: &mut Self| root.join(&paths[chance.below(paths.len() as u64) as usize]);
        let (one, two) = (pick(self), pick(self));
        let fresh = pick(self).join(format!("n{}", self.below(12)));
        let amount = self.below(200_000);
        // Each may fail, as a program's calls may.
        let _ = match self.below(16) {
            0 | 1 => fs::create_dir(&fresh),
            2 | 3 => fs::File::create_new(&fresh).and_then(|f| f.write_all_at(&vec![amount as u8; amount as usize], 0)),
            4 => symlink(&one, &fresh),
            5 => fs::hard_link(&one, &fresh),
            6 | 7 => fs::rename(&one, &fresh),
            8 => fs::rename(&one, &two),
            9 => rustix::fs::renameat_with(
                rustix::fs::CWD,
                &one,
                rustix::fs::CWD,
                &two,
                rustix::fs::RenameFlags::EXCHANGE,
            )
            .map_err(Into::into),
            10 => fs::remove_file(&one),
            11 if one != root => fs::remove_dir_all(&one),
            12 => fs::set_permissions(&one, fs::Permissions::from_mode(0o600 | (amount as u32 & 0o177))),
            13 => plain(&one).and_then(|f| f.set_len(amount * 3)),
            14 => plain(&one).and_then(|f| f.write_all_at(&[1, 2, 3], amount)),
            _ => mknod(&fresh, SFlag::S_IFIFO, Mode::S_IRUSR, 0).map_err(Into::into),
        };
    }
}

/// A regular file, for writing.
fn plain(path: &Path) -> io::Result<fs::File> {
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fs::File::options().write(true).open(path)
}

fn collect(root: &Path, at: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(at)).into_iter().flatten().flatten() {
        let path = at.join(entry.file_name());
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect(root, &path, paths);
        }
        paths.push(path);
    }
}
