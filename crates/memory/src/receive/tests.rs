use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use proptest::prelude::*;
use tranship_sys::promise::promised;
use tranship_types::SharedKind;
use tranship_wire::WireError;
use tranship_wire::packed::Packer;

use super::*;
use crate::deduplicate::Deduplicator;
use crate::send::{Chunk, Counters, Stream, Version, send};
use crate::survey::Space;

const SPACE: AddressSpaceId = AddressSpaceId(1);
const AT: u64 = 0x7000_0000;

/// Runs `test` with a store of 1 MiB and the pager that it needs.
fn with_store(name: &str, test: impl FnOnce(&Store)) {
    let directory = std::env::temp_dir().join(format!("tranship-receive-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| crate::pager::run(&directory, &directory).unwrap());
        let store = Store::new(1 << 20, connect(&directory)).unwrap();
        let _pager = Ending(&directory);
        test(&store);
    });
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Ends the pager, also when the test panics: it would be waited for, for ever.
struct Ending<'a>(&'a Path);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let ended = PagerHandle::connect(self.0).and_then(|pager| pager.quit());
        assert!(ended.is_ok() || std::thread::panicking(), "{ended:?}");
    }
}

fn connect(directory: &Path) -> PagerHandle {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match PagerHandle::connect(directory) {
            Ok(handle) => return handle,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

fn write(wire: &mut Vec<u8>, codec: Codec, pages: &[u8]) {
    let mut packer = Packer::new().unwrap();
    let packed = packer.pack(codec, pages).unwrap();
    tranship_wire::write_packed(wire, SPACE, (AT, (pages.len() as u64 / PAGE_SIZE) as u32), codec, packed).unwrap();
}

/// What the store has at `AT`.
fn content(store: &Store, length: usize) -> Vec<u8> {
    content_of(store, SPACE, PageRange { start: AT, end: AT + length as u64 })
}

/// What it has of a task; where it has nothing, zeros.
fn content_of(store: &Store, space: AddressSpaceId, range: PageRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len() as usize];
    let file = std::fs::File::from(store.arena.file().try_clone_to_owned().unwrap());
    for extent in store.held().get(&space).map(|held| held.places.within(range)).unwrap_or_default() {
        let start = (extent.range.start - range.start) as usize;
        let piece = &mut bytes[start..start + extent.range.len() as usize];
        file.read_exact_at(piece, extent.offset).unwrap();
    }
    bytes
}

#[test]
fn compressed_pages_are_stored_as_they_were_and_newer_ones_take_their_place() {
    with_store("packed", |store| {
        let versions = [3u8, 7].map(|seed| (0..32768u32).map(|i| (i / 5) as u8 ^ seed).collect::<Vec<_>>());
        let mut wire = Vec::new();
        write(&mut wire, Codec::Lz4, &versions[0]);
        let first = wire.len();
        write(&mut wire, Codec::Zstd, &versions[1]);
        tranship_wire::write_end(&mut wire, 2 * 32768).unwrap();
        assert!(matches!(
            store.receive(&mut &wire[..first], Carries::Versions, || ()),
            Err(ReceiveError::Receive(ReadError::Closed))
        ));
        assert_eq!(content(store, 32768), versions[0]);
        store.receive(&mut wire.as_slice(), Carries::Versions, || ()).unwrap();
        assert_eq!(content(store, 32768), versions[1]);
    });
}

#[test]
fn compressed_pages_that_are_not_what_they_say_leave_older_ones_as_they_are() {
    with_store("hostile", |store| {
        let pages = vec![5u8; 8192];
        for codec in Codec::ALL {
            let mut wire = Vec::new();
            write(&mut wire, codec, &pages);
            let good = wire.len();
            // As many bytes as before, which are said to be one page more; and then noise.
            write(&mut wire, codec, &pages);
            wire[good + 20] += 1;
            let refused = store.receive(&mut wire.as_slice(), Carries::Versions, || ()).unwrap_err();
            assert!(
                matches!(refused, ReceiveError::Receive(ReadError::Wire(WireError::Packed { .. }))),
                "{codec}: {refused}"
            );
            wire.truncate(good);
            write(&mut wire, codec, &pages);
            wire[good + tranship_wire::HEADER_LEN..].fill(0xff);
            assert!(store.receive(&mut wire.as_slice(), Carries::Versions, || ()).is_err(), "{codec}");
            assert_eq!(content(store, pages.len()), pages);
        }
    });
}

const OTHER: AddressSpaceId = AddressSpaceId(2);

fn same(wire: &mut Vec<u8>, space: AddressSpaceId, page: u64, pages: u32, other: AddressSpaceId) {
    tranship_wire::write_same(wire, space, (AT + page * PAGE_SIZE, pages), other).unwrap();
}

#[test]
fn references_to_pages_that_never_came_or_are_zeros_are_refused() {
    with_store("never-came", |store| {
        let mut wire = Vec::new();
        tranship_wire::write_pages(&mut wire, SPACE, AT, &[7; 8192]).unwrap();
        let good = wire.len();
        let mut refuse = |say: &dyn Fn(&mut Vec<u8>)| {
            wire.truncate(good);
            say(&mut wire);
            let refused = store.receive(&mut wire.as_slice(), Carries::Versions, || ()).unwrap_err();
            assert!(matches!(refused, ReceiveError::NeverCame { .. }), "{refused}");
        };
        refuse(&|wire| same(wire, OTHER, 1, 2, SPACE));
        refuse(&|wire| same(wire, OTHER, 0, 1, AddressSpaceId(3)));
        refuse(&|wire| {
            tranship_wire::write_zero(wire, SPACE, AT, 1).unwrap();
            same(wire, OTHER, 0, 2, SPACE);
        });
        assert!(!store.held().contains_key(&OTHER));
    });
}

#[test]
fn references_are_refused_once_all_is_named() {
    with_store("named", |store| {
        let mut wire = Vec::new();
        tranship_wire::write_pages(&mut wire, SPACE, AT, &[7; 4096]).unwrap();
        tranship_wire::write_header(&mut wire, &FrameHeader::Named).unwrap();
        same(&mut wire, OTHER, 0, 1, SPACE);
        let refused = store.receive(&mut wire.as_slice(), Carries::Versions, || ()).unwrap_err();
        let expected = matches!(refused, ReceiveError::Receive(ReadError::Unexpected { found: Kind::Same, .. }));
        assert!(expected, "{refused}");
    });
}

/// Which task is sent next, from which page on, and the content that its pages have then.
fn versions() -> impl Strategy<Value = Vec<(usize, usize, Vec<u8>)>> {
    let content = prop::collection::vec(prop_oneof![1 => Just(0u8), 4 => 1u8..4], 1..12);
    prop::collection::vec((0..3usize, 0..20usize, content), 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Pages of tasks that have much in common arrive as they were when they were read, however often they change, in
    /// fewer bytes.
    #[test]
    fn what_is_deduplicated_arrives_as_it_was(versions in versions()) {
        const PAGES: usize = 32;
        let size = PAGE_SIZE as usize;
        let mut memory = vec![1u8; (PAGES + 1) * size];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
        let skip = (start - memory.as_ptr() as u64) as usize;
        let tasks = [1, 2, 3].map(AddressSpaceId);
        let tally = Arc::default();
        let stream = || Stream::new(Vec::new(), None).deduplicate(Deduplicator::new(Arc::clone(&tally)));
        let mut streams = [stream(), stream()];
        let chunks = |task: AddressSpaceId, first: usize, count: usize| {
            let (id, pid) = (task, std::process::id());
            let space = Space { id, pid, ranges: Vec::new(), executable: Vec::new(), files: Vec::new(), huge: Vec::new() };
            let first = start + first as u64 * PAGE_SIZE;
            let mut chunks = Vec::new();
            Chunk::cut(&space, PageRange { start: first, end: first + count as u64 * PAGE_SIZE }, &mut chunks);
            chunks
        };
        let counters = Counters::default();
        let all = tasks.map(|task| chunks(task, 0, PAGES)).concat();
        send(&all, Version::First, &mut streams, &counters).unwrap();
        prop_assert_eq!(counters.sent.load(Ordering::Relaxed), (PAGES * size) as u64);
        prop_assert_eq!(tally.deduplicated(), (2 * PAGES * size) as u64);
        let mut model = [[1u8; PAGES]; 3];
        for (task, first, content) in &versions {
            for (page, byte) in (*first..).zip(content) {
                memory[skip + page * size..skip + (page + 1) * size].fill(*byte);
                model[*task][page] = *byte;
            }
            let chunks = chunks(tasks[*task], *first, content.len());
            send(&chunks, Version::Later, &mut streams, &counters).unwrap();
        }
        with_store("deduplicated", |store| {
            for stream in &mut streams {
                let ended = store.receive(&mut stream.link().as_slice(), Carries::Versions, || ());
                assert!(matches!(ended, Err(ReceiveError::Receive(ReadError::Closed))));
            }
            for (task, pages) in tasks.into_iter().zip(model) {
                let range = PageRange { start, end: start + (PAGES * size) as u64 };
                let expected: Vec<u8> = pages.iter().flat_map(|byte| vec![*byte; size]).collect();
                assert!(content_of(store, task, range) == expected, "task {}", task.0);
            }
        });
    }
}

/// Some pages that follow each other, each filled with its own number and `version`.
fn numbered(pages: std::ops::Range<u8>, version: u8) -> Vec<u8> {
    pages.flat_map(|page| vec![page * 16 + version; PAGE_SIZE as usize]).collect()
}

/// A stream in which something happens when so many bytes have been read.
struct Interrupted<'a, F: FnMut()> {
    bytes: &'a [u8],
    until: usize,
    happens: F,
}

impl<F: FnMut()> Read for Interrupted<'_, F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(self.bytes.len()).min(if self.until == 0 { usize::MAX } else { self.until });
        into[..len].copy_from_slice(&self.bytes[..len]);
        self.bytes = &self.bytes[len..];
        if self.until > 0 {
            self.until -= len;
            if self.until == 0 {
                (self.happens)();
            }
        }
        Ok(len)
    }
}

#[test]
fn pages_that_overtake_their_stream_are_kept_and_come_only_once() {
    for older_first in [false, true] {
        with_store(&format!("overtaken-{older_first}"), |store| {
            let range = PageRange { start: AT, end: AT + 6 * PAGE_SIZE };
            let mut wire = Vec::new();
            if older_first {
                tranship_wire::write_pages(&mut wire, SPACE, AT, &numbered(0..6, 1)).unwrap();
            }
            tranship_wire::runs::write_later(&mut wire, SPACE, &[range]).unwrap();
            tranship_wire::write_header(&mut wire, &FrameHeader::Named).unwrap();
            let named = wire.len();
            tranship_wire::write_pages(&mut wire, SPACE, AT, &numbered(0..6, 2)).unwrap();
            let total = (if older_first { 12 } else { 6 }) * PAGE_SIZE;
            tranship_wire::write_end(&mut wire, total).unwrap();
            // When half of the pages have been read, two come that somebody waits for.
            let (mut overtaking, mut places) = (Vec::new(), Vec::new());
            tranship_wire::write_pages(&mut overtaking, SPACE, AT + PAGE_SIZE, &numbered(1..3, 2)).unwrap();
            tranship_wire::write_end(&mut overtaking, 2 * PAGE_SIZE).unwrap();
            let overtaken = PageRange { start: AT + PAGE_SIZE, end: AT + 3 * PAGE_SIZE };
            let mut stream = Interrupted {
                bytes: &wire,
                until: named + 3 * PAGE_SIZE as usize,
                happens: || {
                    store.receive(&mut overtaking.as_slice(), Carries::Wanted, || ()).unwrap();
                    places = store.held()[&SPACE].places.within(overtaken);
                    assert_eq!(store.pager().missing(PAGER).unwrap().iter().map(|(_, r)| r.len()).sum::<usize>(), 2);
                },
            };
            store.receive(&mut stream, Carries::Versions, || ()).unwrap();
            assert_eq!(content(store, 6 * PAGE_SIZE as usize), numbered(0..6, 2));
            assert_eq!(store.held()[&SPACE].places.within(overtaken), places, "what the pager may be using stays");
            store.pager().status(PAGER).unwrap();
            assert!(store.pager().missing(PAGER).unwrap().iter().all(|(_, ranges)| ranges.is_empty()));
        });
    }
}

#[test]
fn pages_that_nobody_has_named_to_a_restarted_agent_are_kept() {
    with_store("restarted", |store| {
        let range = |pages: std::ops::Range<u64>| PageRange {
            start: AT + pages.start * PAGE_SIZE,
            end: AT + pages.end * PAGE_SIZE,
        };
        let receive = |pages: std::ops::Range<u8>, carries| {
            let mut wire = Vec::new();
            let start = AT + u64::from(pages.start) * PAGE_SIZE;
            let total = u64::from(pages.end - pages.start) * PAGE_SIZE;
            tranship_wire::write_pages(&mut wire, SPACE, start, &numbered(pages, 1)).unwrap();
            tranship_wire::write_end(&mut wire, total).unwrap();
            store.receive(&mut wire.as_slice(), carries, || ()).unwrap();
        };
        receive(0..2, Carries::Wanted);
        let places = store.held()[&SPACE].places.within(range(0..2));
        // More around them, in one piece, and then some of that again.
        receive(0..4, Carries::Named);
        receive(2..6, Carries::Named);
        assert_eq!(store.held()[&SPACE].places.within(range(0..2)), places, "what the pager may be using stays");
        assert_eq!(content(store, 6 * PAGE_SIZE as usize), numbered(0..6, 1));
    });
}

#[test]
fn memory_is_promised_for_shared_pages_that_have_not_come() {
    // Other tests promise, too, but nothing as large.
    const LARGE: u64 = 1 << 50;
    with_store("promised", |store| {
        let space = AddressSpaceId::object(1).unwrap();
        let object = SharedObject {
            space,
            key: 7,
            kind: SharedKind::File,
            name: "seven".into(),
            size: 1 << 20,
            sealable: true,
            huge_page: 0,
        };
        store.describe_shared(&[object]).unwrap();
        store.populate(0, LARGE).unwrap();
        assert!(promised() >= LARGE);
        for version in 1..3 {
            let mut wire = Vec::new();
            tranship_wire::write_pages(&mut wire, space, 0, &numbered(0..3, version)).unwrap();
            tranship_wire::write_end(&mut wire, 3 * PAGE_SIZE).unwrap();
            store.receive(&mut wire.as_slice(), Carries::Versions, || ()).unwrap();
            assert_eq!(store.shared_to_come.left(), LARGE - 3 * PAGE_SIZE);
        }
    });
    assert!(promised() < LARGE);
}
