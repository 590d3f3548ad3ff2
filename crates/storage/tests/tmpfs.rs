//! A tmpfs that is changed at random is copied, pass by pass, and the copy is compared. Needs root.

mod playground;

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use playground::{Chance, Direct, picture};
use tempfile::TempDir;
use tranship_storage::copy::{GRAIN, Moved, Replica};
use tranship_storage::tmpfs::{self, Source, TmpfsMount};
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
        // A test that looks at what is there changes nothing by it.
        mount(Some("orig"), &source, Some("tmpfs"), MsFlags::MS_NOATIME, Some(options)).unwrap();
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

const NOBODY: &[u32] = &[];

fn pass(source: &mut Source, replica: &mut Replica) -> (Moved, usize) {
    let mut sink = Direct { replica, ops: 0 };
    let moved = source.pass(NOBODY, &mut sink).unwrap();
    (moved, sink.ops)
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

    let decision = source.decide(NOBODY, NOBODY).unwrap();
    assert_eq!(decision.external.len(), 1, "{decision:?}");
    fs::write(at("late"), vec![7; 100_000]).unwrap();
    source.finish(&mut Direct { replica: &mut replica, ops: 0 }).unwrap();
    assert_same(&stage, "last pass");
    let limit = nix::sys::statvfs::statvfs(&stage.copy()).unwrap();
    assert_eq!(limit.blocks() * limit.fragment_size(), 64 << 20, "the copy has the original's size");
}

#[test]
fn a_last_page_that_became_a_hole_needs_no_memory() {
    let stage = Stage::new("mode=755");
    let path = stage.source().join("file");
    fs::write(&path, vec![1; 21_000]).unwrap();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    let file = fs::File::options().write(true).open(&path).unwrap();
    for length in [20_480, 4_096] {
        file.set_len(length).unwrap();
        file.set_len(21_000).unwrap();
        pass(&mut source, &mut replica);
        assert_same(&stage, &format!("cut to {length} for a moment"));
    }
}

#[test]
fn blocks_without_content_and_flags_are_copied() {
    use nix::fcntl::{FallocateFlags, fallocate};
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let stage = Stage::new("size=16m,mode=755");
    let file = |name: &str| {
        fs::File::options().create(true).write(true).truncate(false).open(stage.source().join(name)).unwrap()
    };
    let reserve = |name: &str, flags, offset, length| fallocate(file(name), flags, offset, length).unwrap();
    reserve("grown", FallocateFlags::empty(), 0, 1 << 20);
    reserve("beyond", FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1 << 20);
    file("between").write_all_at(b"content", 100_000).unwrap();
    reserve("between", FallocateFlags::empty(), 0, 300_000);
    file("log").write_all_at(b"first\n", 0).unwrap();
    let blocks = |directory: PathBuf, name: &str| fs::metadata(directory.join(name)).unwrap().blocks();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    ioctl_setflags(file("log"), IFlags::APPEND).unwrap();
    reserve("beyond", FallocateFlags::FALLOC_FL_KEEP_SIZE, 1 << 20, 1 << 20);
    source.decide(&[], &[]).unwrap();
    source.finish(&mut Direct { replica: &mut replica, ops: 0 }).unwrap();
    assert_same(&stage, "with blocks");
    for (name, size) in [("grown", 1 << 20), ("beyond", 2 << 20), ("between", 303_104)] {
        assert_eq!(blocks(stage.source(), name) * 512, size, "{name}");
        assert_eq!(blocks(stage.copy(), name) * 512, size, "{name}");
    }
    let flags = || ioctl_getflags(fs::File::open(stage.copy().join("log")).unwrap()).unwrap();
    assert!(!flags().contains(IFlags::APPEND));
    replica.set_flags().unwrap();
    assert!(flags().contains(IFlags::APPEND));
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
    std::thread::sleep(2 * GRAIN);
    pass(&mut source, &mut replica);
    std::thread::sleep(2 * GRAIN);
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
    assert_eq!((moved.files, moved.bytes), (1, 4 << 10), "one page of the mapped file");
    assert_same(&stage, "while it is mapped");
    io::Write::write_all(&mut input, b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    let (moved, _) = pass(&mut source, &mut replica);
    assert_eq!((moved.files, moved.bytes), (1, 4 << 10), "the process is gone, and its write is not");
    assert_same(&stage, "after it was mapped");
}

/// Bytes that this thread has read.
fn read_so_far() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_file_that_is_only_open_is_not_read_again() {
    const LENGTH: u64 = 32 << 20;
    if let Err(error) = tranship_sys::mapping_log::MappingLog::start() {
        return eprintln!("skipped: this kernel does not tell of mappings: {error}");
    }
    let stage = Stage::new("mode=755");
    fs::write(stage.source().join("open"), vec![1; LENGTH as usize]).unwrap();
    let (mut source, mut replica) = stage.open();
    pass(&mut source, &mut replica);
    std::thread::sleep(2 * GRAIN);
    let file = fs::File::options().read(true).write(true).open(stage.source().join("open")).unwrap();
    let own = [std::process::id()];
    let mut again = |source: &mut Source| {
        let before = read_so_far();
        let moved = source.pass(&own, &mut Direct { replica: &mut replica, ops: 0 }).unwrap();
        (moved.bytes, read_so_far() - before)
    };
    again(&mut source);
    let (moved, read) = again(&mut source);
    assert!(moved == 0 && read < LENGTH / 8, "{read} bytes read");
    // A write is seen all the same, and so is a mapping, whether anything was written or not.
    file.write_all_at(b"x", 5).unwrap();
    assert_eq!(again(&mut source).0, 4 << 10);
    std::thread::sleep(2 * GRAIN);
    again(&mut source);
    let map = "import mmap, sys; f = open(sys.argv[1], 'r+b'); mmap.mmap(f.fileno(), 0)[9 << 20] = 7";
    let path = stage.source().join("open");
    assert!(std::process::Command::new("python3").args(["-c", map]).arg(path).status().unwrap().success());
    let (moved, read) = again(&mut source);
    assert!(moved == 4 << 10 && read >= LENGTH, "{moved} bytes moved, {read} bytes read");
}

/// A process in a mount namespace of its own, which changes a file of 32 MiB when it is told to, and has threads once it is told so.
struct Scribe {
    process: std::process::Child,
    answers: io::BufReader<std::process::ChildStdout>,
}

impl Scribe {
    const LENGTH: u64 = 32 << 20;
    const CODE: &str = "
import ctypes, mmap, os, random, sys
path, threads = sys.argv[1], []
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b'x' * LENGTH, 0)
def write_there(chance, slot, length):
    for _ in range(10): os.pwrite(slot, bytes([chance.randrange(256)]) * length, chance.randrange(LENGTH - length))
def race(seed):
    import threading
    other, slot, chance = os.open(path + '.other', os.O_RDWR | os.O_CREAT), os.dup(fd), random.Random(seed)
    os.ftruncate(other, LENGTH)
    writers = [threading.Thread(target=write_there, args=(chance, slot, 100000)) for _ in range(2)]
    for writer in writers: writer.start()
    while any(writer.is_alive() for writer in writers): os.dup2(chance.choice((fd, other)), slot)
    for file in (slot, other): os.close(file)
def fallocate(mode, start, length):
    ctypes.CDLL(None).fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(length))
def at_random(chance):
    start, data = chance.randrange(LENGTH), bytes([chance.randrange(256)]) * chance.randrange(1, 40000)
    kind = chance.randrange(40)
    if kind == 0: os.ftruncate(fd, start)
    elif kind == 1: fallocate(3, start, len(data))
    elif kind == 2: fallocate(0x10, start, len(data))
    elif kind == 3: os.truncate(path, start)
    elif kind == 4: os.close(os.open(path, os.O_RDWR | os.O_TRUNC))
    elif kind == 5:
        with open(path, 'r+b') as file:
            os.ftruncate(fd, max(start + 1, os.fstat(fd).st_size))
            mmap.mmap(file.fileno(), 0)[start] = 7
    elif kind < 12:
        with open(path, 'ab') as file: file.write(data)
    elif kind < 20: os.lseek(fd, start, 0); os.write(fd, data)
    elif kind < 24: os.pwritev(fd, [data, b'end'], start)
    else: os.pwrite(fd, data, start)
def serve(word):
    kind, *numbers = word.split()
    if kind == 'path': os.pwrite(fd, b'z' * 10, 7000); os.truncate(path, LENGTH)
    elif kind == 'at': os.pwrite(fd, b'y' * 10, int(numbers[0]))
    elif kind == 'fill': os.pwrite(fd, b'x' * LENGTH, 0)
    elif kind == 'random':
        chance = random.Random(int(numbers[0]))
        for _ in range(chance.randrange(1, int(numbers[1]))): at_random(chance)
    elif kind == 'race': race(int(numbers[0]))
    elif kind == 'thread':
        import threading
        written, gate = threading.Event(), threading.Event()
        write = lambda: (os.pwrite(fd, b'z' * 10, int(numbers[0])), written.set(), gate.wait())
        thread = threading.Thread(target=write)
        thread.start(); threads.append((thread, gate)); written.wait()
print('ready', flush=True)
for word in sys.stdin:
    serve(word)
    print('done', flush=True)
for thread, gate in threads: gate.set()
";

    fn start(stage: &mut Stage) -> Self {
        use std::io::BufRead;
        use std::process::{Command, Stdio};
        let code = Self::CODE.replace("LENGTH", &Self::LENGTH.to_string());
        let mut process = Command::new("unshare")
            .args(["--mount", "--propagation", "unchanged", "python3", "-c", &code])
            .arg(stage.source().join("file"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = io::BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let all = tmpfs::find(process.id(), &[]).unwrap();
        stage.found = all.into_iter().find(|m| Path::new(&m.point) == stage.source()).expect("the mount is found");
        Self { process, answers }
    }

    fn open(&self, stage: &Stage) -> (Source, Replica) {
        let replica = tmpfs::make(&stage.dir.path().join("copies"), std::slice::from_ref(&stage.found)).unwrap();
        (Source::open(self.process.id(), std::slice::from_ref(&stage.found)), replica)
    }

    fn tell(&mut self, what: &str) {
        use std::io::{BufRead, Write};
        writeln!(self.process.stdin.as_mut().unwrap(), "{what}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n", "{what}");
    }

    /// Bytes that a pass has moved, and those that it has read.
    fn pass(&self, source: &mut Source, replica: &mut Replica) -> (u64, u64) {
        let before = read_so_far();
        let moved = source.pass(&[self.process.id()], &mut Direct { replica, ops: 0 }).unwrap();
        (moved.bytes, read_so_far() - before)
    }
}

impl Drop for Scribe {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn calls_are_told() -> bool {
    let log = tranship_sys::call_log::CallLog::start(1);
    log.inspect_err(|error| eprintln!("skipped: this kernel does not tell what calls write: {error}")).is_ok()
}

#[test]
fn of_a_file_that_calls_write_only_those_parts_are_read() {
    if !calls_are_told() {
        return;
    }
    let mut stage = Stage::new("mode=755");
    let mut scribe = Scribe::start(&mut stage);
    let (mut source, mut replica) = scribe.open(&stage);
    assert_eq!(scribe.pass(&mut source, &mut replica).0, Scribe::LENGTH);
    for n in 0..5 {
        scribe.tell(&format!("at {}", (n << 20) + 4090));
        let (moved, read) = scribe.pass(&mut source, &mut replica);
        assert_eq!(moved, 8 << 10, "{n}: two pages");
        assert!(read < 1 << 20, "{n}: {read} bytes read");
    }
    assert_same(&stage, "parts");
    for place in [5000, 6 << 20] {
        scribe.tell(&format!("thread {place}"));
        let (moved, read) = scribe.pass(&mut source, &mut replica);
        assert!(moved == 4 << 10 && read < 1 << 20, "{moved} bytes moved, {read} read");
    }
    assert_same(&stage, "a thread");
    // What is done to a path, nobody knows for sure, so that all is compared.
    scribe.tell("path");
    let (moved, read) = scribe.pass(&mut source, &mut replica);
    assert!(moved == 4 << 10 && read >= Scribe::LENGTH, "{moved} bytes moved, {read} read");
    assert_same(&stage, "a path");
    drop(scribe);
}

/// Overwrites a page of a file for each line that it reads, in a way of which fanotify has no events (io_submit(2)).
const STRANGER: &str = "
import ctypes, os, struct, sys
libc, fd, context = ctypes.CDLL(None), os.open(sys.argv[1], os.O_WRONLY), ctypes.c_ulong()
assert libc.syscall(206, 1, ctypes.byref(context)) == 0
for line in sys.stdin:
    page, place = ctypes.create_string_buffer(b'w' * 4096, 4096), int(line)
    fields = (0, 0, 0, 1, 0, fd, ctypes.addressof(page), 4096, place, 0, 0, 0)
    order = ctypes.create_string_buffer(struct.pack('<QIIHhIQQqQII', *fields))
    assert libc.syscall(209, context, ctypes.c_long(1), (ctypes.c_void_p * 1)(ctypes.addressof(order))) == 1
    print('done', flush=True)
";

#[test]
fn what_is_written_from_elsewhere_without_an_event_is_found() {
    use std::io::{BufRead, Write};
    use std::process::{Command, Stdio};
    if !calls_are_told() {
        return;
    }
    let mut stage = Stage::new("mode=755");
    let scribe = Scribe::start(&mut stage);
    let (mut source, mut replica) = scribe.open(&stage);
    for _ in 0..2 {
        pass(&mut source, &mut replica);
        std::thread::sleep(2 * GRAIN);
    }
    // In this mount namespace, which is not the scribe's.
    let mut command = Command::new("python3");
    command.args(["-c", STRANGER]).arg(stage.source().join("file")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut stranger = command.spawn().unwrap();
    let (mut orders, answers) = (stranger.stdin.take().unwrap(), io::BufReader::new(stranger.stdout.take().unwrap()));
    let mut answers = answers.lines();
    for place in [5 << 12, 9 << 20] {
        writeln!(orders, "{place}").unwrap();
        assert_eq!(answers.next().unwrap().unwrap(), "done");
        assert_eq!(pass(&mut source, &mut replica).0.bytes, 4 << 10);
        assert_same(&stage, "written from elsewhere");
    }
    drop(orders);
    assert!(stranger.wait().unwrap().success());
    drop(scribe);
}

#[test]
fn a_file_that_is_only_read_from_elsewhere_is_not_compared() {
    if !calls_are_told() {
        return;
    }
    let mut stage = Stage::new("mode=755");
    let relatime = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RELATIME;
    mount(None::<&str>, &stage.source(), None::<&str>, relatime, None::<&str>).unwrap();
    let mut scribe = Scribe::start(&mut stage);
    let (mut source, mut replica) = scribe.open(&stage);
    std::thread::sleep(2 * GRAIN);
    scribe.pass(&mut source, &mut replica);
    let file = stage.source().join("file");
    let accessed = || fs::metadata(&file).unwrap().accessed().unwrap();
    let before = accessed();
    fs::read(&file).unwrap();
    assert_ne!(accessed(), before, "it is told of");
    for pages in [0, 0, 2] {
        if pages > 0 {
            scribe.tell("at 4090");
        }
        let (moved, read) = scribe.pass(&mut source, &mut replica);
        assert!(moved == pages << 12 && read < 1 << 20, "{moved} bytes moved, {read} read");
    }
    drop(scribe);
}

/// Has the scribe write what it draws by chance, pass after pass. Returns of how many passes only parts of its file were read; `None` where
/// this kernel does not tell of calls.
fn follow_at_random(passes: u64, what: impl Fn(u64) -> String) -> Option<u64> {
    if !calls_are_told() {
        return None;
    }
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("SEED={seed}");
    let mut stage = Stage::new("mode=755,size=128m");
    let mut scribe = Scribe::start(&mut stage);
    let (mut source, mut replica) = scribe.open(&stage);
    scribe.pass(&mut source, &mut replica);
    let mut in_parts = 0;
    for n in 0..passes {
        if n % 4 == 0 {
            scribe.tell("fill");
            scribe.pass(&mut source, &mut replica);
        }
        scribe.tell(&what(seed + n));
        let data = fs::metadata(stage.source().join("file")).unwrap().blocks() * 512;
        let (_, read) = scribe.pass(&mut source, &mut replica);
        in_parts += u64::from(read < data / 4);
        assert_same(&stage, &format!("seed {seed} pass {n}"));
    }
    drop(scribe);
    Some(in_parts)
}

#[test]
fn what_calls_write_at_random_is_followed() {
    let Some(in_parts) = follow_at_random(60, |seed| format!("random {seed} 6")) else { return };
    // How many they are is a matter of the seed.
    assert!(in_parts >= 10, "{in_parts} of 60 passes read parts alone");
}

#[test]
fn what_threads_write_while_others_change_descriptors_is_followed() {
    follow_at_random(40, |seed| format!("race {seed}"));
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
        assert_eq!(source.decide(NOBODY, NOBODY).unwrap().external.len(), 1);
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
    source.decide(NOBODY, NOBODY).unwrap();
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
