//! What a capture shows of a move: neither a reset nor a segment that is sent a second time, but for a probe of who sends without waiting.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{Capture, Stage, exactly_one_runs, remove, restart_agent};
use tranship_lab::Lab;
use tranship_workloads::traffic::{Service, Stream, Way};

use super::{IP, NAME, ask, connect, echoes, moves, run};

/// How often each of the clients asks.
const INTERVALS: [Duration; 3] = [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(150)];
/// Bytes a second on the connections on which one side only sends, some 2 KB at a time.
const RATE: u32 = 1_000_000;
/// What waits for longer the client's kernel sends again, whatever is done: its timers begin at 200 ms.
const SHORT_MS: f64 = 190.0;
const MOVES: [(&str, &str); 6] = [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")];

/// A segment with data, by the text of tcpdump: its flow, and the numbers of its first byte and of the one behind its last.
fn data(line: &str) -> Option<(&str, u32, u32)> {
    let (flow, rest) = line.split_once(" IP ")?.1.split_once(": Flags ")?;
    let (begin, end) = rest.split_once(" seq ")?.1.split_once(',')?.0.split_once(':')?;
    Some((flow, begin.parse().ok()?, end.parse().ok()?))
}

/// What has been sent of a flow.
struct Sent {
    /// The number behind the last byte.
    end: u32,
    /// From where to where it lacks bytes before that: other segments have overtaken them, as where several processors send.
    lacks: Vec<(u32, u32)>,
}

/// What a segment brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brings {
    New,
    /// Only what came last: so kernels probe when nothing has been acknowledged for a while (tail loss probe, RFC 8985).
    Tail,
    Old,
}

impl Sent {
    /// Adds a segment.
    fn adds(&mut self, begin: u32, end: u32) -> Brings {
        // Numbers begin anew behind the largest.
        let is_before = |a: u32, b: u32| a.wrapping_sub(b).cast_signed() < 0;
        if !is_before(begin, self.end) {
            if begin != self.end {
                self.lacks.push((self.end, begin));
            }
            self.end = end;
            return Brings::New;
        }
        let lack = self.lacks.iter().position(|(from, to)| !is_before(begin, *from) && !is_before(*to, end));
        if let Some((from, to)) = lack.map(|at| self.lacks.swap_remove(at)) {
            self.lacks.extend([(from, begin), (end, to)].iter().filter(|(from, to)| from != to));
            return Brings::New;
        }
        if is_before(self.end, end) {
            self.end = end;
            return Brings::Old;
        }
        if end == self.end { Brings::Tail } else { Brings::Old }
    }
}

/// The segments that bring what others before them have brought already.
fn sent_again(lines: &[String]) -> Vec<(Brings, &str)> {
    let mut sent: HashMap<&str, Sent> = HashMap::new();
    let mut again = Vec::new();
    for line in lines {
        let Some((flow, begin, end)) = data(line) else { continue };
        let brings = sent.entry(flow).or_insert(Sent { end: begin, lacks: Vec::new() }).adds(begin, end);
        if brings != Brings::New {
            again.push((brings, line.as_str()));
        }
    }
    again
}

/// Whether a segment with data is of a connection from this port.
fn is_of(line: &str, port: u16) -> bool {
    let end = format!(".{port}");
    data(line).is_some_and(|(flow, ..)| flow.split(' ').any(|word| word.ends_with(&end)))
}

fn ask_on(stream: &TcpStream, interval: Duration, stop: &AtomicBool) -> Result<()> {
    for word in (1..).take_while(|_| !stop.load(Ordering::SeqCst)) {
        echoes(stream, word)?;
        std::thread::sleep(interval);
    }
    Ok(())
}

/// A move under clients that ask; its blackout in ms, and what was captured of these connections and of those from `ports`.
fn captured_move(
    lab: &Lab,
    (from, to): (&str, &str),
    streams: &[TcpStream],
    ports: [u16; 2],
) -> Result<(f64, Vec<String>)> {
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
        let asking = streams.iter().map(|stream| Ok(stream.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
        let ports: Vec<_> = asking.iter().chain(&ports).map(|port| format!(".{port}")).collect();
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
    let fed = Stream::begin(connect(lab, IP)?, Way::In, Some(RATE), &[])?;
    let feeding = Stream::begin(connect(lab, IP)?, Way::Out, Some(RATE), &[])?;
    let ports = [fed.port()?, feeding.port()?];
    let (mut short, mut clean) = (0, 0);
    for ((from, to), word) in MOVES.into_iter().zip(1..) {
        let (blackout, lines) = captured_move(lab, (from, to), &streams, ports)?;
        streams.last().map_or(Ok(()), |idle| echoes(idle, word)).context("the idle connection")?;
        let count = lines.iter().filter(|line| data(line).is_some()).count();
        ensure!(count > 200, "only {count} segments with data were captured");
        let [fed, feeding] = ports.map(|port| lines.iter().filter(|line| is_of(line, port)).count());
        ensure!(fed > 100 && feeding > 100, "only {fed} and {feeding} segments of those that only send were captured");
        let resets: Vec<_> = lines.iter().filter(|line| line.contains("Flags [R")).collect();
        ensure!(resets.is_empty(), "resets were seen: {resets:#?}");
        let one_way = |line: &&str| ports.iter().any(|port| is_of(line, *port));
        let (of_one_way, again): (Vec<_>, Vec<_>) = sent_again(&lines).into_iter().partition(|(_, line)| one_way(line));
        let (probes, of_one_way): (Vec<_>, Vec<_>) =
            of_one_way.into_iter().partition(|(brings, _)| *brings == Brings::Tail);
        eprintln!(
            "{from} → {to}: blackout {blackout:.0} ms, {count} segments, sent again {}, of one-way streams {}, as probes {}",
            again.len(),
            of_one_way.len(),
            probes.len()
        );
        if blackout < SHORT_MS {
            short += 1;
            clean += u32::from(of_one_way.is_empty());
            ensure!(again.is_empty(), "in a blackout of {blackout:.0} ms these were sent again: {again:#?}");
            if !of_one_way.is_empty() {
                eprintln!("of one-way streams these were sent again: {of_one_way:#?}");
            }
        }
        if clean == 2 {
            break;
        }
    }
    ensure!(short > 0, "none of {} blackouts was shorter than {SHORT_MS} ms", MOVES.len());
    // Once in a great while two processors transpose what a server sends in its first millisecond, and what was late is sent again. Without an order at
    // the takeover no move is clean.
    ensure!(clean == short.min(2), "of {short} moves only {clean} had nothing sent again by one-way streams");
    // That such segments would have been seen.
    let (from, to) = if exactly_one_runs(lab, NAME)? == "a" { ("a", "b") } else { ("b", "a") };
    restart_agent(lab, to, "destination.restore.before.delay-600")?;
    let (blackout, lines) = captured_move(lab, (from, to), &streams, ports)?;
    restart_agent(lab, to, "")?;
    ensure!(!sent_again(&lines).is_empty(), "nothing was sent again in a blackout of {blackout:.0} ms");
    ensure!(!lines.iter().any(|line| line.contains("Flags [R")), "resets were seen");
    fed.end()?;
    feeding.end()?;
    remove(lab, NAME)
}
