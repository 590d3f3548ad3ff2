//! The container's memory while it runs, and what is left of it to send when it is frozen.

use std::sync::atomic::Ordering;
use std::time::Instant;

use tranship_coordinator::Failure;
use tranship_memory::policy::{self, RoundSeen, Verdict};
use tranship_memory::send::{self, Counters, Version};
use tranship_memory::shared::source::{SharedMemory, Where};
use tranship_memory::survey;
use tranship_memory::tracker::{Round, TrackError, Tracker};
use tranship_sys::clock::monotonic_ns;
use tranship_types::RoundReport;

use super::{SourceRun, failed};

impl SourceRun {
    /// Sends memory while the container runs, until what a freeze would leave fits the budget, or rounds no longer help.
    pub(super) fn precopy(&mut self) -> Result<(), Failure> {
        if !self.report.read().mode.has_rounds() {
            return Ok(());
        }
        if !Tracker::supported() {
            self.report.change(|r| r.ways.push("memory: no rounds, this kernel cannot track writes".to_owned()));
            return Ok(());
        }
        let container = self.inspected()?.0.clone();
        let mut tracker = Tracker::default();
        let (mut seen, mut looked): (Vec<RoundSeen>, Option<Instant>) = (Vec::new(), None);
        let mut verdict = Verdict::Another;
        while verdict == Verdict::Another {
            let round = match tracker.round(&container.processes().map_err(failed)?) {
                Err(TrackError::Unsupported) => {
                    self.report.change(|r| r.ways.push(format!("memory: no rounds; {}", TrackError::Unsupported)));
                    return Ok(());
                }
                other => other.map_err(failed)?,
            };
            let since = looked.replace(Instant::now()).map(|before| before.elapsed().as_secs_f64());
            let version = if seen.is_empty() { Version::First } else { Version::Later };
            let start = Instant::now();
            let counters = Counters::default();
            for chunks in [&round.plan.first, &round.plan.rest] {
                send::send(chunks, version, &mut self.streams, &counters).map_err(failed)?;
            }
            let shared = Counters::default();
            self.send_shared(&shared)?;
            let (bytes, took) = (round.plan.bytes() + shared.sent.load(Ordering::Relaxed), start.elapsed());
            let dirty_rate = since.map_or(0.0, |seconds| bytes as f64 / seconds.max(1e-6));
            seen.push(RoundSeen { bytes, took });
            verdict = policy::decide(&seen, self.limits);
            let wire: u64 = self.streams.iter_mut().map(|s| s.link().bytes_sent()).sum();
            self.report.change(|r| {
                r.rounds.push(RoundReport { bytes, ms: took.as_secs_f64() * 1e3, dirty_rate });
                r.progress.rounds += 1;
                r.progress.dirty_rate = dirty_rate;
                r.progress.moved_bytes += bytes;
                r.progress.memory_bytes = r.progress.memory_bytes.max(r.progress.moved_bytes);
                r.progress.rate = bytes as f64 / took.as_secs_f64().max(1e-6);
                r.progress.wire_bytes = wire;
            });
        }
        if verdict == Verdict::Diverging {
            let way = "memory: rounds no longer helped, the container writes too fast for the link";
            self.report.change(|r| r.ways.push(way.to_owned()));
        }
        self.converged = verdict == Verdict::Converged;
        self.tracker = Some(tracker);
        Ok(())
    }

    /// Finds what is still to be sent of the frozen container's memory, and what criu must not see of it.
    pub(super) fn survey(&mut self) -> Result<(), Failure> {
        let survey_start = monotonic_ns();
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let round = match &mut self.tracker {
            Some(tracker) => tracker.last_round(&pids).map_err(failed)?,
            None => {
                let spaces = survey::survey(&pids).map_err(failed)?;
                let plan = send::plan(&spaces).map_err(failed)?;
                Round { plan, spaces, ..Round::default() }
            }
        };
        self.find_shared(Where::Mappings)?;
        let objects = self.shared.as_ref().map(SharedMemory::hidden).unwrap_or_default();
        let hidden: Vec<_> = round.spaces.iter().map(|s| (s.pid, s.ranges.clone())).collect();
        tranship_criu::hidden::write(&self.layout.hidden(), &hidden, &objects)
            .map_err(|e| Failure::new(format!("the table of hidden pages cannot be written: {e}")))?;
        self.last_round = Some(round);
        self.timeline.note("memory: survey", survey_start, monotonic_ns());
        Ok(())
    }
}
