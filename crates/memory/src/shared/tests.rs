//! Both sides together: what the source sends makes the same object on the other side, whatever happens in between.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;
use tranship_sys::pagemap::Pagemap;
use tranship_types::{AddressSpaceId, PAGE_SIZE, SharedKind, SharedObject};
use tranship_wire::FrameHeader;

use super::copies;
use super::source::{Look, SharedMemory, Where};
use super::target::{SharedStore, StoreError};
use crate::send::{Counters, Stream};
use crate::survey::survey;

mod resized;

/// A destination that takes what a source says.
#[derive(Default)]
struct Destination {
    store: SharedStore,
    files: Vec<(SharedObject, File)>,
}

impl Destination {
    fn describe(&mut self, objects: &[SharedObject]) {
        let files = &mut self.files;
        let kept = self.store.describe(objects, |object, file| {
            files.push((object.clone(), File::from(file.try_clone_to_owned().unwrap())));
            Ok::<_, StoreError>(())
        });
        kept.unwrap();
    }

    /// Takes what is on a stream; returns how many bytes of shared pages that were.
    fn take(&self, stream: &mut Stream<Vec<u8>>) -> u64 {
        let mut wire = Cursor::new(std::mem::take(stream.link()));
        let mut bytes = 0;
        while (wire.position() as usize) < wire.get_ref().len() {
            match tranship_wire::read_header(&mut wire).unwrap() {
                FrameHeader::Pages { space, range } => {
                    let mut pages = vec![0; range.len() as usize];
                    wire.read_exact(&mut pages).unwrap();
                    self.store.write(space, range, &pages).unwrap();
                    let (object, _) = self.files.iter().find(|(object, _)| object.space == space).unwrap();
                    bytes += if object.kind == SharedKind::Pages { 0 } else { range.len() };
                }
                FrameHeader::Zero { space, range } => {
                    self.store.zero(space, range).unwrap();
                }
                other => panic!("{other:?}"),
            }
        }
        bytes
    }

    fn content(&self, space: AddressSpaceId) -> Vec<u8> {
        let (_, file) = self.files.iter().find(|(object, _)| object.space == space).unwrap();
        read(file)
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        let _ = self.owner.kill();
        let _ = self.owner.wait();
    }
}

fn read(file: &File) -> Vec<u8> {
    let mut content = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

/// An object that another process has open, and both ends of its move.
struct Move {
    file: File,
    owner: Child,
    source: SharedMemory,
    destination: Destination,
    streams: Vec<Stream<Vec<u8>>>,
    space: AddressSpaceId,
}

impl Move {
    fn of(name: &str, size: u64) -> Self {
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap());
        file.set_len(size).unwrap();
        let mut command = Command::new("sleep");
        tranship_sys::process::with_descriptor(command.arg("60"), file.try_clone().unwrap().into(), 5);
        let owner = command.spawn().unwrap();
        let source = SharedMemory::new(true).unwrap();
        let streams = (0..2).map(|_| Stream::new(Vec::new(), None)).collect();
        let mut all =
            Self { file, owner, source, destination: Destination::default(), streams, space: AddressSpaceId(0) };
        all.find();
        let (object, _) = all.destination.files.iter().find(|(o, _)| o.name == name).unwrap();
        assert!(object.sealable && object.size == size);
        all.space = object.space;
        all
    }

    fn find(&mut self) {
        let described = self.source.find(&[self.owner.id()], Where::Everywhere).unwrap();
        self.destination.describe(&described);
    }

    fn round(&mut self) -> u64 {
        self.find();
        self.send()
    }

    fn send(&mut self) -> u64 {
        self.source.look(Look::Round).unwrap();
        self.source.send(&mut self.streams, &Counters::default()).unwrap();
        self.streams.iter_mut().map(|stream| self.destination.take(stream)).sum()
    }

    fn assert_same(&self) {
        self.destination.store.settle().unwrap();
        let (here, there) = (read(&self.file), self.destination.content(self.space));
        assert_eq!(here.len(), there.len());
        let differs = (0..here.len()).find(|i| here[*i] != there[*i]);
        assert_eq!(differs, None);
    }
}

#[derive(Debug, Clone)]
enum Deed {
    Write { at: u64, len: usize, with: u8 },
    Punch { page: u64, pages: u64 },
    Resize { size: u64 },
    Round,
}

const SIZE: u64 = 3 << 20;

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => (0..SIZE, 1usize..100_000, any::<u8>()).prop_map(|(at, len, with)| Deed::Write { at, len, with }),
        2 => (0..SIZE / PAGE_SIZE, 1u64..300).prop_map(|(page, pages)| Deed::Punch { page, pages }),
        1 => (PAGE_SIZE..SIZE).prop_map(|size| Deed::Resize { size }),
        2 => Just(Deed::Round),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_is_done_to_it_between_rounds_it_is_the_same_in_the_end(
        deeds in proptest::collection::vec(deed(), 1..24)
    ) {
        let mut all = Move::of("deeds", SIZE);
        for deed in deeds {
            match deed {
                Deed::Write { at, len, with } => all.file.write_all_at(&vec![with; len], at).unwrap(),
                Deed::Punch { page, pages } => {
                    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    let (at, len) = (page * PAGE_SIZE, pages * PAGE_SIZE);
                    fallocate(&all.file, mode, at.cast_signed(), len.cast_signed()).unwrap();
                }
                Deed::Resize { size } => all.file.set_len(size).unwrap(),
                Deed::Round => {
                    all.round();
                }
            }
        }
        all.round();
        all.assert_same();
    }
}

#[test]
fn what_has_not_changed_is_not_sent_again() {
    let mut all = Move::of("unchanged", 8 << 20);
    all.file.write_all_at(&vec![1; 5 << 20], 1 << 20).unwrap();
    assert_eq!(all.round(), 5 << 20);
    all.assert_same();
    assert_eq!(all.round(), 0);
    all.file.write_all_at(&[2], 3 << 20).unwrap();
    assert_eq!(all.round(), PAGE_SIZE);
    all.assert_same();
}

/// So long after it was used an object is known not to have been used since.
const A_WHILE: Duration = Duration::from_millis(40);
/// The same for segments.
const A_LONG_WHILE: Duration = Duration::from_millis(2050);
/// How long it may take until nothing seems to have changed.
const SETTLED: Duration = Duration::from_secs(20);

/// A process that has shared memory of its own, and does with it what it is told.
struct Keeper {
    child: Child,
    answers: BufReader<ChildStdout>,
    source: SharedMemory,
    destination: Destination,
    streams: Vec<Stream<Vec<u8>>>,
}

const KEEPER: &str = "
import mmap, os, sys
n = 2048; f = -1
if sys.argv[1:]: f = os.memfd_create('kept'); os.ftruncate(f, n * 4096)
m = mmap.mmap(f, n * 4096)
for i in range(0, n, 2): m[i * 4096] = 1 + i % 200
print('ready', flush=True)
for line in sys.stdin:
    deed, page = line.split(); at = int(page) * 4096
    if deed == 'write': m[at + 7] = (m[at + 7] + 1) % 256
    elif deed == 'fork':
        pid = os.fork()
        if pid == 0:
            m[at + 8] = (m[at + 8] + 1) % 256; os._exit(0)
        os.waitpid(pid, 0)
    elif deed == 'remove': m.madvise(mmap.MADV_REMOVE, at, 4096); m[at]
    elif deed == 'forget': m[at + 9] = (m[at + 9] + 1) % 256; m.madvise(mmap.MADV_DONTNEED, at, 4096); m[at]
    elif deed == 'put': os.pwrite(f, b'put', at)
    elif deed == 'visit':
        with mmap.mmap(f, n * 4096) as visited: visited[at + 10] = (visited[at + 10] + 1) % 256
    print('done', flush=True)
";

/// Makes, marks and ends System V segments of chosen numbers, in an IPC namespace of its own.
const SEGMENTS: &str = "
import ctypes, os, sys
c = ctypes.CDLL(None, use_errno=True); c.shmat.restype = ctypes.c_void_p
c.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]; c.shmdt.argtypes = [ctypes.c_void_p]
at = {}
print('ready', flush=True)
for line in sys.stdin:
    deed, number, *rest = line.split(); number = int(number)
    if deed == 'make':
        pages, mark = map(int, rest)
        with open('/proc/sys/kernel/shm_next_id', 'w') as f: f.write(str(number))
        assert c.shmget(0, pages * 4096, 0o600) == number
        at[number] = c.shmat(number, None, 0)
        ctypes.memset(at[number], mark, pages * 4096)
    elif deed == 'write': ctypes.memset(at[number], int(rest[0]), 4096)
    elif deed == 'open': at[number] = os.memfd_create('kept'); os.truncate(at[number], int(rest[0]))
    elif deed == 'close': os.close(at[number])
    elif deed == 'visit':
        visited = c.shmat(number, None, 0)
        ctypes.memset(visited, int(rest[0]), 4096)
        assert c.shmdt(visited) == 0
    else:
        assert c.shmdt(at[number]) == 0
        if deed == 'end': assert c.shmctl(number, 0, None) == 0
    print('done', flush=True)
";

/// Maps 16 pages of a file privately, at a place of its choice, and writes to them.
const FILES: &str = "
import ctypes, mmap, sys
c = ctypes.CDLL(None, use_errno=True); c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
with open(sys.argv[1], 'rb') as f: at = c.mmap(0x200000000000, 16 * 4096, 3, mmap.MAP_PRIVATE | 0x10, f.fileno(), 0)
assert at == 0x200000000000
print('ready', flush=True)
for line in sys.stdin:
    deed, page, *rest = line.split(); page = at + int(page) * 4096
    if deed == 'write': ctypes.memset(page, int(rest[0]), 4096)
    elif deed == 'forget': assert c.madvise(page, 4096, mmap.MADV_DONTNEED) == 0
    elif deed == 'protect': assert c.mprotect(page, 4096, int(rest[0])) == 0
    print('done', flush=True)
";

impl Keeper {
    fn start() -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", KEEPER]);
        Self::of(command)
    }

    /// One whose memory is a memfd, which it has open.
    fn with_open() -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", KEEPER, "open"]);
        Self::of(command)
    }

    fn with_segments() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--ipc", "python3", "-c", SEGMENTS]);
        Self::of(command)
    }

    /// Two of them have the same addresses.
    fn with_file(path: &std::path::Path) -> Self {
        let mut command = Command::new("setarch");
        command.args(["-R", "python3", "-c", FILES]).arg(path);
        Self::of(command)
    }

    /// What is in the mapping of the file.
    fn mapped(&self) -> Vec<u8> {
        let mut content = vec![0; 16 * 4096];
        let memory = File::open(format!("/proc/{}/mem", self.child.id())).unwrap();
        memory.read_exact_at(&mut content, 0x2000_0000_0000).unwrap();
        content
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let streams = (0..2).map(|_| Stream::new(Vec::new(), None)).collect();
        let (source, destination) = (SharedMemory::new(true).unwrap(), Destination::default());
        let mut keeper = Self { child, answers, source, destination, streams };
        keeper.hear("ready");
        keeper
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn does(&mut self, deed: &str, page: u64) {
        self.obeys(&format!("{deed} {page}"));
    }

    fn obeys(&mut self, order: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.hear("done");
    }

    /// What criu is given for the segment with this number. Nothing: it is left to criu.
    fn given(&self, number: u32) -> Vec<u8> {
        self.destination.store.settle().unwrap();
        let last = self.destination.files.iter().rev().find(|(object, _)| object.key == number);
        last.map(|(_, file)| read(file)).unwrap_or_default()
    }

    /// The number of the only file.
    fn number_of_file(&self) -> u32 {
        let file = self.destination.files.iter().find(|(object, _)| object.kind == SharedKind::File);
        file.expect("the file was not found").0.key
    }

    /// Bytes of pages that were files', which are all compared at each look.
    fn copied(&self) -> u64 {
        let mut bytes = 0;
        let mut pagemap = Pagemap::open(self.child.id()).unwrap();
        for range in survey(&[self.child.id()]).unwrap().iter().flat_map(|space| &space.files) {
            pagemap.copied(range.start, range.end, |start, end| bytes += end - start).unwrap();
        }
        bytes
    }

    /// Bytes of shared memory that were compared and that were sent.
    fn round(&mut self, look: Look) -> (u64, u64) {
        let described = self.source.find(&[self.child.id()], Where::Everywhere).unwrap();
        self.destination.describe(&described);
        self.source.look(look).unwrap();
        let counters = Counters::default();
        self.source.send(&mut self.streams, &counters).unwrap();
        let taken = self.streams.iter_mut().map(|stream| self.destination.take(stream)).sum();
        (counters.read.load(Ordering::Relaxed) - self.copied(), taken)
    }

    fn assert_same(&self) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        let is_object = |line: &&str| line.contains("/dev/zero") || line.contains("/memfd:kept");
        let line = maps.lines().find(is_object).unwrap();
        let range = line.split(' ').next().unwrap();
        let here = read(&File::open(format!("/proc/{}/map_files/{range}", self.child.id())).unwrap());
        let (object, _) = self.destination.files.iter().find(|(o, _)| o.kind != SharedKind::Pages).unwrap();
        let there = self.destination.content(object.space);
        assert_eq!(here.len(), there.len());
        let differs = (0..here.len()).find(|i| here[*i] != there[*i]);
        assert_eq!(differs.map(|at| at as u64 / PAGE_SIZE), None);
    }

    /// Rounds until nothing has changed, nor seems to have.
    fn settle(&mut self) {
        let deadline = Instant::now() + SETTLED;
        self.round(Look::Round);
        loop {
            std::thread::sleep(A_WHILE);
            let last = self.round(Look::Round);
            if last == (0, 0) {
                return;
            }
            assert!(Instant::now() < deadline, "a round still compares and sends {last:?} bytes");
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_segment_that_has_the_number_of_an_older_one_is_told_from_it() {
    // The first segment of a namespace has the number 0.
    for number in [0, 7] {
        let mut keeper = Keeper::with_segments();
        keeper.obeys(&format!("make {number} 8 1"));
        keeper.round(Look::Round);
        assert!(keeper.given(number) == [1; 8 * 4096]);
        keeper.does("end", number.into());
        keeper.obeys(&format!("make {number} 16 2"));
        keeper.round(Look::Last);
        assert!(keeper.given(number) == [2; 16 * 4096]);
    }
}

#[test]
fn a_segment_that_has_the_number_of_a_file_that_is_gone_is_told_from_it() {
    let mut keeper = Keeper::with_segments();
    keeper.obeys("open 0 32768");
    keeper.round(Look::Round);
    let number = keeper.number_of_file();
    keeper.obeys("close 0");
    keeper.obeys(&format!("make {number} 16 2"));
    keeper.round(Look::Last);
    assert!(keeper.given(number) == [2; 16 * 4096]);
}

#[test]
fn a_segment_and_a_file_of_the_same_number_are_refused() {
    // The second one is left to criu.
    for length in [8 * 4096, 5000] {
        let mut keeper = Keeper::with_segments();
        keeper.obeys(&format!("open 0 {length}"));
        keeper.round(Look::Round);
        let inode = std::fs::metadata(format!("/proc/{}/fd/3", keeper.child.id())).unwrap().ino();
        keeper.obeys(&format!("make {inode} 16 2"));
        // Also where no descriptors are looked at any more.
        for places in [Where::Mappings, Where::Everywhere] {
            let error = keeper.source.find(&[keeper.child.id()], places).unwrap_err();
            assert!(error.to_string().contains("the same number"), "{error}");
        }
        keeper.obeys("close 0");
        keeper.source.find(&[keeper.child.id()], Where::Everywhere).unwrap();
    }
}

#[test]
fn a_segment_that_nobody_has_attached_at_the_end_is_left_to_criu() {
    let mut keeper = Keeper::with_segments();
    keeper.obeys("make 7 8 1");
    keeper.round(Look::Round);
    keeper.does("detach", 7);
    keeper.round(Look::Last);
    assert!(keeper.source.hidden().is_empty());
    assert!(keeper.given(7).is_empty());
}

#[test]
fn pages_of_a_file_that_were_written_become_another_process_s() {
    let path = std::env::temp_dir().join(format!("tranship-pages-{}", std::process::id()));
    std::fs::write(&path, [1; 16 * 4096]).unwrap();
    let (mut keeper, mut twin) = (Keeper::with_file(&path), Keeper::with_file(&path));
    std::fs::remove_file(&path).unwrap();
    // Zeros are content here; and what can only be read was written before.
    for order in ["write 1 7", "write 2 0", "write 5 9", "write 9 4", "protect 9 1", "write 12 3", "protect 12 0"] {
        keeper.obeys(order);
    }
    twin.obeys("protect 9 1");
    keeper.round(Look::Round);
    for order in ["forget 5", "write 6 3", "write 1 8", "forget 2", "write 2 0"] {
        keeper.obeys(order);
    }
    keeper.round(Look::Last);
    assert_eq!(keeper.source.hidden_ranges().next().map(|(pid, _)| pid), Some(keeper.child.id()));
    keeper.destination.store.settle().unwrap();
    let pages = |(object, _): &&(SharedObject, File)| object.kind == SharedKind::Pages;
    let (_, file) = keeper.destination.files.iter().find(pages).unwrap();
    assert!(copies::place(file, twin.child.id()).unwrap() > 5 * PAGE_SIZE);
    let (here, there) = (keeper.mapped(), twin.mapped());
    let marks: Vec<u8> = there.chunks(4096).map(|page| page[0]).collect();
    assert_eq!(marks, [1, 8, 0, 1, 1, 1, 3, 1, 1, 4, 1, 1, 3, 1, 1, 1]);
    assert!(here == there);
}

#[test]
fn only_what_was_written_through_mappings_is_looked_at() {
    let mut keeper = Keeper::start();
    assert_eq!(keeper.round(Look::Round).1, 1024 * PAGE_SIZE);
    keeper.settle();
    keeper.does("write", 4);
    keeper.does("write", 1001);
    assert_eq!(keeper.round(Look::Round), (2 * PAGE_SIZE, 2 * PAGE_SIZE));
    keeper.does("write", 1001);
    assert_eq!(keeper.round(Look::Last), (PAGE_SIZE, PAGE_SIZE));
    keeper.assert_same();
}

#[test]
fn what_page_tables_do_not_tell_of_is_found_all_the_same() {
    let mut keeper = Keeper::start();
    for deed in ["fork", "remove", "forget"] {
        keeper.settle();
        keeper.does(deed, 10);
        let (compared, _) = keeper.round(Look::Last);
        assert!(compared >= 8 << 20, "after {deed} only {compared} bytes were compared");
        keeper.assert_same();
    }
}

#[test]
fn what_is_open_is_looked_at_when_it_was_used() {
    let mut keeper = Keeper::with_open();
    for deed in ["write", "put", "visit", "fork", "remove"] {
        keeper.settle();
        keeper.does(deed, 10);
        let (compared, _) = keeper.round(Look::Last);
        assert!(compared >= 4 << 20, "after {deed} only {compared} bytes were compared");
        keeper.assert_same();
        keeper.round(Look::Round);
    }
}

#[test]
fn only_what_was_written_is_looked_at_of_a_segment() {
    let mut keeper = Keeper::with_segments();
    keeper.obeys("make 7 16 1");
    std::thread::sleep(A_LONG_WHILE);
    keeper.round(Look::Round);
    keeper.round(Look::Round);
    keeper.obeys("write 7 2");
    assert_eq!(keeper.round(Look::Round), (PAGE_SIZE, PAGE_SIZE));
    keeper.obeys("visit 7 3");
    assert_eq!(keeper.round(Look::Last), (16 * PAGE_SIZE, PAGE_SIZE));
    assert_eq!(keeper.given(7)[..8192], [[3; 4096], [1; 4096]].concat());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn whatever_a_process_does_to_its_shared_memory_it_is_the_same_in_the_end(
        open in any::<bool>(), deeds in proptest::collection::vec((0usize..8, 0u64..2048), 1..80)
    ) {
        let mut keeper = if open { Keeper::with_open() } else { Keeper::start() };
        keeper.settle();
        let of_open = if open { ["put", "visit"] } else { ["write"; 2] };
        for (deed, page) in deeds {
            match ["write", "fork", "remove", "forget", "write"].iter().chain(&of_open).nth(deed) {
                Some(deed) => keeper.does(deed, page),
                None => {
                    keeper.round(Look::Round);
                }
            }
        }
        keeper.round(Look::Last);
        keeper.assert_same();
    }
}

#[test]
fn an_object_that_grows_after_its_length_was_told_is_whole_in_the_end() {
    let mut all = Move::of("grows", 16 * PAGE_SIZE);
    all.file.write_all_at(&vec![1; 16 * PAGE_SIZE as usize], 0).unwrap();
    all.round();
    all.file.set_len(8 * PAGE_SIZE).unwrap();
    all.find();
    all.file.set_len(16 * PAGE_SIZE).unwrap();
    all.file.write_all_at(&[2], 12 * PAGE_SIZE).unwrap();
    all.send();
    all.round();
    all.assert_same();
}
