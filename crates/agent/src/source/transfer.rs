//! What happens while the container is frozen: memory and skeleton go to the destination.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tranship_coordinator::Failure;
use tranship_memory::send::{self, Counters, Outbox, Plan, SendError, Stream, Version};
use tranship_memory::survey::Space;
use tranship_memory::unreadable;
use tranship_sys::awake::Awake;
use tranship_sys::clock::monotonic_ns;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads::{self, Beside};
use tranship_transport::{Closer, Connection, Link};
use tranship_types::{AddressSpaceId, Mode, PAGE_SIZE, PageRange};

use super::push::{Pages, Push};
use super::showing::show;
use super::streams::show_tally;
use super::{LIMITS_CHANGED, STREAM_BUFFERS, SourceRun, failed};
use crate::node::Node;
use crate::tmpfs;

/// The pages that a restored thread uses first: the kernel accesses its area for restartable sequences in the restore, and its stack as soon as it runs. Without them each
/// thread requests these pages by itself, and its faults compete with the resume of the other threads.
fn used_first(node: &Node, spaces: &[(u32, AddressSpaceId)]) -> Pages {
    let Some(memory) = &node.thread_memory else { return Vec::new() };
    let pages = |(pid, space): &(u32, AddressSpaceId)| {
        let addresses = memory.read(*pid).unwrap_or_default();
        let mut pages: Vec<u64> = addresses.into_iter().map(|address| address & !(PAGE_SIZE - 1)).collect();
        pages.sort_unstable();
        pages.dedup();
        let runs = pages.chunk_by(|page, next| next - page == PAGE_SIZE);
        let range = |run: &[u64]| PageRange::new(run[0], run[run.len() - 1].saturating_add(PAGE_SIZE));
        (*space, runs.filter_map(range).collect())
    };
    spaces.iter().map(pages).collect()
}

impl SourceRun {
    /// Memory over the page streams and the skeleton over the control link, at the same time. First of all the pages are
    /// named that are out of date there, so that a task which is restored meanwhile does not get an old one.
    pub(super) fn transfer(&mut self) -> Result<(), Failure> {
        let round = self.last_round.take().ok_or_else(|| failed("the memory was not surveyed"))?;
        let mut plan = round.plan;
        let before = self.report.read().progress.moved_bytes;
        let early = self.is_early();
        self.report.change(|r| {
            r.mode_taken = Some(Mode::taken(!r.rounds.is_empty(), early)).filter(|taken| *taken != r.mode);
        });
        let start = monotonic_ns();
        let counters = Counters::default();
        let mut streams = std::mem::take(&mut self.streams);
        send::send_stale(&round.stale, &mut streams)
            .and_then(|()| send::send(&plan.first, Version::Later, &mut streams, &counters))
            .map_err(|error| self.not_sent(&error))?;
        self.send_shared_code(&mut streams, &counters)?;
        let buffers = u64::from(STREAM_BUFFERS) * streams.len() as u64;
        if early {
            self.make_way(&mut streams)?;
        }
        // Overlaps with what was named before the freeze do no harm: each page is taken off once.
        let outbox = std::mem::take(&mut self.outbox);
        outbox.add(&plan.rest);
        outbox.drop_stale(&round.stale);
        let all = before + counters.read.load(Ordering::Relaxed) + outbox.bytes();
        self.report.change(|r| r.progress.memory_bytes = all);
        plan.first.clear();
        let (mut push, pushing) = self.dump_and_name((plan, outbox), streams, early.then_some(&round.spaces), start)?;
        if self.cpu_share_was_changed()? {
            return Err(Failure::new(LIMITS_CHANGED));
        }
        let before = self.report.read().progress.moved_bytes;
        let gauge = push.gauge();
        // Where pages may follow the resume, nobody waits for them here. Where not, no thread is started for showing how far they
        // are: its first turn of a processor would be an ordinary thread's, and the container waits.
        if !early {
            // They may take long.
            self.awake = None;
            show((&self.report, &self.tally), &gauge, (before, all - before), push.ended());
            push.wait().map_err(|failure| if push.is_unreadable() { failure } else { self.reason(failure) })?;
            self.awake = Awake::keep().ok();
            self.timeline.note("memory: sent", pushing, monotonic_ns());
        }
        let skeleton_bytes = self.layout.image_bytes();
        let hidden = tranship_criu::hidden::was_used(&self.layout.hidden());
        let shared_way = self.shared_way(hidden);
        let tracked = self.tracker.as_ref().map(|tracker| format!("memory: {}", tracker.way()));
        let way = if hidden {
            "memory: page store"
        } else {
            "memory: page store, and once more in criu's images (the preloaded library was not at work)"
        };
        self.report.change(|r| {
            r.progress.moved_bytes = before + push.gauge().read_bytes();
            r.progress.wire_bytes = push.gauge().wire_bytes();
            r.progress.remaining_bytes = if early { all.saturating_sub(r.progress.moved_bytes) } else { 0 };
            show_tally(&self.tally, r);
            r.skeleton_bytes = skeleton_bytes;
            r.source_extra_bytes = skeleton_bytes + buffers;
            r.ways.push(way.to_owned());
            r.ways.extend(tracked);
            r.ways.extend(shared_way);
        });
        self.push = Some(push);
        Ok(())
    }

    /// Sends the skeleton, and meanwhile the rest of the shared memory; then the other pages are named, and begin to be sent
    /// unless they may follow the resume. What was named is complete on the other side but for the pages that were named:
    /// so shared memory, which is all there before the tasks run, goes before. Where pages of these spaces may follow the resume (`early`), it is made
    /// sure meanwhile that all of them can be read: after the commit that would be too late. Returns the pages on their way, and since when.
    fn dump_and_name(
        &mut self,
        (plan, outbox): (Plan, Outbox),
        mut streams: Vec<Stream<Connection>>,
        early: Option<&Vec<Space>>,
        start: u64,
    ) -> Result<(Push, u64), Failure> {
        let closers: Vec<_> = streams.iter_mut().map(|stream| stream.link().closer()).collect();
        let (shared, demand, crew) = (self.shared.take(), self.demand.take(), std::mem::take(&mut self.crew));
        let counters = Counters::default();
        let external = self.files.as_ref().map(tmpfs::Leaving::external).unwrap_or_default();
        let needs_files = self.files.as_ref().is_some_and(tmpfs::Leaving::is_needed);
        let (mut leaving, mut trees, mut log) = (self.files.take(), self.trees.take(), self.log.take());
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let interrupt = Arc::clone(&self.interrupt);
        let (node, spaces) =
            (Arc::clone(&self.node), early.map(|spaces| spaces.iter().map(|s| (s.pid, s.id)).collect()));
        let spaces: Vec<(u32, AddressSpaceId)> = spaces.unwrap_or_default();
        let (skeleton, files, trees_left, log_left, named) = std::thread::scope(|scope| {
            let (shared, counters) = (shared.as_ref(), &counters);
            let named = threads::beside(scope, "names", move || -> Result<_, SendError> {
                // The restore waits for it.
                schedule::stand(Standing::Favoured);
                shared.map_or(Ok(()), |shared| shared.send(&mut streams, counters))?;
                send::name(&plan, &mut streams)?;
                send::named(&mut streams)?;
                let named = monotonic_ns();
                let push = Push::start(outbox, streams, demand, move || used_first(&node, &spaces), crew);
                if early.is_none() {
                    push.begin(Standing::Favoured);
                }
                Ok((push, named))
            });
            let files = leaving.as_mut().map(|leaving| threads::beside(scope, "files", || leaving.finish()));
            let trees = trees.as_mut().map(|trees| {
                threads::beside(scope, "trees", || {
                    schedule::stand(Standing::Favoured);
                    trees.finish(&pids, &interrupt)
                })
            });
            let logged = log.as_mut().map(|log| threads::beside(scope, "log", || log.finish()));
            let readable =
                early.map(|spaces| threads::beside(scope, "readable", || spaces.iter().find_map(unreadable::find)));
            let skeleton = self.skeleton((external, needs_files), early.is_none());
            if skeleton.is_err() {
                // The memory is of no use any more; whoever waits for it shall not go on waiting.
                closers.iter().for_each(Closer::close);
            }
            let files = files.map(Beside::join);
            let trees = trees.map(Beside::join);
            let logged = logged.map(Beside::join);
            let unreadable = readable.and_then(Beside::join);
            let skeleton = skeleton.and_then(|()| unreadable.map_or(Ok(()), |page| Err(failed(page))));
            (skeleton, files, trees, logged, named.join())
        });
        (self.shared, self.files, self.trees, self.log) = (shared, leaving, trees, log);
        // What is lacking of the trees is why the destination does not go on.
        trees_left.transpose().map(|left| self.files_left("files", left))?;
        log_left.transpose().map(|left| self.files_left("log", left))?;
        skeleton?;
        files.transpose().map(|left| self.files_left("tmpfs", left))?;
        let (push, named) = named.map_err(|error| self.not_sent(&error))?;
        let bytes = counters.sent.load(Ordering::Relaxed);
        self.report.change(|r| {
            r.progress.moved_bytes += bytes;
            r.progress.memory_bytes += bytes;
            r.frozen_bytes = bytes;
        });
        self.timeline.note("memory: named", start, named);
        Ok((push, named))
    }
}
