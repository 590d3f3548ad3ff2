//! What a destination would have: fed by the rounds, and at the end compared with the memory itself.

use std::collections::BTreeMap;
use std::io::{Sink, sink};
use std::sync::{Mutex, PoisonError};

use tranship_memory::send::{self, Chunk, Counters, Stream, Version, Witness};
use tranship_memory::survey::survey;
use tranship_memory::tracker::{Method, Round, Tracker};
use tranship_sys::pagemap::Pagemap;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use crate::subject::stop;

const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// The rounds over some processes, and what they have brought.
pub struct Mirror {
    tracker: Tracker,
    streams: [Stream<Sink>; 2],
    pages: Mutex<BTreeMap<(AddressSpaceId, u64), Vec<u8>>>,
}

/// Passes on to the tracker what becomes of the chunks, and keeps what was read.
struct Keeper<'a> {
    tracker: &'a Tracker,
    pages: &'a Mutex<BTreeMap<(AddressSpaceId, u64), Vec<u8>>>,
    /// The tasks have stopped: all is to be sent.
    last: bool,
}

impl Witness for Keeper<'_> {
    fn due(&self, chunk: &Chunk) -> Vec<PageRange> {
        if self.last { vec![chunk.pages().1] } else { self.tracker.due(chunk) }
    }

    fn read(&self, space: AddressSpaceId, address: u64, pages: &[u8]) {
        self.tracker.read(space, address, pages);
        let mut kept = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, page) in pages.chunks(PAGE_SIZE as usize).enumerate() {
            kept.insert((space, address + number as u64 * PAGE_SIZE), page.to_vec());
        }
    }

    fn missed(&self, chunk: &Chunk) {
        self.tracker.missed(chunk);
    }
}

impl Mirror {
    pub fn new(method: Method) -> Self {
        let streams = [Stream::new(sink(), None), Stream::new(sink(), None)];
        Self { tracker: Tracker::new(method), streams, pages: Mutex::default() }
    }

    /// A look that is not followed by anything.
    pub fn look(&mut self, pids: &[u32]) -> Round {
        self.tracker.round(pids).expect("a round")
    }

    /// Sends what a look has found.
    pub fn send(&mut self, round: &Round) {
        self.send_as(round, false);
    }

    fn send_as(&mut self, round: &Round, last: bool) {
        let keeper = Keeper { tracker: &self.tracker, pages: &self.pages, last };
        for chunks in [&round.plan.first, &round.plan.rest] {
            send::send_running(chunks, Version::Later, &mut self.streams, &Counters::default(), &keeper).expect("sent");
        }
    }

    /// How many of the pages of an area were brought, in whatever version.
    pub fn brought(&self, start: usize, pages: usize) -> usize {
        let area = start as u64..(start + pages * PAGE_SIZE as usize) as u64;
        let kept = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        kept.keys().filter(|(_, address)| area.contains(address)).count()
    }

    /// A round; returns it.
    pub fn round(&mut self, pids: &[u32]) -> Round {
        let round = self.look(pids);
        self.send(&round);
        round
    }

    pub fn left(&self, pids: &[u32]) -> u64 {
        self.tracker.left(pids)
    }

    pub fn zeros(&self, pids: &[u32]) -> u64 {
        self.tracker.zeros(pids)
    }

    /// Stops the processes, and has the last round; what was brought must be what is there, byte by byte.
    pub fn finish(mut self, pids: &[u32]) {
        stop(pids);
        let round = self.tracker.last_round(pids).expect("the last round");
        self.send_as(&round, true);
        let mut kept = self.pages.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (space, range) in round.stale {
            kept.retain(|(id, page), _| *id != space || !range.contains(*page));
        }
        for space in survey(pids).expect("they live") {
            let memory = std::fs::File::open(format!("/proc/{}/mem", space.pid)).expect("it lives");
            let mut pagemap = Pagemap::open(space.pid).expect("it lives");
            for range in space.ranges {
                let mut there = Vec::new();
                let found = |start, end| there.extend(PageRange { start, end }.cut(PAGE_SIZE).map(|page| page.start));
                pagemap.populated(range.start, range.end, found).expect("it lives");
                for page in there {
                    let mut now = ZEROS;
                    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut now, page).expect("it is there");
                    let brought = kept.remove(&(space.id, page));
                    assert!(brought.as_deref().unwrap_or(&ZEROS) == now, "page {page:#x} of {range:x?} is out of date");
                }
            }
        }
        kept.retain(|_, page| *page != ZEROS);
        let too_many: Vec<_> = kept.keys().collect();
        assert!(too_many.is_empty(), "there are pages that are not there any more: {too_many:x?}");
    }
}

/// The pages of an area that a round has found, by their numbers.
pub fn found(round: &Round, start: usize, pages: usize) -> Vec<usize> {
    let area = PageRange { start: start as u64, end: (start + pages * PAGE_SIZE as usize) as u64 };
    let chunks = round.plan.first.iter().chain(&round.plan.rest);
    let inside = chunks.filter_map(|chunk| chunk.pages().1.intersection(&area));
    let mut found: Vec<usize> = inside
        .flat_map(|run| run.cut(PAGE_SIZE))
        .map(|page| ((page.start - area.start) / PAGE_SIZE) as usize)
        .collect();
    found.sort_unstable();
    found
}
