//! A directory tree on a disk that is changed at random is copied, pass by pass, and the copy is compared. Needs root, and that the
//! build's directory is on ext4.

mod playground;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use playground::{Chance, Direct, picture};
use tempfile::TempDir;
use tranship_storage::carried::{self, Source, Target};
use tranship_storage::copy::{CopyError, GRAIN, Moved, Replica};
use tranship_storage::unmount_below;
use tranship_types::{CarriedTree, TreeKind};

const NOBODY: &[u32] = &[];
const ID: &str = "m-7";

/// A node that a directory leaves, and one that it comes to; each has it at its own `data`.
struct Stage {
    dir: TempDir,
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for node in ["here", "there"] {
            fs::create_dir(dir.path().join(node)).unwrap();
        }
        fs::create_dir(dir.path().join("here/data")).unwrap();
        Self { dir }
    }

    fn source(&self) -> PathBuf {
        self.dir.path().join("here/data")
    }

    fn copy(&self) -> PathBuf {
        self.dir.path().join("there/data")
    }

    fn tree(&self) -> CarriedTree {
        CarriedTree { kind: TreeKind::Bind, inside: "/data".into(), path: self.source(), bytes: 0 }
    }

    fn target(&self) -> Target {
        Target::new(&self.tree(), self.copy(), ID)
    }

    fn open(&self) -> (Source, Replica) {
        self.target().stage().unwrap();
        let replica = Target::open_all(&[self.target()], &[self.tree()]).unwrap();
        (Source::open(std::process::id(), &[self.tree()]).unwrap(), replica)
    }

    /// Where the copy is before it takes its place.
    fn staging(&self) -> PathBuf {
        self.dir.path().join(format!("there/.data.tranship-{ID}"))
    }

    fn names_there(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path().join("there")).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        unmount_below(self.dir.path()).unwrap();
    }
}

fn pass(source: &mut Source, replica: &mut Replica) -> Moved {
    let moved = source.pass(NOBODY, &mut Direct { replica, ops: 0 }).unwrap();
    replica.flush();
    moved
}

fn finish(source: &mut Source, replica: &mut Replica) -> Moved {
    source.finish(NOBODY, &mut Direct { replica, ops: 0 }).unwrap()
}

fn assert_same(source: &Path, copy: &Path, what: &str) {
    let without_marks = |root: &Path| {
        let mut all = picture(root);
        // The copy's own mark is not the container's.
        let root = all.remove(Path::new("")).unwrap();
        all.insert("".into(), root.split(" first ").next().unwrap().to_owned());
        all
    };
    let (theirs, ours) = (without_marks(source), without_marks(copy));
    for (path, is) in &theirs {
        assert_eq!(Some(is), ours.get(path), "{what}: {path:?}");
    }
    let more: Vec<_> = ours.keys().filter(|path| !theirs.contains_key(*path)).collect();
    assert!(more.is_empty(), "{what}: {more:?}");
}

#[test]
fn files_of_every_kind_are_copied_and_take_their_place() {
    let stage = Stage::new();
    let at = |name: &str| stage.source().join(name);
    fs::create_dir_all(at("d/e")).unwrap();
    fs::write(at("d/file"), vec![5; 100_000]).unwrap();
    fs::set_permissions(at("d/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(at("d/file"), at("linked")).unwrap();
    symlink("/nowhere/at all", at("sym")).unwrap();
    let make = |name, kind, device| mknod(&at(name), kind, Mode::from_bits_truncate(0o640), device).unwrap();
    make("fifo", SFlag::S_IFIFO, 0);
    make("whiteout", SFlag::S_IFCHR, makedev(0, 0));
    make("block", SFlag::S_IFBLK, makedev(7, 9));
    let _socket = std::os::unix::net::UnixListener::bind(at("sock")).unwrap();
    std::os::unix::fs::lchown(at("sym"), Some(5), Some(6)).unwrap();
    std::os::unix::fs::chown(at("d"), Some(1000), Some(1001)).unwrap();
    let sparse = fs::File::create(at("sparse")).unwrap();
    sparse.write_all_at(b"x", 30 << 20).unwrap();
    sparse.set_len(200 << 20).unwrap();
    fs::write(stage.source().join(std::ffi::OsStr::from_bytes(b"\xff\xfe %41\n")), b"z").unwrap();
    let xattr = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::setxattr(at(name), key, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    xattr("d", "trusted.overlay.opaque", b"y");
    xattr("d/file", "user.a", b"1\0\xff");
    xattr("linked", "security.capability", &[1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // u::rwx, u:1:r, g::r, m::r, o::- (linux/posix_acl_xattr.h).
    let acl: Vec<u8> = [(1u16, 7u16, u32::MAX), (2, 4, 1), (4, 4, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
        .iter()
        .flat_map(|(tag, bits, id)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat())
        .collect();
    xattr("d/e", "system.posix_acl_access", &[&2u32.to_le_bytes()[..], &acl].concat());

    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.staging(), "first pass");
    assert!(fs::metadata(stage.staging().join("sparse")).unwrap().blocks() * 512 < 1 << 20, "the hole stays one");

    fs::rename(at("d"), at("d2")).unwrap();
    fs::remove_file(at("whiteout")).unwrap();
    fs::rename(at("linked"), at("sparse")).unwrap();
    pass(&mut source, &mut replica);
    fs::write(at("late"), vec![7; 100_000]).unwrap();
    finish(&mut source, &mut replica);
    assert_eq!(carried::difference(&source.digests(&|| false).unwrap()[0], &replica.digests(0).unwrap()), None);
    let target = stage.target();
    assert_eq!(target.obstacle().unwrap(), None);
    (0..2).for_each(|_| target.place().unwrap());
    (0..2).for_each(|_| assert_eq!(target.settle().unwrap(), None));
    assert_same(&stage.source(), &stage.copy(), "in its place");
    assert_eq!(stage.names_there(), ["data"]);
    assert!(rustix::fs::getxattr(stage.copy(), "trusted.tranship", &mut [0; 99][..]).is_err(), "no mark stays");

    fs::write(stage.copy().join("d2/e/x"), b"").unwrap();
    let there = carried::digests(&carried::open(&stage.copy()).unwrap(), &stage.copy(), &|| false).unwrap();
    assert_eq!(carried::difference(&source.digests(&|| false).unwrap()[0], &there), Some("d2"));
}

#[test]
fn of_a_large_file_only_what_was_written_is_read_and_sent() {
    let stage = Stage::new();
    let path = stage.source().join("big");
    fs::write(&path, vec![1; 64 << 20]).unwrap();
    let (mut source, mut replica) = stage.open();
    assert_eq!(pass(&mut source, &mut replica).bytes, 64 << 20);
    assert!(bytes_read() >= 64 << 20, "it is this thread that reads");
    pass(&mut source, &mut replica);
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[2; 8192], 40 << 20).unwrap();
    let read_before = bytes_read();
    assert_eq!(pass(&mut source, &mut replica).bytes, 8 << 10);
    let read = bytes_read() - read_before;
    assert!(read < 256 << 10, "{read} bytes were read for what a call had written in a large folio, {}", source.way);

    // Through a mapping: whether the page was clean, or has been written to before.
    let script = "import mmap, sys, os\nm = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)\nfor at in map(int, sys.argv[2:]): m[at] = 9";
    let run = |places: &[u64]| {
        let places: Vec<_> = places.iter().map(u64::to_string).collect();
        assert!(
            std::process::Command::new("python3")
                .args(["-c", script])
                .arg(&path)
                .args(places)
                .status()
                .unwrap()
                .success()
        );
    };
    run(&[10 << 20, 50 << 20]);
    assert_eq!(pass(&mut source, &mut replica).bytes, 2 * (4 << 10));
    run(&[(10 << 20) + 5]);
    // A hole, a file that is longer, one past the cache.
    nix::fcntl::fallocate(
        &file,
        nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE,
        20 << 20,
        1 << 20,
    )
    .unwrap();
    file.write_all_at(b"end", 70 << 20).unwrap();
    pass(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.staging(), "a hole, and a longer file");
    // One in the middle of what is known by one hash, and a page of zeros beside what is kept.
    nix::fcntl::fallocate(
        &file,
        nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE,
        (24 << 20) + 4096,
        4096,
    )
    .unwrap();
    file.write_all_at(&[0; 4096], 26 << 20).unwrap();
    pass(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.staging(), "a small hole, and zeros");
    direct_write(&path, 30 << 20);
    let moved = finish(&mut source, &mut replica);
    assert_eq!(moved.bytes, 4 << 10, "past the cache");
    assert_same(&stage.source(), &stage.staging(), "in the end");
}

/// Bytes that this thread has read so far.
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok()).unwrap()
}

fn direct_write(path: &Path, offset: u64) {
    let status = std::process::Command::new("dd")
        .args(["if=/dev/urandom", "bs=4096", "count=1", "oflag=direct", "conv=notrunc", "status=none"])
        .arg(format!("of={}", path.display()))
        .arg(format!("seek={}", offset / 4096))
        .status();
    assert!(status.unwrap().success());
}

/// A process that writes to a file through a mapping.
struct Mapper {
    child: std::process::Child,
    pid: [u32; 1],
}

impl Mapper {
    const SCRIPT: &str = "
import mmap, os, sys
f, m = os.open(sys.argv[1], os.O_RDWR), None
for line in sys.stdin:
    words = line.split()
    if words[0] == 'map':
        m = mmap.mmap(f, 0)
    elif words[0] == 'unmap':
        m.close()
    else:
        m[int(words[1])] = int(words[2])
    print(flush=True)
";

    fn of(path: &Path) -> Self {
        let mut command = std::process::Command::new("python3");
        command.args(["-c", Self::SCRIPT]).arg(path);
        let child = command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
        Self { pid: [child.id()], child }
    }

    /// Returns when it is done.
    fn order(&mut self, order: &str) {
        use std::io::{Read, Write};
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        self.child.stdin = None;
        self.child.wait().unwrap();
    }
}

#[test]
fn what_is_written_otherwise_than_by_calls_to_what_calls_have_made_dirty_is_found() {
    let stage = Stage::new();
    let path = stage.source().join("big");
    fs::write(&path, vec![1; 16 << 20]).unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    // Another byte of the folio each time: it is dirty from the first call on, so that nothing is told of it any more.
    let dirty = |n: u64| file.write_all_at(&[n as u8 + 2; 10], (4 << 20) + n * 40_000).unwrap();
    let mut mapper = Mapper::of(&path);
    for at_the_end in [false, true] {
        for (n, orders) in [
            &["map", "write 4200000 7", "unmap"][..],
            &["map", "write 4210000 8"],
            &["write 4220000 9"],
            &["unmap"],
            &[],
        ]
        .into_iter()
        .enumerate()
        {
            let (mut source, mut replica) = stage.open();
            for round in 0..3 {
                dirty(round);
                source.pass(&mapper.pid, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
            }
            orders.iter().for_each(|order| mapper.order(order));
            // Else it would be compared as a whole, because it has another time.
            dirty(8);
            if !at_the_end {
                source.pass(&mapper.pid, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
                assert_same(&stage.source(), &stage.staging(), &format!("orders {n}"));
                dirty(9);
            }
            source.finish(&mapper.pid, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
            assert_same(&stage.source(), &stage.staging(), &format!("orders {n} {at_the_end}, in the end"));
            drop(replica);
            stage.target().undo().unwrap();
        }
    }
    let clear = |mode| nix::fcntl::fallocate(&file, mode, (4 << 20) + 100, 200).unwrap();
    let keep = nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let cuts: [&dyn Fn(); 3] = [
        &|| clear(nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE | keep),
        &|| clear(nix::fcntl::FallocateFlags::FALLOC_FL_ZERO_RANGE | keep),
        &|| {
            file.set_len((4 << 20) + 1234).unwrap();
            file.set_len(16 << 20).unwrap();
        },
    ];
    for (n, cut) in cuts.into_iter().enumerate() {
        file.write_all_at(&vec![4; 12 << 20], 4 << 20).unwrap();
        let (mut source, mut replica) = stage.open();
        for round in 0..3 {
            dirty(round);
            pass(&mut source, &mut replica);
        }
        cut();
        dirty(8);
        finish(&mut source, &mut replica);
        assert_same(&stage.source(), &stage.staging(), &format!("cut {n}"));
        drop(replica);
        stage.target().undo().unwrap();
    }
}

#[test]
fn a_file_that_is_written_in_every_way_is_followed() {
    const SIZE: u64 = 6 << 20;
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("SEED={seed}");
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let stage = Stage::new();
    let path = stage.source().join("big");
    fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut mapper = Mapper::of(&path);
    let (mut source, mut replica) = stage.open();
    let mut mapped = false;
    for n in 0..150 {
        source.pass(&mapper.pid, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
        assert_same(&stage.source(), &stage.staging(), &format!("seed {seed} pass {n}"));
        for _ in 0..1 + chance.below(6) {
            let (at, value) = (chance.below(SIZE), chance.below(255));
            match chance.below(24) {
                0..12 => {
                    file.write_all_at(&vec![value as u8; chance.below(9000) as usize], at.min(SIZE - 9000)).unwrap();
                }
                12..17 if mapped => mapper.order(&format!("write {at} {value}")),
                17 | 18 => {
                    mapper.order(if mapped { "unmap" } else { "map" });
                    mapped = !mapped;
                }
                19 => direct_write(&path, at / 4096 * 4096),
                20 | 21 => {
                    let zero = nix::fcntl::FallocateFlags::FALLOC_FL_ZERO_RANGE;
                    let punch = nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
                        | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    let length = (1 + chance.below(50_000)).min(SIZE - at);
                    let mode = if value % 2 == 0 { zero } else { punch };
                    nix::fcntl::fallocate(&file, mode, at as i64, length as i64).unwrap();
                }
                // A mapping beyond the end would be the end of the process.
                22 if !mapped => {
                    file.set_len(at).unwrap();
                    file.set_len(SIZE).unwrap();
                }
                23 => rustix::fs::fdatasync(&file).unwrap(),
                _ => {}
            }
        }
    }
    source.finish(&mapper.pid, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
    assert_same(&stage.source(), &stage.staging(), &format!("seed {seed} end"));
}

#[test]
fn shifted_content_is_found() {
    let stage = Stage::new();
    let path = stage.source().join("shifted");
    let content: Vec<u8> = (0..1u32 << 20).flat_map(u32::to_le_bytes).collect();
    fs::write(&path, &content).unwrap();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    pass(&mut source, &mut replica);
    let file = fs::File::options().write(true).open(&path).unwrap();
    let shift = |mode, at, length| nix::fcntl::fallocate(&file, mode, at, length).unwrap();
    shift(nix::fcntl::FallocateFlags::FALLOC_FL_COLLAPSE_RANGE, 1 << 20, 64 << 10);
    file.write_all_at(&vec![3; 64 << 10], (4 << 20) - (64 << 10)).unwrap();
    finish(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.staging(), "shifted");
}

#[test]
fn what_the_source_does_at_random_is_followed() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("SEED={seed}");
    for round in 0..10 {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(round));
        let stage = Stage::new();
        for _ in 0..chance.below(40) {
            chance.change(&stage.source());
        }
        let (mut source, mut replica) = stage.open();
        for n in 0..10 {
            pass(&mut source, &mut replica);
            assert_same(&stage.source(), &stage.staging(), &format!("seed {seed} round {round} pass {n}"));
            for _ in 0..chance.below(30) {
                chance.change(&stage.source());
            }
        }
        finish(&mut source, &mut replica);
        assert_same(&stage.source(), &stage.staging(), &format!("seed {seed} round {round} end"));
    }
}

#[test]
fn a_source_that_changes_while_it_is_read_is_right_once_it_stops() {
    let stage = Stage::new();
    fs::write(stage.source().join("big"), vec![1; 8 << 20]).unwrap();
    let (mut source, mut replica) = stage.open();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let root = stage.source();
        let busy = scope.spawn(|| {
            let (root, mut chance) = (root, Chance(4711));
            let big = fs::File::options().write(true).open(root.join("big")).unwrap();
            while !stop.load(Ordering::Relaxed) {
                chance.change(&root);
                let _ = big.write_all_at(&[chance.below(255) as u8; 700], chance.below(8 << 20));
            }
        });
        let stopping = Stopping(&stop);
        for _ in 0..30 {
            pass(&mut source, &mut replica);
        }
        drop(stopping);
        busy.join().unwrap();
    });
    finish(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.staging(), "in the end");
}

/// Ends what goes on in another thread, also when this one panics: it would be waited for, for ever.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_is_undone_leaves_the_place_as_it_was() {
    for (placed, old) in [(false, false), (false, true), (true, false), (true, true)] {
        let stage = Stage::new();
        fs::write(stage.source().join("new"), b"new").unwrap();
        if old {
            fs::create_dir(stage.copy()).unwrap();
            fs::write(stage.copy().join("old"), b"old").unwrap();
            carried::leave(&stage.copy(), "m-1").unwrap();
        }
        let target = stage.target();
        assert_eq!(target.obstacle().unwrap(), None, "{old}");
        let (mut source, mut replica) = stage.open();
        finish(&mut source, &mut replica);
        if placed {
            target.place().unwrap();
            assert!(stage.copy().join("new").exists());
        }
        (0..2).for_each(|_| target.undo().unwrap());
        assert_eq!(stage.names_there(), if old { vec!["data"] } else { Vec::new() }, "{placed} {old}");
        assert_eq!(stage.copy().join("old").exists(), old);
    }
}

#[test]
fn only_the_unchanged_copy_of_an_earlier_move_is_replaced() {
    let stage = Stage::new();
    let obstacle = || stage.target().obstacle().unwrap().map_or(String::new(), |(cause, _)| cause);
    assert_eq!(obstacle(), "");
    fs::create_dir(stage.copy()).unwrap();
    assert_eq!(obstacle(), "", "an empty directory");
    fs::write(stage.copy().join("x"), b"1").unwrap();
    assert!(obstacle().contains("exists already"));
    carried::leave(&stage.copy(), "m-1").unwrap();
    assert_eq!(obstacle(), "");
    std::thread::sleep(GRAIN);
    fs::write(stage.copy().join("x"), b"2").unwrap();
    assert!(obstacle().contains("changed since"));
    carried::leave(&stage.copy(), "m-2").unwrap();
    std::thread::sleep(GRAIN);
    fs::rename(stage.copy().join("x"), stage.dir.path().join("x")).unwrap();
    fs::write(stage.copy().join("y"), b"").unwrap();
    assert!(obstacle().contains("changed since"));
    fs::remove_dir_all(stage.copy()).unwrap();
    fs::write(stage.copy(), b"").unwrap();
    assert!(obstacle().contains("no directory"));
}

#[test]
fn a_full_disk_is_said_and_nothing_stays() {
    let stage = Stage::new();
    mount(Some("small"), &stage.dir.path().join("there"), Some("tmpfs"), MsFlags::empty(), Some("size=1m")).unwrap();
    fs::write(stage.source().join("big"), vec![1; 4 << 20]).unwrap();
    let (mut source, mut replica) = stage.open();
    let error = source.pass(NOBODY, &mut Direct { replica: &mut replica, ops: 0 }).unwrap_err();
    assert!(matches!(error, CopyError::Link(_)) && error.to_string().contains("No space left"), "{error}");
    stage.target().undo().unwrap();
    assert_eq!(stage.names_there(), Vec::<String>::new());
    let room = carried::room(&stage.copy()).unwrap();
    assert!(room.bytes <= 1 << 20 && !room.read_only, "{room:?}");
    assert!(carried::disk_usage(&stage.source()).unwrap() >= 4 << 20);
    assert_ne!(carried::room(&stage.source()).unwrap().device, room.device);
}

#[test]
fn the_directory_of_an_engine_s_own_is_emptied_and_filled() {
    let stage = Stage::new();
    fs::create_dir_all(stage.copy().join("made/by")).unwrap();
    fs::write(stage.copy().join("made/by/engine"), b"").unwrap();
    fs::write(stage.source().join("a"), b"1").unwrap();
    let tree = CarriedTree { kind: TreeKind::WritableLayer, ..stage.tree() };
    let target = Target::new(&tree, stage.copy(), ID);
    assert_eq!(target.obstacle().unwrap(), None);
    target.stage().unwrap();
    let mut replica = Target::open_all(&[target], std::slice::from_ref(&tree)).unwrap();
    let mut source = Source::open(std::process::id(), &[tree]).unwrap();
    finish(&mut source, &mut replica);
    assert_same(&stage.source(), &stage.copy(), "an engine's layer");
}

#[test]
fn neither_symlinks_nor_mounts_lead_out_of_a_tree() {
    let stage = Stage::new();
    let secret = stage.dir.path().join("secret");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("s"), b"secret").unwrap();
    symlink(&secret, stage.source().join("link")).unwrap();
    fs::create_dir(stage.source().join("mounted")).unwrap();
    mount(Some(&secret), &stage.source().join("mounted"), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    assert_eq!(carried::mounted_below(&stage.source()).unwrap(), Some(stage.source().join("mounted")));
    let (mut source, mut replica) = stage.open();
    finish(&mut source, &mut replica);
    assert!(!stage.staging().join("mounted/s").exists());
    assert!(stage.staging().join("link").is_symlink());
    let through = CarriedTree { path: stage.source().join("link"), ..stage.tree() };
    assert!(Source::open(std::process::id(), &[through]).is_err(), "a tree that is a symlink");
    let error = Target::new(&stage.tree(), stage.source(), ID).obstacle().unwrap().unwrap().0;
    assert!(error.contains("mount point"), "{error}");
}

/// An overlay's upper directory is read directly; what is mapped through the overlay is found by its path.
#[test]
fn a_writable_layer_is_followed_through_its_overlay() {
    let stage = Stage::new();
    let at = |name: &str| stage.dir.path().join(name);
    for name in ["lower", "work", "merged"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::create_dir(at("lower/dir")).unwrap();
    fs::write(at("lower/below"), vec![1; 50_000]).unwrap();
    fs::write(at("lower/gone"), b"").unwrap();
    let show = |path: PathBuf| path.display().to_string();
    let options =
        format!("lowerdir={},upperdir={},workdir={}", show(at("lower")), show(stage.source()), show(at("work")));
    mount(Some("overlay"), &at("merged"), Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
    fs::write(at("merged/big"), vec![1; 16 << 20]).unwrap();
    let tree = CarriedTree { kind: TreeKind::WritableLayer, inside: "/".into(), path: stage.source(), bytes: 0 };
    fs::create_dir(stage.copy()).unwrap();
    let target = Target::new(&tree, stage.copy(), ID);
    target.stage().unwrap();
    let mut replica = Target::open_all(&[target], std::slice::from_ref(&tree)).unwrap();
    let mut source = Source::open(std::process::id(), &[tree]).unwrap();
    pass(&mut source, &mut replica);
    pass(&mut source, &mut replica);
    fs::remove_file(at("merged/gone")).unwrap();
    fs::remove_dir(at("merged/dir")).unwrap();
    fs::create_dir(at("merged/dir")).unwrap();
    fs::File::options().write(true).open(at("merged/below")).unwrap().write_all_at(b"x", 40_000).unwrap();
    fs::File::options().write(true).open(at("merged/big")).unwrap().write_all_at(b"x", 9 << 20).unwrap();
    let moved = finish(&mut source, &mut replica);
    assert!(moved.bytes < 200_000, "{moved:?}");
    let node = fs::symlink_metadata(stage.copy().join("gone")).unwrap();
    assert_eq!((node.mode() & libc_mask(), node.rdev()), (0o020_000, 0), "a whiteout");
    let mut opaque = [0; 8];
    let length = rustix::fs::getxattr(stage.copy().join("dir"), "trusted.overlay.opaque", &mut opaque[..]).unwrap();
    assert_eq!(&opaque[..length], b"y");
    assert_eq!(fs::read(stage.copy().join("big")).unwrap(), fs::read(stage.source().join("big")).unwrap());
    assert_eq!(fs::read(stage.copy().join("below")).unwrap(), fs::read(stage.source().join("below")).unwrap());
}

/// The bits of a mode that say what kind of file it is.
fn libc_mask() -> u32 {
    SFlag::S_IFMT.bits()
}

#[test]
fn a_directory_that_the_move_has_not_made_is_never_removed() {
    let stage = Stage::new();
    fs::create_dir(stage.staging()).unwrap();
    fs::write(stage.staging().join("f"), b"somebody's").unwrap();
    stage.target().stage().unwrap_err();
    stage.target().undo().unwrap();
    stage.target().discard().unwrap();
    assert_eq!(fs::read(stage.staging().join("f")).unwrap(), b"somebody's");
    // Nor one that another move has made.
    let other = Target::new(&stage.tree(), stage.copy(), "m-other");
    other.stage().unwrap();
    let theirs = other.staging().unwrap().to_owned();
    fs::write(theirs.join("f"), b"theirs").unwrap();
    stage.target().undo().unwrap();
    assert!(theirs.join("f").exists());
    // And a file or a link of that name is no tree.
    fs::remove_dir_all(stage.staging()).unwrap();
    symlink(&theirs, stage.staging()).unwrap();
    stage.target().undo().unwrap();
    assert!(theirs.join("f").exists());
}

#[test]
fn what_was_put_in_its_place_meanwhile_stays() {
    let stage = Stage::new();
    fs::write(stage.source().join("new"), b"1").unwrap();
    fs::create_dir(stage.copy()).unwrap();
    assert_eq!(stage.target().obstacle().unwrap(), None, "an empty directory");
    let (mut source, mut replica) = stage.open();
    finish(&mut source, &mut replica);
    fs::write(stage.copy().join("precious"), b"2").unwrap();
    stage.target().place().unwrap();
    let kept = stage.target().settle().unwrap();
    assert_eq!(kept, Some(stage.staging()));
    assert_eq!(fs::read(stage.staging().join("precious")).unwrap(), b"2");
    assert_eq!(fs::read(stage.copy().join("new")).unwrap(), b"1");
    assert!(!stage.target().is_placed(), "the mark is gone");
}

#[test]
fn a_tree_takes_no_place_that_a_symlink_leads_to() {
    let stage = Stage::new();
    let (there, elsewhere) = (stage.dir.path().join("there"), stage.dir.path().join("elsewhere"));
    let (mut source, mut replica) = stage.open();
    finish(&mut source, &mut replica);
    // Whoever may write above has another directory taken for the tree's.
    fs::rename(&there, stage.dir.path().join("moved")).unwrap();
    fs::create_dir_all(elsewhere.join("data")).unwrap();
    fs::write(elsewhere.join("data/passwd"), b"root").unwrap();
    symlink(&elsewhere, &there).unwrap();
    for refused in
        [stage.target().place(), stage.target().undo(), stage.target().settle().map(drop), stage.target().stage()]
    {
        refused.unwrap_err();
    }
    let (cause, _) = stage.target().obstacle().unwrap().unwrap();
    assert!(cause.contains("symbolic link"), "{cause}");
    assert_eq!(fs::read(elsewhere.join("data/passwd")).unwrap(), b"root");
    // A directory that is no copy is not put in place either.
    fs::remove_file(&there).unwrap();
    fs::rename(&elsewhere, &there).unwrap();
    fs::create_dir(stage.staging()).unwrap();
    stage.target().place().unwrap_err();
    assert!(there.join("data/passwd").exists());
}

#[test]
fn a_peer_gives_no_marks() {
    use tranship_storage::copy::{Name, Op, Sink, Time};
    let stage = Stage::new();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    let ino = fs::metadata(stage.source()).unwrap().ino();
    let forged = Name(b"trusted.tranship".to_vec());
    let time: Time = (1, 0);
    let xattrs = Some(vec![(forged, Name(b"keeper x".to_vec())), (Name(b"user.own".to_vec()), Name(b"1".to_vec()))]);
    let op = Op::Meta {
        ino,
        mode: 0o755,
        uid: 0,
        gid: 0,
        atime: time,
        mtime: time,
        xattrs,
        allocated: Vec::new(),
        flags: 0,
    };
    Direct { replica: &mut replica, ops: 0 }.op(&op).unwrap();
    let value = |name: &str| {
        let mut value = [0; 64];
        let length = rustix::fs::getxattr(stage.staging(), name, &mut value[..]).unwrap();
        value[..length].to_vec()
    };
    assert_eq!(value("user.own"), b"1");
    assert_eq!(value("trusted.tranship"), format!("arrived {ID}").into_bytes());
}
