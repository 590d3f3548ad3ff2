//! How far memory is, while it travels.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use tranship_memory::compress::Tally;
use tranship_memory::send::{Counters, Stream};
use tranship_sys::threads;
use tranship_transport::{Connection, Link};

use super::push::Gauge;
use super::streams::show_tally;
use crate::registry::LiveReport;

/// Progress is shown so often.
const TICK: Duration = Duration::from_millis(100);
/// The rate is that of so many of these: a second.
const TICKS: usize = 10;

/// Where it is shown, and what of the pages did not travel as it is.
pub(super) type Shown<'a> = (&'a LiveReport, &'a Tally);

/// Does something that sends memory, counted by the gauge, and meanwhile shows how far it is, of `bytes` in all.
pub(super) fn shown<T>((report, tally): Shown<'_>, gauge: &Gauge, bytes: u64, send: impl FnOnce() -> T) -> T {
    let before = report.read().progress.moved_bytes;
    std::thread::scope(|scope| {
        let (done, waiting) = mpsc::channel::<()>();
        // Ends when the sender is dropped.
        let showing = move || show((report, tally), gauge, (before, bytes), &waiting);
        if let Err(error) = threads::start_within(scope, "progress", showing) {
            tracing::debug!(%error, "progress is not shown");
        }
        let sent = send();
        drop(done);
        sent
    })
}

/// The same for what is sent here and now, on all the streams.
pub(super) fn shown_on<T>(
    to: Shown<'_>,
    bytes: u64,
    streams: &mut [Stream<Connection>],
    send: impl FnOnce(&mut [Stream<Connection>], &Counters) -> T,
) -> T {
    let counters = Arc::new(Counters::default());
    let gauge = Gauge::new(Arc::clone(&counters), streams.iter_mut().map(|s| s.link().counters()).collect());
    shown(to, &gauge, bytes, || send(streams, &counters))
}

/// Shows it until the other end of `done` is gone.
pub(super) fn show((report, tally): Shown<'_>, gauge: &Gauge, (before, bytes): (u64, u64), done: &Receiver<()>) {
    let mut within = VecDeque::from([0; TICKS]);
    while done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let (read, wire) = (gauge.read_bytes(), gauge.wire_bytes());
        let second_ago = within.pop_front().unwrap_or_default();
        within.push_back(read);
        report.change(|r| {
            r.progress.moved_bytes = before + read;
            r.progress.memory_bytes = r.progress.memory_bytes.max(before + read);
            r.progress.remaining_bytes = bytes.saturating_sub(read);
            r.progress.rate = read.saturating_sub(second_ago) as f64 / (TICK * TICKS as u32).as_secs_f64();
            r.progress.wire_bytes = wire;
            show_tally(tally, r);
        });
    }
}
