//! What it costs a container that its writes are tracked: its throughput in stretches of time with and without, in turns.
//!
//! While nothing moves, writes are tracked for `tranship plan`: that is the cost that is judged, arming and the end of it included. For comparison
//! there are rounds of pre-copy without the sending. Before such a stretch a first round arms the whole memory; that is not in the stretch,
//! what it causes is: every page's first write traps once more after each round.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_memory::sample::sample;
use tranship_memory::tracker::{Method, Tracker};

use crate::row::Spread;
use crate::run::Figures;
use crate::workload::Workload;

/// How long each stretch is, as long as a plan samples unless it is told otherwise.
const STRETCH: Duration = Duration::from_secs(3);
/// From round to round. A round of a GB takes about that long on a fast link.
const PERIOD: Duration = Duration::from_secs(1);
/// Stretches with and without. Of one alone a shared machine's speed differs from that of the next by a tenth and more.
const TURNS: usize = 24;
/// One of so many is followed by one with rounds.
const ROUNDS: usize = 4;

/// What is done beside the workload.
#[derive(Debug, Clone, Copy)]
enum Beside {
    Nothing,
    /// What a plan does.
    Sampling,
    /// What pre-copy does.
    Rounds,
}

/// What a workload does, on average over a stretch of time.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// In a second.
    wall: f64,
    /// In a second of the container's CPU time, which others on the machine do not take from it. What the rounds themselves
    /// take is not in it.
    cpu: f64,
}

/// Measures a running workload in node `node`.
pub fn measure(node: &str, name: &str, workload: &mut dyn Workload) -> Result<Figures> {
    let pids = processes(node, name)?;
    if pids.is_empty() {
        bail!("no process of container {name} was found");
    }
    // The first stretch of all is not like the others: caches are cold.
    stretch(workload, &pids, Beside::Nothing)?;
    let (mut untracked, mut sampled, mut rounds) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..TURNS {
        // Each of the two goes first, in its turn.
        if turn % 2 == 0 {
            untracked.push(stretch(workload, &pids, Beside::Nothing)?);
            sampled.push(stretch(workload, &pids, Beside::Sampling)?);
        } else {
            sampled.push(stretch(workload, &pids, Beside::Sampling)?);
            untracked.push(stretch(workload, &pids, Beside::Nothing)?);
        }
        if turn % ROUNDS == 0 {
            rounds.push(stretch(workload, &pids, Beside::Rounds)?);
        }
    }
    let share = |paces: &[Pace], of| cost(median(&untracked, of), median(paces, of));
    Ok(vec![
        ("untracked_per_s", median(&untracked, |p| p.wall)),
        ("tracked_per_s", median(&sampled, |p| p.wall)),
        ("tracking_cost_share", share(&sampled, |p| p.wall)),
        ("tracking_cpu_share", share(&sampled, |p| p.cpu)),
        ("rounds_cost_share", share(&rounds, |p| p.wall)),
        ("rounds_cpu_share", share(&rounds, |p| p.cpu)),
    ])
}

fn median(paces: &[Pace], of: fn(&Pace) -> f64) -> f64 {
    Spread::of(paces.iter().map(of)).map_or(0.0, |s| s.median)
}

/// The share of the throughput that is lost.
fn cost(without: f64, with: f64) -> f64 {
    1.0 - with / without
}

/// What the workload does in one stretch.
fn stretch(workload: &mut dyn Workload, pids: &[u32], beside: Beside) -> Result<Pace> {
    let mut tracker = Tracker::new(Method::best());
    if let Beside::Rounds = beside {
        tracker.round(pids).context("the first round of tracking")?;
    }
    let (start, cpu, before) = (Instant::now(), cpu_seconds(pids)?, workload.progress()?);
    match beside {
        Beside::Nothing => sleep(STRETCH),
        Beside::Sampling => {
            let pause = |time| {
                sleep(time);
                true
            };
            sample::<anyhow::Error>(Method::best(), STRETCH, || Ok(pids.to_vec()), pause).context("sampling")?;
        }
        Beside::Rounds => {
            while start.elapsed() < STRETCH {
                sleep(PERIOD.min(STRETCH.saturating_sub(start.elapsed())));
                tracker.round(pids).context("a round of tracking")?;
            }
        }
    }
    let done = (workload.progress()? - before) as f64;
    Ok(Pace { wall: done / start.elapsed().as_secs_f64(), cpu: done / (cpu_seconds(pids)? - cpu) })
}

/// CPU time that processes have taken, in s.
fn cpu_seconds(pids: &[u32]) -> Result<f64> {
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100) as f64;
    let mut ticks = 0;
    for pid in pids {
        let file = format!("/proc/{pid}/stat");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        ticks += cpu_ticks(&text).with_context(|| format!("{file} is {text:?}"))?;
    }
    Ok(ticks as f64 / per_second)
}

/// In user mode and in the kernel together, of all threads, from the text of /proc/PID/stat.
fn cpu_ticks(text: &str) -> Option<u64> {
    // The name, in parentheses, may contain anything; what follows it are numbers, the third being of the file.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// The processes of a container, as this machine numbers them.
fn processes(node: &str, name: &str) -> Result<Vec<u32>> {
    let group = format!("/tranship-lab/{node}/{name}");
    let inside = |pid: u32| {
        // A process may end while it is looked at.
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        text.lines().any(|line| line.splitn(3, ':').nth(2).is_some_and(|path| path.ends_with(&group)))
    };
    let entries = fs::read_dir("/proc").context("cannot list /proc")?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(pids.filter(|pid| inside(*pid)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_whatever_the_name_is() {
        let text = "7 (a) 1 b) S 1 7 7 0 -1 4194560 100 0 0 0 35 12 0 0 20 0 1 0 100 0 0";
        assert_eq!(cpu_ticks(text), Some(47));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn the_cost_is_what_is_missing() {
        assert!((cost(100.0, 98.0) - 0.02).abs() < 1e-9);
        assert!(cost(100.0, 101.0) < 0.0);
    }
}
