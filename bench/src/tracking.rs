//! What it costs a container that its writes are tracked: its throughput in stretches of time with and without, in turns.
//!
//! The tracker is the one of pre-copy, and its rounds are those of pre-copy without the sending, so that nothing else takes
//! time. Before each stretch with it a first round arms the whole memory; that is not in the stretch, what it
//! causes is: every page's first write traps once more after each round.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_memory::tracker::{Method, Tracker};

use crate::row::Spread;
use crate::run::Figures;
use crate::workload::Workload;

/// How long each stretch is: short, so that what drifts hits both kinds alike.
const STRETCH: Duration = Duration::from_secs(2);
/// From round to round. A round of a GB takes about that long on a fast link.
const PERIOD: Duration = Duration::from_secs(1);
/// Pairs of stretches.
const PAIRS: usize = 8;

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
    stretch(workload, &pids, None)?;
    let (mut untracked, mut tracked) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // In turns.
        for with in [pair % 2 == 0, pair % 2 != 0] {
            if with {
                let mut tracker = Tracker::new(Method::best());
                tracker.round(&pids).context("the first round of tracking")?;
                tracked.push(stretch(workload, &pids, Some(&mut tracker))?);
            } else {
                untracked.push(stretch(workload, &pids, None)?);
            }
        }
    }
    let (without, with) = (median(&untracked, |p| p.wall), median(&tracked, |p| p.wall));
    let (cpu_without, cpu_with) = (median(&untracked, |p| p.cpu), median(&tracked, |p| p.cpu));
    Ok(vec![
        ("untracked_per_s", without),
        ("tracked_per_s", with),
        ("tracking_cost_share", cost(without, with)),
        ("tracking_cpu_share", cost(cpu_without, cpu_with)),
    ])
}

fn median(paces: &[Pace], of: fn(&Pace) -> f64) -> f64 {
    Spread::of(paces.iter().map(of)).map_or(0.0, |s| s.median)
}

/// The share of the throughput that is lost.
fn cost(without: f64, with: f64) -> f64 {
    1.0 - with / without
}

/// What the workload does, with rounds of tracking or without.
fn stretch(workload: &mut dyn Workload, pids: &[u32], mut tracker: Option<&mut Tracker>) -> Result<Pace> {
    let (start, cpu, before) = (Instant::now(), cpu_seconds(pids)?, workload.progress()?);
    while start.elapsed() < STRETCH {
        std::thread::sleep(PERIOD.min(STRETCH.saturating_sub(start.elapsed())));
        if let Some(tracker) = &mut tracker {
            tracker.round(pids).context("a round of tracking")?;
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
