//! The table of what can go wrong around a move: by kind, place, side and mode. See `docs/testing.md`.

use tranship_types::{Mode, Side};

use crate::conditions::{Cell, Until, What};

const S: Side = Side::Source;
const D: Side = Side::Destination;

/// A cell whose condition lasts until something has happened.
const fn cell(place: &'static str, what: What, on: Side, mode: Mode, until: Until, ends_on: Option<Side>) -> Cell {
    Cell { place, what, on, mode, until, ends_on, words: &[], every_run: false }
}

impl Cell {
    /// It belongs to every `make test`.
    const fn every_run(self) -> Self {
        Self { every_run: true, ..self }
    }

    /// Where the move fails, its report has these words: cause and remedy.
    const fn named(self, words: &'static [&'static str]) -> Self {
        Self { words, ..self }
    }
}

/// Packets between the agents are lost in one direction: those that `on` sends.
pub const ONE_WAY: [Cell; 12] = [
    cell("source.offer.before", What::Lost, S, Mode::Hybrid, Until::Millis(1200), Some(D)),
    cell("source.offer.after", What::Lost, D, Mode::Precopy, Until::Millis(1200), Some(D)),
    cell("source.transfer.before", What::Lost, S, Mode::Hybrid, Until::Undone, Some(S)).every_run().named(&FROZEN),
    cell("source.transfer.before", What::Lost, D, Mode::Cold, Until::Undone, Some(S)).named(&FROZEN),
    cell("destination.ready.after", What::Lost, D, Mode::Precopy, Until::Undone, Some(S)).named(&FROZEN),
    cell("destination.ready.after", What::Lost, S, Mode::Postcopy, Until::Millis(1200), Some(D)),
    cell("source.commit.after", What::Lost, S, Mode::Cold, Until::Millis(1200), Some(D)).every_run(),
    cell("source.commit.after", What::Lost, S, Mode::Postcopy, Until::Millis(LONG), Some(D)),
    cell("source.commit.after", What::Lost, D, Mode::Hybrid, Until::Millis(LONG), Some(D)),
    cell("source.drain.before", What::Lost, S, Mode::Postcopy, Until::Millis(1200), Some(D)),
    cell("source.drain.before", What::Lost, D, Mode::Postcopy, Until::Millis(1200), Some(D)),
    cell("source.release.before", What::Lost, D, Mode::Precopy, Until::Millis(LONG), Some(D)),
];

/// A link that is silent is given up after 10 s.
const LONG: u64 = 10_700;
/// The freeze timeout has ended it.
const FROZEN: [&str; 2] = ["had been frozen for", "--freeze-timeout"];

/// The link of `on` carries little.
pub const SLOW: [Cell; 4] = [
    cell("source.precopy.before", What::Slow("20mbit"), S, Mode::Precopy, Until::Ended, Some(D)),
    cell("source.transfer.before", What::Slow("400kbit"), S, Mode::Cold, Until::Ended, Some(S)).named(&FROZEN),
    cell("source.transfer.before", What::Slow("400kbit"), D, Mode::Hybrid, Until::Ended, None),
    cell("source.drain.before", What::Slow("20mbit"), S, Mode::Postcopy, Until::Ended, Some(D)).every_run(),
];

/// A process of `on` stands still (SIGSTOP).
pub const STALLED: [Cell; 15] = [
    cell("source.offer.after", What::Stopped("agent"), S, Mode::Cold, Until::Millis(1200), Some(D)),
    cell("destination.restore.before", What::Stopped("agent"), D, Mode::Hybrid, Until::Ended, Some(S)).named(&FROZEN),
    cell("source.transfer.before", What::Stopped("agent"), S, Mode::Precopy, Until::Millis(1200), Some(D)),
    cell("source.commit.after", What::Stopped("agent"), S, Mode::Hybrid, Until::Millis(LONG), Some(D)),
    cell("destination.commit.before", What::Stopped("agent"), D, Mode::Postcopy, Until::Millis(1200), Some(D)),
    cell("destination.restore.before", What::Stopped("pager"), D, Mode::Precopy, Until::Ended, Some(S))
        .every_run()
        .named(&FROZEN),
    cell("destination.restore.before", What::Stopped("keeper"), D, Mode::Cold, Until::Ended, Some(D)),
    cell("destination.commit.before", What::Stopped("pager"), D, Mode::Postcopy, Until::Millis(1200), Some(D)),
    cell("source.freeze.before", What::Stopped("criu"), S, Mode::Hybrid, Until::Ended, Some(S)).named(&FROZEN),
    cell("source.freeze.before", What::Stopped("front"), S, Mode::Cold, Until::Ended, Some(S)).named(&FROZEN),
    cell("destination.restore.before", What::Stopped("criu"), D, Mode::Postcopy, Until::Ended, Some(S)).named(&FROZEN),
    cell("destination.restore.before", What::Stopped("front"), D, Mode::Precopy, Until::Ended, Some(S))
        .every_run()
        .named(&FROZEN),
    cell("destination.commit.before", What::Stopped("criu"), D, Mode::Hybrid, Until::Millis(1200), Some(D)),
    cell("destination.commit.before", What::Stopped("front"), D, Mode::Cold, Until::Millis(1200), Some(D)),
    // Longer than a restore may take: the copy is made again without it.
    cell("destination.commit.before", What::Stopped("criu"), D, Mode::Precopy, Until::Moved, Some(D)),
];

const RUN: What = What::Full("/run/tranship");
const STATE: What = What::Full("/var/lib/tranship");
const SHM: What = What::Full("/dev/shm");
/// The cause of a full file system, and what to do.
const SPACE: [&str; 1] = ["free some"];

/// A file system of `on` is full.
pub const FULL: [Cell; 12] = [
    cell("source.inspect.before", RUN, S, Mode::Hybrid, Until::Ended, Some(S)).named(&SPACE),
    cell("source.freeze.before", RUN, S, Mode::Precopy, Until::Ended, Some(S)).every_run().named(&SPACE),
    cell("source.commit.after", RUN, S, Mode::Postcopy, Until::Ended, Some(D)),
    cell("source.offer.before", RUN, D, Mode::Cold, Until::Ended, Some(S)).named(&SPACE),
    cell("destination.receive.before", RUN, D, Mode::Hybrid, Until::Ended, Some(S)).every_run().named(&SPACE),
    cell("destination.commit.before", RUN, D, Mode::Postcopy, Until::Ended, Some(D)),
    cell("source.freeze.before", STATE, S, Mode::Cold, Until::Ended, Some(D)),
    cell("source.commit.before", STATE, S, Mode::Hybrid, Until::Ended, Some(D)),
    cell("source.offer.before", STATE, D, Mode::Precopy, Until::Ended, Some(S)).named(&SPACE),
    cell("destination.restore.before", STATE, D, Mode::Cold, Until::Ended, Some(D)),
    cell("destination.commit.before", STATE, D, Mode::Precopy, Until::Ended, Some(D)).every_run(),
    cell("source.inspect.before", SHM, D, Mode::Precopy, Until::Ended, Some(D)),
];

const RESTARTED: [&str; 1] = ["the agent was restarted in the middle of the migration"];

/// The kernel kills a process of `on`, whose memory cgroup is full.
pub const OUT_OF_MEMORY: [Cell; 11] = [
    cell("source.precopy.before", What::OutOfMemory("agent"), S, Mode::Hybrid, Until::Killed, Some(S))
        .named(&RESTARTED),
    cell("source.transfer.before", What::OutOfMemory("agent"), S, Mode::Precopy, Until::Killed, Some(S))
        .every_run()
        .named(&RESTARTED),
    cell("source.deliver.before", What::OutOfMemory("agent"), S, Mode::Cold, Until::Killed, Some(D)),
    cell("source.drain.before", What::OutOfMemory("agent"), S, Mode::Postcopy, Until::Killed, Some(D)),
    cell("destination.engine.before", What::OutOfMemory("agent"), D, Mode::Precopy, Until::Killed, Some(S)),
    cell("destination.restore.before", What::OutOfMemory("agent"), D, Mode::Hybrid, Until::Killed, Some(S)),
    cell("destination.commit.before", What::OutOfMemory("agent"), D, Mode::Postcopy, Until::Killed, Some(D))
        .every_run(),
    cell("destination.resume.after", What::OutOfMemory("agent"), D, Mode::Cold, Until::Killed, Some(D)),
    cell("destination.receive.before", What::OutOfMemory("pager"), D, Mode::Precopy, Until::Ended, Some(D)),
    cell("destination.commit.before", What::OutOfMemory("pager"), D, Mode::Postcopy, Until::Ended, Some(D)).every_run(),
    cell("destination.restore.before", What::OutOfMemory("keeper"), D, Mode::Hybrid, Until::Ended, Some(D)),
];

/// The agent of `on` dies there and is started again, and then others of its processes are killed.
pub const KILLED_AFTER_RESTART: [Cell; 11] = [
    cell("source.freeze.after", What::Restarted(&["criu"]), S, Mode::Hybrid, Until::Ended, Some(S)).named(&RESTARTED),
    cell("source.transfer.after", What::Restarted(&["front"]), S, Mode::Cold, Until::Ended, Some(S)).named(&RESTARTED),
    cell("source.close-gate.after", What::Restarted(&["front", "criu"]), S, Mode::Postcopy, Until::Ended, Some(S))
        .named(&RESTARTED),
    cell("destination.restore.before", What::Restarted(&["front"]), D, Mode::Precopy, Until::Ended, Some(S)),
    cell("destination.commit.before", What::Restarted(&["criu"]), D, Mode::Cold, Until::Ended, Some(D)).every_run(),
    cell("destination.commit.before", What::Restarted(&["front"]), D, Mode::Precopy, Until::Ended, Some(D)),
    cell("destination.commit.before", What::Restarted(&["front", "criu"]), D, Mode::Hybrid, Until::Ended, Some(D)),
    cell("destination.commit.before", What::Restarted(&["pager"]), D, Mode::Postcopy, Until::Ended, Some(D)),
    cell("destination.commit.before", What::Restarted(&["keeper"]), D, Mode::Postcopy, Until::Ended, Some(D)),
    cell("destination.resume.after", What::Restarted(&["keeper"]), D, Mode::Postcopy, Until::Ended, Some(D)),
    cell("destination.resume.after", What::Restarted(&["pager"]), D, Mode::Postcopy, Until::Ended, Some(D)),
];
