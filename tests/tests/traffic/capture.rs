//! What a capture shows of a move: neither a reset nor a segment that is sent a second time.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{Capture, Stage, exactly_one_runs, remove, restart_agent};
use tranship_lab::Lab;
use tranship_workloads::traffic::Service;

use super::{IP, NAME, ask, echoes, moves, run};

/// How often each of the clients asks.
const INTERVALS: [Duration; 3] = [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(150)];
/// What waits for longer the client's kernel sends again, whatever is done: its timers begin at 200 ms.
const SHORT_MS: f64 = 190.0;
const MOVES: [(&str, &str); 6] = [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")];

/// A segment with data, by the text of tcpdump: its flow, and the numbers of its first byte and of the one behind its last.
fn data(line: &str) -> Option<(&str, u32, u32)> {
    let (flow, rest) = line.split_once(" IP ")?.1.split_once(": Flags ")?;
    let (begin, end) = rest.split_once(" seq ")?.1.split_once(',')?.0.split_once(':')?;
    Some((flow, begin.parse().ok()?, end.parse().ok()?))
}

/// The segments that bring what one before them has brought already.
fn sent_again(lines: &[String]) -> Vec<&str> {
    let mut sent: HashMap<&str, u32> = HashMap::new();
    let mut again = Vec::new();
    for line in lines {
        let Some((flow, begin, end)) = data(line) else { continue };
        let next = sent.entry(flow).or_insert(begin);
        // Numbers begin anew behind the largest.
        if begin.wrapping_sub(*next).cast_signed() < 0 {
            again.push(line.as_str());
        }
        if end.wrapping_sub(*next).cast_signed() > 0 {
            *next = end;
        }
    }
    again
}

fn ask_on(stream: &TcpStream, interval: Duration, stop: &AtomicBool) -> Result<()> {
    for word in (1..).take_while(|_| !stop.load(Ordering::SeqCst)) {
        echoes(stream, word)?;
        std::thread::sleep(interval);
    }
    Ok(())
}

/// A move under clients that ask; its blackout in ms, and what was captured.
fn captured_move(lab: &Lab, from: &str, to: &str, streams: &[TcpStream]) -> Result<(f64, Vec<String>)> {
    let stop = AtomicBool::new(false);
    let pause = || std::thread::sleep(Duration::from_millis(400));
    std::thread::scope(|scope| {
        let asking: Vec<_> = streams
            .iter()
            .zip(INTERVALS)
            .map(|(stream, interval)| {
                scope.spawn({
                    let stop = &stop;
                    move || ask_on(stream, interval, stop)
                })
            })
            .collect();
        let capture = Capture::begin(&format!("host {IP} and tcp"))?;
        pause();
        let report = moves(lab, NAME, from, to);
        pause();
        stop.store(true, Ordering::SeqCst);
        for client in asking {
            let Ok(asked) = client.join() else { bail!("a client panicked") };
            asked?;
        }
        // What ended connections of others still say is not looked at.
        let ports = streams.iter().map(|stream| Ok(format!(".{}", stream.local_addr()?.port())));
        let ports = ports.collect::<Result<Vec<_>>>()?;
        let is_ours = |line: &String| line.split([' ', ':']).any(|word| ports.iter().any(|port| word.ends_with(port)));
        let lines = capture.end()?.into_iter().filter(is_ours).collect();
        Ok((report?.blackout_ms.context("the report tells no blackout")?, lines))
    })
}

pub(super) fn of_a_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let mut streams = INTERVALS.iter().map(|_| ask(lab, IP, Service::Echo)).collect::<Result<Vec<_>>>()?;
    // The last one is idle while the container moves.
    streams.push(ask(lab, IP, Service::Echo)?);
    streams.iter().try_for_each(|stream| echoes(stream, 0))?;
    let mut short = 0;
    for ((from, to), word) in MOVES.into_iter().zip(1..) {
        let (blackout, lines) = captured_move(lab, from, to, &streams)?;
        streams.last().map_or(Ok(()), |idle| echoes(idle, word)).context("the idle connection")?;
        let count = lines.iter().filter(|line| data(line).is_some()).count();
        ensure!(count > 200, "only {count} segments with data were captured");
        let resets: Vec<_> = lines.iter().filter(|line| line.contains("Flags [R")).collect();
        ensure!(resets.is_empty(), "resets were seen: {resets:#?}");
        let again = sent_again(&lines);
        eprintln!("{from} → {to}: blackout {blackout:.0} ms, {count} segments, sent again {}", again.len());
        if blackout < SHORT_MS {
            short += 1;
            ensure!(again.is_empty(), "in a blackout of {blackout:.0} ms these were sent again: {again:#?}");
        }
        if short == 2 {
            break;
        }
    }
    ensure!(short > 0, "none of {} blackouts was shorter than {SHORT_MS} ms", MOVES.len());
    // That such segments would have been seen.
    let (from, to) = if exactly_one_runs(lab, NAME)? == "a" { ("a", "b") } else { ("b", "a") };
    restart_agent(lab, to, "destination.restore.before.delay-600")?;
    let (blackout, lines) = captured_move(lab, from, to, &streams)?;
    restart_agent(lab, to, "")?;
    ensure!(!sent_again(&lines).is_empty(), "nothing was sent again in a blackout of {blackout:.0} ms");
    ensure!(!lines.iter().any(|line| line.contains("Flags [R")), "resets were seen");
    remove(lab, NAME)
}
