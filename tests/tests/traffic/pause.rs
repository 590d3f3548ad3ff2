//! A pause of seconds, in which the timers of whoever sends have backed off.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{Stage, remove, restart_agent};
use tranship_workloads::traffic::{Course, Service, Stream, Way};

use super::{IP, NAME, ask, connect, echoes, moves, run};

/// Bytes a second of what the client sends: more in the pause than buffers take.
const RATE: u32 = 8 << 20;
const PAUSE_MS: f64 = 3000.0;
/// How long after the resume a stream may stand still. Timers that nobody stops wait for two to three seconds more.
const STANDSTILL_MS: f64 = 1000.0;

/// Asks again and again until it is to stop; when replies came.
fn asks(stream: &TcpStream, stop: &AtomicBool) -> Result<Course> {
    let mut course = Course::begin();
    for word in (1..).take_while(|_| !stop.load(Ordering::SeqCst)) {
        echoes(stream, word)?;
        course.note(1);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(course)
}

pub(super) fn peers_go_on_at_once(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    restart_agent(lab, "b", &format!("destination.restore.before.delay-{PAUSE_MS}"))?;
    run(lab, "a", NAME, IP, false)?;
    let asking = ask(lab, IP, Service::Echo)?;
    let mut streams = Vec::new();
    for (way, rate) in [(Way::In, None), (Way::Out, Some(RATE)), (Way::Both, Some(RATE))] {
        streams.push((way, Stream::begin(connect(lab, IP)?, way, rate, &[])?));
    }
    std::thread::sleep(Duration::from_millis(500));
    let stop = AtomicBool::new(false);
    let (report, replies) = std::thread::scope(|scope| {
        let client = scope.spawn(|| asks(&asking, &stop));
        let report = moves(lab, NAME, "a", "b");
        std::thread::sleep(Duration::from_secs(4));
        stop.store(true, Ordering::SeqCst);
        (report, client.join())
    });
    let blackout = report?.blackout_ms.unwrap_or_default();
    let Ok(replies) = replies else { bail!("the client panicked") };
    ensure!(blackout > PAUSE_MS, "the restore was not delayed: a blackout of {blackout} ms");
    let mut courses = vec![("requests".to_owned(), replies?)];
    for (way, stream) in streams {
        courses.push((format!("stream {way:?}"), stream.end().with_context(|| format!("the stream {way:?}"))?));
    }
    // What comes from the container as fast as it goes stops with the freeze.
    let frozen = courses[1].1.longest_gap_begun(0.0).context("nothing stood still")?;
    let resumed = frozen + blackout / 1e3;
    for (name, course) in courses {
        let begun = course.longest_gap_begun(0.0).with_context(|| format!("{name} did not stand still"))?;
        let beyond = (begun - resumed) * 1e3 + course.longest_gap_ms() as f64;
        eprintln!("{name}: stood still for {beyond:.0} ms after the resume");
        ensure!(beyond < STANDSTILL_MS, "{name} stood still for {beyond:.0} ms after the resume");
    }
    restart_agent(lab, "b", "")?;
    remove(lab, NAME)
}
