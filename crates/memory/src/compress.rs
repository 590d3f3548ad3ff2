//! Whether and how the pages of a stream are compressed.
//!
//! `auto` compresses where that makes the stream faster, which it measures while it sends:
//!
//! ```text
//!            the writer waits for the link            enough samples
//! Measuring ──── most of the time ────────▶ Trying ──────────────────▶ Decided, for the next pages: a codec, or none
//!     ▲                                                                   │
//!     └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A link that is not the bottleneck costs nothing but a look at two counters for each frame. Where it is, a stream of pages
//! gets through at the pace of what is slower: compression, or the link with fewer bytes. Compression is timed on the wall clock,
//! so that a node whose CPUs are busy with other things does less of it.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tranship_types::{AddressSpaceId, Compress, Compressed, PAGE_SIZE};
use tranship_wire::packed::Packer;
use tranship_wire::{Codec, WriteError};

/// For how long the link is looked at before something is concluded: many times what fits its buffers' wake-ups.
const WINDOW: Duration = Duration::from_millis(40);
/// Most bytes of one run of pages that are compressed to try.
const SAMPLE: usize = 64 << 10;
/// Bytes that are tried before something is concluded.
const SAMPLES: u64 = 256 << 10;
/// Part of a CPU that a stream's compression may take: the rest is for reading and encrypting, and for the container.
const SHARE: f64 = 0.5;
/// By how much the next more expensive way must be faster.
const WORTH: f64 = 1.1;
/// Bytes of pages after which pages that travel as they are are looked at anew.
const PLAIN_FOR: u64 = 64 << 20;
/// Bytes of pages after which the link is looked at anew.
const PACKED_FOR: u64 = 256 << 20;

/// How a link was used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkUse {
    /// Bytes that it took.
    pub sent: u64,
    /// How long its writer waited for it.
    pub blocked: Duration,
}

/// What did not travel as it is, counted by all streams of a migration; other threads may look.
#[derive(Debug, Default)]
pub struct Tally {
    compressed: [[AtomicU64; 2]; 2],
    deduplicated: AtomicU64,
}

impl Tally {
    /// What was compressed with a codec so far.
    pub fn of(&self, codec: Codec) -> Compressed {
        let [pages, wire] = &self.compressed[codec as usize - 1];
        Compressed { page_bytes: pages.load(Ordering::Relaxed), wire_bytes: wire.load(Ordering::Relaxed) }
    }

    /// Bytes of pages that were not sent, because another task has the same at the same address ([`crate::deduplicate`]).
    pub fn deduplicated(&self) -> u64 {
        self.deduplicated.load(Ordering::Relaxed)
    }

    pub(crate) fn add_deduplicated(&self, bytes: u64) {
        self.deduplicated.fetch_add(bytes, Ordering::Relaxed);
    }

    fn add(&self, codec: Codec, page_bytes: usize, wire_bytes: usize) {
        let [pages, wire] = &self.compressed[codec as usize - 1];
        pages.fetch_add(page_bytes as u64, Ordering::Relaxed);
        wire.fetch_add(wire_bytes as u64, Ordering::Relaxed);
    }
}

/// Writes the pages of one stream, compressed or as they are.
pub struct Compressor {
    packer: Packer,
    way: Way,
    tally: Arc<Tally>,
}

enum Way {
    Always(Codec),
    Auto { policy: Auto, link: Box<dyn Fn() -> LinkUse + Send> },
}

impl Compressor {
    /// One for a stream, `None` where nothing is to be compressed. `link` tells how the stream's link was used so far.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(
        how: Compress,
        link: impl Fn() -> LinkUse + Send + 'static,
        tally: Arc<Tally>,
    ) -> io::Result<Option<Self>> {
        let way = match how {
            Compress::Off => return Ok(None),
            Compress::Lz4 => Way::Always(Codec::Lz4),
            Compress::Zstd => Way::Always(Codec::Zstd),
            Compress::Auto => Way::Auto { policy: Auto::new(Instant::now(), link()), link: Box::new(link) },
        };
        Ok(Some(Self { packer: Packer::new()?, way, tally }))
    }

    /// Writes pages; those that compression does not make fewer bytes, as they are.
    pub(crate) fn write<W: Write>(
        &mut self,
        w: &mut W,
        space: AddressSpaceId,
        address: u64,
        pages: &[u8],
    ) -> Result<(), WriteError> {
        let codec = match &mut self.way {
            Way::Always(codec) => Some(*codec),
            Way::Auto { policy, link } => {
                policy.look(Instant::now(), link());
                if policy.is_trying() {
                    policy.tried(
                        Codec::ALL.map(|codec| Trial::of(codec, &mut self.packer, &pages[..pages.len().min(SAMPLE)])),
                    );
                }
                policy.codec(pages.len() as u64)
            }
        };
        let packed = codec.and_then(|codec| Some((codec, self.packer.pack(codec, pages)?)));
        let Some((codec, packed)) = packed else { return tranship_wire::write_pages(w, space, address, pages) };
        self.tally.add(codec, pages.len(), packed.len());
        tranship_wire::write_packed(w, space, (address, (pages.len() as u64 / PAGE_SIZE) as u32), codec, packed)
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

/// What came of compressing samples with one codec.
#[derive(Debug, Clone, Copy, Default)]
struct Trial {
    page_bytes: u64,
    wire_bytes: u64,
    took: Duration,
}

impl Trial {
    fn of(codec: Codec, packer: &mut Packer, pages: &[u8]) -> Self {
        let start = Instant::now();
        let wire_bytes = packer.pack(codec, pages).map_or(pages.len(), <[u8]>::len) as u64;
        Self { page_bytes: pages.len() as u64, wire_bytes, took: start.elapsed() }
    }

    fn add(&mut self, other: Self) {
        self.page_bytes += other.page_bytes;
        self.wire_bytes += other.wire_bytes;
        self.took += other.took;
    }

    /// Bytes of pages a second that get through with it over a link that carries `link` bytes a second.
    fn pace(&self, link: f64) -> f64 {
        let compression = self.page_bytes as f64 / self.took.as_secs_f64().max(1e-9) * SHARE;
        compression.min(link * self.page_bytes as f64 / self.wire_bytes.max(1) as f64)
    }
}

/// The codec that is worth it over a link that carries `link` bytes a second.
fn decide(trials: &[Trial; 2], link: f64) -> Option<Codec> {
    let better = |best: (Option<Codec>, f64), (codec, trial): (Codec, &Trial)| {
        let pace = trial.pace(link);
        if pace > best.1 * WORTH { (Some(codec), pace) } else { best }
    };
    Codec::ALL.into_iter().zip(trials).fold((None, link), better).0
}

/// The policy of `auto`, without a clock or link of its own.
#[derive(Debug)]
struct Auto {
    /// When the present window began, and how the link had been used by then.
    window: (Instant, LinkUse),
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Measuring,
    Trying {
        /// Bytes a second that the link carries.
        link: f64,
        trials: [Trial; 2],
    },
    Decided {
        codec: Option<Codec>,
        /// For so many bytes of pages.
        left: u64,
        /// Bytes a second that the link carries, if it was still the bottleneck when it was last looked at.
        link: Option<f64>,
    },
}

impl State {
    fn trying(link: f64) -> Self {
        Self::Trying { link, trials: Default::default() }
    }
}

impl Auto {
    fn new(now: Instant, link: LinkUse) -> Self {
        Self { window: (now, link), state: State::Measuring }
    }

    /// Takes note of how the link has been used by now.
    fn look(&mut self, now: Instant, used: LinkUse) {
        let (began, before) = self.window;
        let took = now.saturating_duration_since(began);
        if took < WINDOW {
            return;
        }
        self.window = (now, used);
        let is_bottleneck = (used.blocked - before.blocked) * 2 > took;
        let rate = is_bottleneck.then(|| (used.sent - before.sent) as f64 / took.as_secs_f64());
        match (&mut self.state, rate) {
            (State::Measuring, Some(rate)) => self.state = State::trying(rate),
            (State::Decided { link, .. }, rate) => *link = rate,
            _ => {}
        }
    }

    fn is_trying(&self) -> bool {
        matches!(self.state, State::Trying { .. })
    }

    fn tried(&mut self, results: [Trial; 2]) {
        let State::Trying { link, trials } = &mut self.state else { return };
        trials.iter_mut().zip(results).for_each(|(sum, result)| sum.add(result));
        if trials[0].page_bytes >= SAMPLES {
            let (codec, link) = (decide(trials, *link), *link);
            let left = if codec.is_some() { PACKED_FOR } else { PLAIN_FOR };
            self.state = State::Decided { codec, left, link: Some(link) };
        }
    }

    /// How the next pages are to be compressed, so many bytes of them.
    fn codec(&mut self, bytes: u64) -> Option<Codec> {
        let State::Decided { codec, left, link } = &mut self.state else { return None };
        let (codec, link) = (*codec, *link);
        *left = left.saturating_sub(bytes);
        if *left == 0 {
            self.state = link.map_or(State::Measuring, State::trying);
        }
        codec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// A stream over a link of so many bytes a second, whose writer is held up for the given part of the time.
    struct Sender {
        auto: Auto,
        now: Instant,
        used: LinkUse,
    }

    impl Sender {
        fn new() -> Self {
            let (now, used) = (Instant::now(), LinkUse::default());
            Self { auto: Auto::new(now, used), now, used }
        }

        /// Sends for so many ms, 1 MiB each 10 ms; returns what the second half of the frames was compressed with, but for those
        /// that are sent while others are tried.
        fn send(&mut self, ms: u64, link: u64, blocked: f64, trial: [Trial; 2]) -> Option<Codec> {
            let mut used = Vec::new();
            for _ in 0..ms / 10 {
                self.now += Duration::from_millis(10);
                self.used.sent += link / 100;
                self.used.blocked += Duration::from_millis(10).mul_f64(blocked);
                self.auto.look(self.now, self.used);
                if self.auto.is_trying() {
                    self.auto.tried(trial);
                } else {
                    used.push(self.auto.codec(1 << 20));
                }
            }
            let last = &used[used.len() / 2..];
            assert!(last.iter().all(|codec| *codec == last[0]), "{used:?}");
            last[0]
        }
    }

    /// 64 KiB that become one part in `ratio`, at so many bytes a second.
    fn trial(ratio: f64, rate: u64) -> Trial {
        let page_bytes = SAMPLE as u64;
        let took = Duration::from_secs_f64(page_bytes as f64 / rate as f64);
        Trial { page_bytes, wire_bytes: (page_bytes as f64 / ratio) as u64, took }
    }

    #[test]
    fn a_link_that_is_not_the_bottleneck_gets_pages_as_they_are_and_nothing_is_tried() {
        let mut sender = Sender::new();
        for _ in 0..100 {
            assert_eq!(sender.send(100, 500 * MB, 0.4, [trial(9.0, 900 * MB); 2]), None);
            assert!(matches!(sender.auto.state, State::Measuring));
        }
    }

    #[test]
    fn a_slow_link_gets_what_is_fastest_over_it() {
        // What becomes far fewer bytes either way is compressed by the faster one; what does not, by the tighter one; and by
        // none where neither is faster than the link.
        for (link, lz4, zstd, expected) in [
            (60 * MB, trial(20.0, 1500 * MB), trial(25.0, 900 * MB), Some(Codec::Lz4)),
            (60 * MB, trial(2.0, 600 * MB), trial(3.0, 400 * MB), Some(Codec::Zstd)),
            (600 * MB, trial(2.0, 600 * MB), trial(3.0, 400 * MB), None),
            (60 * MB, trial(1.0, 4000 * MB), trial(1.05, 900 * MB), None),
            (60 * MB, trial(2.0, 100 * MB), trial(3.0, 70 * MB), None),
        ] {
            let mut sender = Sender::new();
            assert_eq!(sender.send(200, link, 0.9, [lz4, zstd]), expected, "{link} {lz4:?} {zstd:?}");
        }
    }

    #[test]
    fn pages_that_become_compressible_and_links_that_become_fast_are_noticed() {
        let mut sender = Sender::new();
        let (noise, text) = ([trial(1.0, 3000 * MB); 2], [trial(4.0, 800 * MB); 2]);
        assert_eq!(sender.send(200, 60 * MB, 0.9, noise), None);
        assert_eq!(sender.send(200, 60 * MB, 0.9, text), None, "not before so many pages more");
        assert_eq!(sender.send(2000, 60 * MB, 0.9, text), Some(Codec::Lz4));
        // As long as the link holds the writer up, it need not be looked at without compression.
        assert_eq!(sender.send(10_000, 60 * MB, 0.6, text), Some(Codec::Lz4));
        assert_eq!(sender.send(10_000, 500 * MB, 0.1, text), None);
    }
}
