//! Shared memory, as the source's steps deal with it.

use std::sync::atomic::Ordering;

use tranship_coordinator::Failure;
use tranship_memory::huge;
use tranship_memory::send::{Counters, Stream};
use tranship_memory::shared::source::{Look, SharedMemory, Where};
use tranship_transport::Connection;
use tranship_types::{Mode, SharedObject};
use tranship_wire::Versions;
use tranship_wire::message::Request;

use super::showing::shown_on;
use super::{SourceRun, failed};
use crate::layout;

/// Bytes of changes in a round that are worth no further one.
const LITTLE: u64 = 1 << 20;
/// Rounds of settling at most.
const SETTLING_ROUNDS: usize = 10;
/// Descriptions in one message, which holds 1 MiB.
const DESCRIPTIONS: usize = 512;

/// Whether rounds over what cannot follow the resume still help.
#[derive(Default)]
pub(super) struct Settling {
    before: Option<u64>,
}

impl Settling {
    /// Told how many bytes the newest round has found: whether they are little, or not much less than in the one before.
    pub(super) fn is_settled(&mut self, bytes: u64) -> bool {
        bytes <= LITTLE || self.before.replace(bytes).is_some_and(|before| bytes > before / 4 * 3)
    }
}

impl SourceRun {
    /// Decides who moves shared memory: the memory plane, if the library is there that criu needs for that on both nodes.
    pub(super) fn arm_shared(&mut self, destination_takes_it: bool) -> Result<(), Failure> {
        let way = match (layout::preload(), destination_takes_it) {
            (Some(_), true) => {
                let huge = self.control()?.version() >= Versions::HUGE;
                self.shared = Some(SharedMemory::new(huge).map_err(failed)?);
                return Ok(());
            }
            (None, _) => format!("node {}", self.node.config.node),
            (_, false) => format!("node {}", self.peer),
        };
        let way = format!("shared memory: criu's images, in the freeze (the preloaded library is missing on {way})");
        self.report.change(|r| r.ways.push(way));
        Ok(())
    }

    /// Finds what there is now, and tells the destination what is new.
    pub(super) fn find_shared(&mut self, places: Where) -> Result<(), Failure> {
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        // What another container's move brings is hidden in the freeze.
        let segments = self.segments(self.others_in_memory(), Vec::new());
        let Some(shared) = &mut self.shared else { return Ok(()) };
        shared.take_segments(segments);
        let described = shared.find(&pids, places).map_err(failed)?;
        self.describe_shared(&described)
    }

    /// Tells the destination what is new of it.
    pub(super) fn describe_shared(&mut self, described: &[SharedObject]) -> Result<(), Failure> {
        for objects in described.chunks(DESCRIPTIONS) {
            self.say(&Request::Shared { objects: objects.to_vec() })?;
        }
        Ok(())
    }

    /// Tells the destination where there are huge pages, before their being watched splits them.
    pub(super) fn tell_huge_pages(&mut self) -> Result<(), Failure> {
        if self.control()?.version() < Versions::SAME {
            return Ok(());
        }
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        huge::find(&pids).into_iter().try_for_each(|pages| self.say(&Request::HugePages { pages }))
    }

    /// Sends what has changed of it, while the container runs. Returns how many bytes those were.
    pub(super) fn send_shared(&mut self) -> Result<u64, Failure> {
        self.find_shared(Where::Everywhere)?;
        let Some(shared) = &mut self.shared else { return Ok(0) };
        shared.look(Look::Round).map_err(failed)?;
        let (to, before) = ((&self.report, &*self.tally), self.report.read().progress.moved_bytes);
        let sent = shown_on(to, 0, &mut self.streams, |streams, counters| {
            shared.send(streams, counters).map(|()| counters.sent.load(Ordering::Relaxed))
        });
        let sent = sent.map_err(|error| self.not_sent(&error))?;
        self.report.change(|r| r.progress.moved_bytes = before + sent);
        Ok(sent)
    }

    /// Sends ahead of the freeze what cannot follow the resume, shared memory and files: until what a round of both finds is
    /// little, or does not get less.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        let cold = self.report.read().mode == Mode::Cold;
        let mut rest = Settling::default();
        for _ in 0..SETTLING_ROUNDS {
            let sent = self.send_files()? + if cold { 0 } else { self.send_shared()? };
            if rest.is_settled(sent) {
                break;
            }
        }
        Ok(())
    }

    /// Sends ahead of the freeze what has changed of directory trees, until that is little, or does not get less: each pass takes as
    /// long as what it finds is large, and leaves what is written meanwhile.
    pub(super) fn settle_trees(&mut self) -> Result<(), Failure> {
        let mut rest = Settling::default();
        for _ in 0..SETTLING_ROUNDS {
            if rest.is_settled(self.send_trees()?) {
                break;
            }
        }
        Ok(())
    }

    /// Sends what must be sent before criu is let go.
    pub(super) fn send_shared_code(
        &self,
        streams: &mut [Stream<Connection>],
        counters: &Counters,
    ) -> Result<(), Failure> {
        let sent = self.shared.as_ref().map_or(Ok(()), |shared| shared.send_executable(streams, counters));
        sent.map_err(|error| self.not_sent(&error))
    }

    /// How it was moved, for the report.
    pub(super) fn shared_way(&self, hidden: bool) -> Option<String> {
        let count = self.shared.as_ref().map(SharedMemory::count).filter(|count| *count > 0)?;
        Some(match hidden {
            true => format!("shared memory: {count} objects, put in place ahead of the restore"),
            false => "shared memory: criu's images, in the freeze (the preloaded library was not at work)".to_owned(),
        })
    }
}
