//! After the resume: pages that the container still needs are here, and its original is kept until it has them all.

use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_memory::send::{self, Outbox, Stream};
use tranship_memory::survey;
use tranship_sys::schedule::Standing;
use tranship_transport::{Connection, Link};
use tranship_types::{AddressSpaceId, WaitKind, Waiting};
use tranship_wire::message::{Account, Request, Response};
use tranship_wire::{Purpose, URGENT_STREAM};

use super::push::{self, Demand, Push};
use super::streams::show_tally;
use super::{FROZEN_PATIENCE, SourceRun, failed};
use crate::inspection::STREAMS;
use crate::registry::unix_ms;

/// How long pages may take to arrive after the last of them was sent.
const LOST: Duration = Duration::from_secs(3);
/// How long no page at all may arrive before new links are tried.
const STUCK: Duration = Duration::from_secs(20);
/// Over how long the rate is measured at which pages arrive.
const A_SECOND: Duration = Duration::from_secs(1);
/// Bytes per ns of a link that is taken for fast.
const FAST_LINK: u64 = 1;
/// Bytes that a stream may have in flight, at least: enough for a fast link in one room.
const LEAST_IN_FLIGHT: u64 = 128 << 10;
/// And at most: as many as where nothing else is in its way.
const MOST_IN_FLIGHT: u64 = 4 << 20;

/// How fast the last pages arrive.
#[derive(Default)]
struct Arriving {
    before: Option<(u64, Instant)>,
    rate: f64,
}

impl Arriving {
    /// The rate in bytes a second, now that so many bytes are lacking; it is that of about a second.
    fn rate(&mut self, lacking: u64) -> f64 {
        let (before, since) = *self.before.get_or_insert_with(|| (lacking, Instant::now()));
        if since.elapsed() >= A_SECOND {
            self.rate = before.saturating_sub(lacking) as f64 / since.elapsed().as_secs_f64();
            self.before = Some((lacking, Instant::now()));
        }
        self.rate
    }
}

impl SourceRun {
    /// Serves pages until the destination has every one. May be begun again, after a link broke or the agent was restarted:
    /// the destination then says what it lacks.
    pub(super) fn drain(&mut self) -> Result<(), Failure> {
        if self.drain_confirmed {
            return Ok(());
        }
        if !self.is_early() {
            // What was carried must be on the destination's disk before anything of the original's goes.
            while self.layout.left_directories().exists() && self.ask_drained(false)?.is_some() {}
            return Ok(());
        }
        self.push.iter().for_each(|push| push.begin(Standing::Ordinary));
        self.stand_aside()?;
        let mut seen = (u64::MAX, Instant::now());
        let mut arriving = Arriving::default();
        loop {
            self.keep_frozen();
            let Some(lacking) = self.ask_drained(false)? else { return Ok(()) };
            self.node.words.forget(&self.id);
            let (wire, rate) = (self.push.as_ref().map(|push| push.gauge().wire_bytes()), arriving.rate(lacking));
            self.report.change(|r| {
                r.error = None;
                r.progress.moved_bytes = r.progress.memory_bytes.saturating_sub(lacking);
                r.progress.rate = rate;
                r.progress.wire_bytes = wire.unwrap_or(r.progress.wire_bytes);
            });
            // While the destination cannot take pages, to send them again is of no use.
            if lacking != seen.0 || !self.wants_pages() {
                seen = (lacking, Instant::now());
            }
            let push = self.push.as_mut();
            let why = match push.map(|push| (push.broken(), push.is_sent())) {
                None => Some("it was not begun".to_owned()),
                Some((Some(why), _)) => Some(why),
                // What was given to a link that then broke may be lost without anybody's having been told.
                Some((None, true)) if lacking > 0 && seen.1.elapsed() > LOST => {
                    Some("what was sent did not arrive".to_owned())
                }
                Some((None, false)) if seen.1.elapsed() > STUCK => Some("nothing has arrived for long".to_owned()),
                Some(_) => None,
            };
            if let Some(why) = why {
                tracing::warn!(id = %self.id, %why, "pages are no longer being sent; beginning again");
                self.push = None;
                self.push = Some(self.push_again()?);
                seen.1 = Instant::now();
            }
        }
    }

    /// Other containers of this node shall find the new copy from now on, and so shall what was sent here before its sender
    /// had heard of the move.
    fn stand_aside(&mut self) -> Result<(), Failure> {
        if let Some(namespace) = self.container()?.network_namespace().filter(|path| path.exists()) {
            tranship_network::stand_aside(&namespace).map_err(failed)?;
        }
        if let Err(failure) = self.forward_held() {
            tracing::info!(id = %self.id, %failure, "the last held packets were not delivered");
        }
        Ok(())
    }

    /// Asks whether every page is in place: `None` if so, else how many bytes are lacking. If the original is `released`, the
    /// destination may then forget the migration.
    pub(super) fn ask_drained(&mut self, released: bool) -> Result<Option<u64>, Failure> {
        if self.control.is_none() {
            self.control = Some(self.node.dial(&self.peer, Purpose::Control, Some(&self.id))?);
        }
        let account = released.then(|| Box::new(Account::of(&self.report.read())));
        match self.ask(&Request::Drained { released, account }, FROZEN_PATIENCE) {
            Ok(Response::Draining { remote_bytes, remote_faults, waiting_for, .. }) => {
                self.report.change(|r| {
                    r.waiting = waiting_for;
                    r.progress.remote_faults = remote_faults.count();
                    r.progress.remaining_bytes = remote_bytes;
                    show_tally(&self.tally, r);
                });
                Ok(Some(remote_bytes))
            }
            Ok(Response::Drained { peak_bytes, faults, remote_faults, remarks, ended }) => {
                self.release_told |= released;
                self.note_end(ended.as_ref());
                if std::mem::replace(&mut self.drain_confirmed, true) {
                    return Ok(None);
                }
                self.report.change(|r| {
                    r.destination_extra_bytes = peak_bytes + r.skeleton_bytes;
                    r.progress.moved_bytes = r.progress.memory_bytes;
                    r.progress.remaining_bytes = 0;
                    if remote_faults.count() > 0 {
                        r.progress.remote_faults = remote_faults.count();
                        r.remote_faults = Some(remote_faults.into());
                    }
                    r.ways.extend(remarks);
                    r.ways.push(format!("{faults} pages were asked for before they had been put in place"));
                });
                Ok(None)
            }
            Ok(other) => Err(self.unexpected(&other)),
            Err(failure) => {
                // A late answer on this link is not to be taken for that to the next question.
                self.control = None;
                Err(failure)
            }
        }
    }

    /// Whether the destination waits for pages, as far as it has said.
    fn wants_pages(&self) -> bool {
        self.report
            .read()
            .waiting
            .is_none_or(|waiting| matches!(waiting.kind, WaitKind::Pages | WaitKind::Placing | WaitKind::Disk))
    }

    /// Puts on record how the container has ended on the destination, if it has. The destination may forget that with its next answer.
    fn note_end(&self, ended: Option<&String>) {
        self.report.change(|r| {
            r.waiting = None;
            if ended.is_some() {
                r.ended = ended.cloned();
            }
        });
        if ended.is_some()
            && let Err(error) = self.report.save()
        {
            tracing::warn!(id = %self.id, %error, "how the container ended cannot be kept");
        }
    }

    /// What a step that failed, and is tried again, waits for.
    pub fn waits(&mut self, failure: &Failure) -> Waiting {
        let before = self.report.read().waiting.filter(|waiting| waiting.kind == WaitKind::Source);
        let since_unix_ms = before.map_or_else(unix_ms, |waiting| waiting.since_unix_ms);
        let peer = &self.peer;
        self.awaited.take().unwrap_or_else(|| Waiting {
            kind: WaitKind::Source,
            what: failure.message.clone(),
            since_unix_ms,
            remedy: format!(
                "see that node {peer} and its agent run, and the link to it; `tranship status` there tells more"
            ),
        })
    }

    /// Sends what the destination says that it lacks, over new links.
    fn push_again(&mut self) -> Result<Push, Failure> {
        let pids = self.container()?.processes().map_err(failed)?;
        let spaces = survey::survey(&pids).map_err(failed)?;
        let crew = push::crew(STREAMS)?;
        let mut wants = self.node.dial(&self.peer, Purpose::Wants { resume: true }, Some(&self.id))?;
        wants.set_timeout(Some(FROZEN_PATIENCE)).map_err(failed)?;
        let mut missing: Vec<(AddressSpaceId, Vec<_>)> = Vec::new();
        while let Some(list) = tranship_wire::runs::read_wants(&mut wants)
            .map_err(|e| Failure::new(format!("node {} did not say what it lacks: {e}", self.peer)))?
        {
            missing.push(list);
        }
        wants.set_timeout(None).map_err(failed)?;
        let mut streams = (0..STREAMS).map(|stream| self.page_stream(stream)).collect::<Result<Vec<_>, _>>()?;
        self.make_way(&mut streams)?;
        let urgent = self.page_stream(URGENT_STREAM)?;
        let outbox = Outbox::default();
        outbox.add(&send::lacking(&spaces, &missing));
        let push = Push::start(outbox, streams, Some(Demand { wants, urgent }), Vec::new, crew);
        push.begin(Standing::Ordinary);
        Ok(push)
    }

    /// Keeps the streams of what nobody waits for from being in the way: of pages that are asked for, which would queue
    /// behind all that is in flight, and of other users of the link.
    pub(super) fn make_way(&self, streams: &mut [Stream<Connection>]) -> Result<(), Failure> {
        let pace = self.pace();
        // What a fast link holds, twice.
        let in_flight = (self.clock.error_ns * 2 * 2 * FAST_LINK).clamp(LEAST_IN_FLIGHT, MOST_IN_FLIGHT) as usize;
        for stream in streams {
            let link = stream.link();
            link.set_pace(pace)
                .and_then(|()| link.set_in_flight(in_flight))
                .and_then(|()| link.give_way())
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Bytes a second that each stream may take while the container runs.
    pub(super) fn pace(&self) -> Option<u64> {
        self.report.read().options.bandwidth.map(|whole| whole.bytes_per_second() / u64::from(STREAMS))
    }

    /// Opens the links for demands, where pages may follow the resume.
    pub(super) fn open_demand(&self) -> Result<Demand, Failure> {
        let wants = self.node.dial(&self.peer, Purpose::Wants { resume: false }, Some(&self.id))?;
        Ok(Demand { wants, urgent: self.page_stream(URGENT_STREAM)? })
    }
}
