//! The container's memory while it runs, and what is left of it to send when it is frozen.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_criu::smaps::{Smaps, has_protected_part, is_protected};
use tranship_engine::Container;
use tranship_memory::policy::{self, RoundSeen, Verdict};
use tranship_memory::send::{self, Chunk, Counters, Plan, Version, Witness};
use tranship_memory::shared::source::{Look, SharedMemory, Where};
use tranship_memory::survey;
use tranship_memory::tracker::{Round, Tracker};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::mapping_flags::FlagsReader;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads;
use tranship_transport::Link;
use tranship_types::{AddressSpaceId, Blocker, BlockerKind, MigrationId, PageRange, RoundReport};
use tranship_wire::Versions;

use super::original;
use super::shared::Settling;
use super::showing::shown_on;
use super::streams::{await_arrival, show_tally};
use super::{LIMITS_CHANGED, SourceRun, failed};
use crate::cpu_share;
use crate::interrupt::Interrupt;

/// For how long it is watched how much CPU time a container uses, before it gets less.
const CPU_SAMPLE: Duration = Duration::from_millis(200);
/// Bytes of pages that are named in the freeze as soon as before it: hundreds of them.
const LITTLE: u64 = 1 << 20;

impl SourceRun {
    /// Sends files and memory while the container runs, and learns what its mappings look like.
    pub(super) fn precopy(&mut self) -> Result<(), Failure> {
        if !self.report.read().mode.has_rounds() && !self.may_be_early() {
            self.probe_link()?;
        }
        let pace = self.pace();
        self.set_pace(pace)?;
        self.settle()?;
        let verdict = self.rounds()?;
        while self.settle_with_others()? {}
        let unfinished = verdict == Some(Verdict::Diverging) && self.may_be_early();
        if verdict.is_none() || unfinished {
            self.settle()?;
        }
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        learn_mappings(&self.id, &mut self.smaps, self.node.mapping_flags.as_ref(), &pids);
        // Memory may have taken long.
        self.settle_trees()?;
        if unfinished {
            self.name_rest()?;
        }
        self.set_pace(None)
    }

    fn set_pace(&mut self, pace: Option<u64>) -> Result<(), Failure> {
        if let Some(files) = &mut self.files {
            files.set_pace(pace)?;
        }
        if let Some(trees) = &mut self.trees {
            trees.set_pace(pace)?;
        }
        if let Some(log) = &mut self.log {
            log.set_pace(pace)?;
        }
        self.streams.iter_mut().try_for_each(|s| s.link().set_pace(pace)).map_err(failed)
    }

    /// Sends memory, and what has changed of the rest, until what a freeze would leave fits the budget, or rounds no longer
    /// help. `None`: there were none.
    fn rounds(&mut self) -> Result<Option<Verdict>, Failure> {
        if !self.report.read().mode.has_rounds() && !self.may_be_early() {
            return Ok(None);
        }
        let container = self.inspected()?.0.clone();
        let pids = || container.processes().map_err(failed);
        let mut tracker = Tracker::new(self.node.tracking);
        let mut rest = Settling::default();
        let (mut seen, mut looked): (Vec<RoundSeen>, Option<Instant>) = (Vec::new(), None);
        // Rounds before this one were under another throttle, and tell nothing of what the next ones will find.
        let (mut counted, mut limits, mut used_up) = (0, self.limits, false);
        let verdict = loop {
            self.interrupt.check()?;
            if !self.report.read().mode.has_rounds() || self.interrupt.hurries() {
                break Verdict::Diverging;
            }
            let start = Instant::now();
            let others = self.send_files()? + self.send_shared()?;
            let processes = pids()?;
            let round = tracker.round(&processes).map_err(failed)?;
            let since = looked.replace(Instant::now()).map(|before| before.elapsed().as_secs_f64());
            let version = if seen.is_empty() { Version::First } else { Version::Later };
            let (moved_before, same_before) = (self.report.read().progress.moved_bytes, self.tally.deduplicated());
            if others > 0 {
                // What is still on its way of them is no matter of the pages.
                await_arrival(&mut self.streams).map_err(|error| self.not_sent(&error))?;
            }
            let sending = Instant::now();
            let Self { id, node, report, tally, streams, smaps, interrupt, .. } = &mut *self;
            let witness = InTime { tracker: &tracker, interrupt };
            let sent = std::thread::scope(|scope| {
                // The watch has left its mark on the flags by now.
                let learn = || learn_mappings(id, smaps, node.mapping_flags.as_ref(), &processes);
                let _learnt = threads::beside(scope, "mappings", learn);
                shown_on((report, tally), round.plan.bytes(), streams, |streams, counters| {
                    let mut chunks = [&round.plan.first, &round.plan.rest].into_iter();
                    chunks.try_for_each(|chunks| send::send_running(chunks, version, streams, counters, &witness))?;
                    await_arrival(streams)?;
                    let [passed_over, content] =
                        [&counters.passed_over, &counters.sent].map(|counter| counter.load(Ordering::Relaxed));
                    Ok((passed_over, content, sending.elapsed()))
                })
            });
            let (passed_over, content, sending) = sent.map_err(|error| self.not_sent(&error))?;
            let (bytes, took) = (round.plan.bytes() + others, start.elapsed());
            let sent = bytes - passed_over;
            let dirty_rate = since.map_or(0.0, |seconds| bytes as f64 / seconds.max(1e-6));
            let same = self.tally.deduplicated() - same_before;
            let pages = round.plan.bytes().saturating_sub(passed_over + same);
            seen.push(RoundSeen { bytes, pages, content, took: sending });
            if seen.len() == 1 {
                self.await_memory()?;
            }
            let settled = rest.is_settled(others);
            used_up = policy::used_up(&seen, self.report.read().options.max_rounds);
            let verdict = match self.may_be_early() {
                true if self.interrupt.hurries() => Verdict::Diverging,
                true => match policy::decide_early(&seen, tracker.left(&pids()?), limits) {
                    Verdict::Converged if !settled => Verdict::Another,
                    verdict => verdict,
                },
                false => match policy::decide(&seen[counted..], limits) {
                    Verdict::Another if used_up => Verdict::Diverging,
                    verdict => verdict,
                },
            };
            let wire: u64 = self.streams.iter_mut().map(|s| s.link().bytes_sent()).sum();
            self.report.change(|r| {
                r.rounds.push(RoundReport { bytes: sent, ms: took.as_secs_f64() * 1e3, dirty_rate });
                r.progress.rounds += 1;
                r.progress.dirty_rate = dirty_rate;
                r.progress.moved_bytes = moved_before + sent - others;
                r.progress.remaining_bytes = 0;
                r.progress.memory_bytes = r.progress.memory_bytes.max(r.progress.moved_bytes);
                r.progress.rate = sent as f64 / took.as_secs_f64().max(1e-6);
                r.progress.wire_bytes = wire;
                show_tally(&self.tally, r);
            });
            match verdict {
                Verdict::Another => {}
                Verdict::Diverging if self.report.read().options.safe && !used_up => {
                    self.throttle(&container, dirty_rate, policy::link_rate(&seen))?;
                    counted = seen.len() - 1;
                }
                // More rounds would send the same again each time: what is written meanwhile follows the resume.
                Verdict::Diverging if self.may_be_early() => {
                    while self.settle_with_others()? {}
                    break verdict;
                }
                verdict if !self.settle_with_others()? => break verdict,
                // What was written while others settled is a matter of as many rounds again.
                _ => limits.max_rounds = limits.max_rounds.saturating_add(seen.len() as u32),
            }
        };
        if verdict == Verdict::Diverging && !seen.is_empty() {
            let what =
                if self.may_be_early() { "the rest follows the resume" } else { "the rest is sent in the freeze" };
            let why = match used_up {
                _ if self.interrupt.hurries() => "the time for the whole move is over".to_owned(),
                true => format!("the rounds that max_rounds allows ({}) are used up", seen.len()),
                false => {
                    let left = seen.last().map_or(0, |last| last.bytes);
                    format!("more rounds would not leave less: the last one found {} KiB written", left >> 10)
                }
            };
            let way = format!("memory: {why}; {what}");
            self.report.change(|r| r.ways.push(way));
        }
        self.converged = verdict == Verdict::Converged;
        // Rounds that were paced, or a first one, which waited for memory on the destination, do not tell how fast the link is.
        if !self.is_early() && self.pace().is_none() && seen.len() > 1 {
            let pids = pids()?;
            self.refuse_too_long(tracker.left(&pids), policy::link_rate(&seen), || Ok(tracker.zeros(&pids)))?;
        }
        self.tracker = Some(tracker);
        Ok(Some(verdict))
    }

    /// Last rounds before the freeze, whose pages are not sent but named: so that in the freeze only what was written since has
    /// to be found and named, however much memory the container has and however fast it writes. To name a page takes a small
    /// part of the time that it takes to write one, so that each of these rounds leaves much less than the one before.
    fn name_rest(&mut self) -> Result<(), Failure> {
        let container = self.inspected()?.0.clone();
        let Some(tracker) = &mut self.tracker else { return Ok(()) };
        let mut version = if self.report.read().rounds.is_empty() { Version::First } else { Version::Later };
        let mut before = u64::MAX;
        loop {
            self.interrupt.check()?;
            let round = tracker.round(&container.processes().map_err(failed)?).map_err(failed)?;
            let rest = Plan { first: Vec::new(), rest: round.plan.rest };
            let sent = send::send_running(&round.plan.first, version, &mut self.streams, &Counters::default(), tracker);
            let named = sent.and_then(|()| send::name(&rest, &mut self.streams));
            if let Err(error) = named.and_then(|()| await_arrival(&mut self.streams)) {
                return Err(self.not_sent(&error));
            }
            self.outbox.add(&rest.rest);
            let left = rest.bytes();
            if left > before / 2 || left <= LITTLE {
                return Ok(());
            }
            (before, version) = (left, Version::Later);
        }
    }

    /// Takes the next share of its CPU time away from a container whose rounds diverge, or refuses to move it.
    fn throttle(&mut self, container: &Container, dirty: f64, link: f64) -> Result<(), Failure> {
        let mb = |rate: f64| rate / 1e6;
        let refuse = |remedy: &str| {
            Err(Failure::new(format!(
                "container {} writes {:.0} MB/s of memory and the link to node {} carries {:.0} MB/s, so that its rest would \
                 not fit the blackout budget of {:.0} ms; {remedy}",
                self.name,
                mb(dirty),
                self.peer,
                mb(link),
                self.limits.budget.as_secs_f64() * 1e3,
            )))
        };
        if self.report.read().options.no_throttle {
            return refuse(
                "allow it to be slowed down (leave out --no-throttle), or its last pages to follow it (leave out --safe)",
            );
        }
        let (Some(cpu), Some(step)) = (&container.cpu, policy::throttle_after(self.throttled)) else {
            return refuse("give a larger --blackout-budget, or let its last pages follow it (leave out --safe)");
        };
        if self.throttled == 0 {
            // Written down first: an agent that follows this one gives it back.
            std::fs::write(self.layout.cpu_limit(), cpu.limit().map_err(failed)?).map_err(failed)?;
            let (used, start) = (cpu.used().map_err(failed)?, Instant::now());
            std::thread::sleep(CPU_SAMPLE);
            let used = cpu.used().map_err(failed)?.saturating_sub(used);
            self.cpus = used.as_secs_f64() / start.elapsed().as_secs_f64();
        }
        cpu.restrict(self.cpus * f64::from(100 - step) / 100.0).map_err(failed)?;
        self.throttled = step;
        let way = format!("cpu: {step} % less for the container, until it is frozen, so that the rounds converge");
        self.report.change(|r| {
            r.ways.retain(|way| !way.starts_with("cpu: "));
            r.ways.push(way);
        });
        Ok(())
    }

    /// Gives a container the CPU time back that it had.
    pub(super) fn unthrottle(&mut self) -> Result<(), Failure> {
        let Ok(limit) = std::fs::read_to_string(self.layout.cpu_limit()) else { return Ok(()) };
        if let Some(cpu) = self.container()?.cpu {
            cpu.restore(&limit).map_err(failed)?;
        }
        self.throttled = 0;
        std::fs::remove_file(self.layout.cpu_limit()).map_err(failed)
    }

    /// Lets the container have all that there is of the CPUs, while it stands still and criu works in its cgroup.
    ///
    /// # Errors
    /// Its limits are others than the destination has been told.
    pub(super) fn lift_cpu_share(&self) -> Result<(), Failure> {
        let container = &self.inspected()?.0;
        if tranship_engine::limits_were_changed(container) {
            return Err(Failure::new(LIMITS_CHANGED));
        }
        if let Some(Err(failure)) = container.cpu.as_ref().map(|cpu| cpu_share::lift(&self.layout, cpu)) {
            tracing::warn!(id = %self.id, %failure, "the dump may take long: it has no more of the CPUs than the container");
        }
        Ok(())
    }

    /// Whether somebody has changed in the freeze what the container may have of the CPUs.
    pub(super) fn cpu_share_was_changed(&self) -> Result<bool, Failure> {
        let container = &self.inspected()?.0;
        Ok(match container.cpu.as_ref().filter(|_| self.layout.cpu_share().exists()) {
            Some(cpu) => cpu_share::was_changed(&self.layout, cpu),
            None => tranship_engine::limits_were_changed(container),
        })
    }

    /// Lists what criu is not to see, or to be told, of processes that have ended.
    fn list_zombies(&mut self) -> Result<(), Failure> {
        self.check_zombies()?;
        let listed = self.zombies.list(&self.layout.images()).map_err(failed)?;
        if listed > 0 {
            self.report.change(|r| r.ways.push(format!("tasks: {listed} zombies are made without criu")));
        }
        Ok(())
    }

    /// Looks which processes have ended.
    ///
    /// # Errors
    /// It would not be kept how one of them ended.
    pub(super) fn find_zombies(&mut self) -> Result<(), Failure> {
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let may_hide = self.may_hide_zombies()?;
        self.zombies.find(&pids, may_hide);
        self.check_zombies()
    }

    /// Whether criu need not see all of them.
    fn may_hide_zombies(&mut self) -> Result<bool, Failure> {
        Ok(crate::layout::preload().is_some() && self.control()?.version() >= Versions::ZOMBIES)
    }

    /// What is in the way of those that were found.
    fn check_zombies(&mut self) -> Result<(), Failure> {
        let (blockers, _) = self.report.read().options.allow.part(self.zombies.with_core_files().collect());
        Failure::blocked(blockers).map_or(Ok(()), Err)?;
        let changed = self.zombies.to_be_told();
        if changed == 0 || self.control()?.version() >= Versions::ENDS {
            return Ok(());
        }
        let peer = &self.peer;
        let cause = format!(
            "{changed} processes have ended by a status of 128 or more, or by signal 64, which the agent of node \
             {peer} is too old to keep"
        );
        let remedy = format!("upgrade the agent on node {peer}, or try again when their parents have waited for them");
        Failure::blocked(vec![Blocker::new(BlockerKind::Process, cause, remedy).passing()]).map_or(Ok(()), Err)
    }

    /// Finds what is still to be sent of the frozen container's memory, and what criu must not see of it; and decides which
    /// files in memory it must not see. These are looks at the same stopped tasks that have nothing to do with each other.
    pub(super) fn survey(&mut self) -> Result<(), Failure> {
        let start = monotonic_ns();
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let (others, there) = (self.others_in_memory(), self.shared_segments()?);
        let segments = self.segments(others.clone(), there.clone());
        let may_hide = self.may_hide_zombies()?;
        // The owner of a network has noted them of those that join it, which it has frozen.
        let freezer = (!self.joins_network()).then(|| self.inspected().map(|(container, _)| container.freezer.clone()));
        let freezer = freezer.transpose()?;
        let Self { tracker, shared, files, smaps, node, layout, zombies, .. } = self;
        let (round, described, told, files) = std::thread::scope(|scope| {
            let described = threads::beside(scope, "shared", || -> Result<_, Failure> {
                schedule::stand(Standing::Realtime);
                let Some(shared) = shared else { return Ok(Vec::new()) };
                shared.take_segments(segments);
                let described = shared.find(&pids, Where::Mappings).map_err(failed)?;
                shared.look(Look::Last).map_err(failed)?;
                match shared.has_number_of(&there) {
                    None => Ok(described),
                    Some(number) => Err(Failure::new(format!(
                        "a segment and another file in memory have the same number {number}, by which criu knows them; try again \
                         when one of them is gone"
                    ))),
                }
            });
            let rest = threads::beside(scope, "survey", || {
                schedule::stand(Standing::Realtime);
                let told = tell_mappings(smaps, node.mapping_flags.as_ref(), &layout.hidden(), &pids);
                let begun = monotonic_ns();
                (told, files.as_mut().map(|files| (files.decide(&pids, &others), begun, monotonic_ns())))
            });
            // Once more: some may have come or gone since.
            let ended = threads::beside(scope, "ended", || {
                zombies.find(&pids, may_hide);
                freezer.map_or(Ok(()), |freezer| original::note_stopped(&freezer, layout))
            });
            let round = last_round(tracker.as_mut(), &pids);
            let noted = ended.join();
            let (told, files) = rest.join();
            (round.and_then(|round| noted.map(|()| round)), described.join(), told, files)
        });
        let round = round?;
        let told = told?;
        let reader = self.node.mapping_flags.as_ref();
        let joined = |space: &&survey::Space| told.get(&space.pid).copied().unwrap_or_else(|| is_joined(reader, space));
        let joined: Vec<u32> = round.spaces.iter().filter(joined).map(|space| space.id.0).collect();
        self.list_zombies()?;
        tranship_criu::hidden::list_joined(&self.layout.images(), &joined).map_err(failed)?;
        self.describe_shared(&described?)?;
        let objects = self.shared.as_ref().map(SharedMemory::hidden).unwrap_or_default();
        let mut hidden: Vec<_> = round.spaces.iter().map(|s| (s.pid, s.ranges.clone())).collect();
        hidden.extend(self.shared.iter().flat_map(SharedMemory::hidden_ranges));
        tranship_criu::hidden::write(&self.layout.hidden(), &hidden, &objects)
            .map_err(|e| Failure::new(format!("the table of hidden pages cannot be written: {e}")))?;
        self.last_round = Some(round);
        self.timeline.note("memory: survey", start, monotonic_ns());
        if let Some((decided, begun, done)) = files {
            self.timeline.note("tmpfs: survey", begun, done);
            let ways = decided?;
            self.report.change(|r| r.ways.extend(ways));
        }
        Ok(())
    }
}

/// Sends pages only as long as the rounds may go on. What is left out is found by the last round.
struct InTime<'a> {
    tracker: &'a Tracker,
    interrupt: &'a Interrupt,
}

impl Witness for InTime<'_> {
    fn due(&self, chunk: &Chunk) -> Vec<PageRange> {
        if !self.interrupt.hurries() {
            return self.tracker.due(chunk);
        }
        self.tracker.missed(chunk);
        Vec::new()
    }

    fn read(&self, space: AddressSpaceId, address: u64, pages: &[u8]) {
        self.tracker.read(space, address, pages);
    }

    fn missed(&self, chunk: &Chunk) {
        self.tracker.missed(chunk);
    }
}

/// Has the flags of all mappings known before the freeze. The first look costs time for each page, a later one only where
/// something is new: so that as little as possible happens between the last round and the freeze.
fn learn_mappings(id: &MigrationId, smaps: &mut Smaps, reader: Option<&FlagsReader>, pids: &[u32]) {
    let Some(reader) = reader else { return };
    for &pid in pids {
        if smaps.text(reader, pid).is_none()
            && let Err(error) = smaps.learn(reader, pid)
        {
            tracing::debug!(%id, pid, %error, "the flags of its mappings stay unknown");
        }
    }
}

fn last_round(tracker: Option<&mut Tracker>, pids: &[u32]) -> Result<Round, Failure> {
    let Some(tracker) = tracker else {
        let spaces = survey::survey(pids).map_err(failed)?;
        let plan = send::plan(&spaces).map_err(failed)?;
        return Ok(Round { plan, spaces, ..Round::default() });
    };
    tracker.last_round(pids).map_err(failed)
}

/// Tells criu what the frozen tasks' mappings are; where that is not known, it asks the kernel itself. Where it is, returns
/// whether a process has parts of mappings that may be joined again.
fn tell_mappings(
    smaps: &Smaps,
    reader: Option<&FlagsReader>,
    table: &Path,
    pids: &[u32],
) -> Result<HashMap<u32, bool>, Failure> {
    let mut joined = HashMap::new();
    let Some(reader) = reader else { return Ok(joined) };
    for &pid in pids {
        if let Some(text) = smaps.text(reader, pid) {
            tranship_criu::smaps::write(table, pid, &text)
                .map_err(|e| Failure::new(format!("the mappings of process {pid} cannot be told to criu: {e}")))?;
            joined.insert(pid, has_protected_part(&text));
        }
    }
    Ok(joined)
}

/// The same, by the kernel's word of flags.
fn is_joined(reader: Option<&FlagsReader>, space: &survey::Space) -> bool {
    let adjoining = space.adjoining();
    if adjoining.is_empty() {
        return false;
    }
    let flags = reader.and_then(|reader| reader.read(space.pid).ok()).unwrap_or_default();
    flags.iter().any(|of| is_protected(of.flags) && adjoining.iter().any(|range| range.start == of.start))
}
