//! Many moves at once: each container is frozen for about as long as if it moved alone.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Moving, Stage, connection_alive, move_container, quiet, remove, scenarios};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_types::{Mode, Report};

const CROWD: usize = 8;
const KEYS: u64 = 500;
/// How much longer than alone a container may be frozen.
const FACTOR: f64 = 2.0;
/// How often it is measured at most: other programs may have been at work the first time.
const ATTEMPTS: usize = 3;

struct Member {
    name: String,
    counter: CounterClient,
}

fn start(lab: &Lab) -> Result<Vec<Member>> {
    let one = |number: usize| {
        let (name, ip) = (format!("crowd-{number}"), Ipv4Addr::new(10, 77, 0, 110 + number as u8));
        lab.run("a", &name, &RunOptions::new(ip, redis_command()))?;
        Redis::connect(lab, ip, Duration::from_secs(10))?.populate(KEYS, "key", 100)?;
        let counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(5))?;
        Ok(Member { name, counter })
    };
    (0..CROWD).map(one).collect()
}

fn blackout(report: &Report) -> Result<f64> {
    report.blackout_ms.context("a move without a blackout")
}

/// All containers move at once; the blackouts.
fn at_once(lab: &Lab, members: &[Member], from: &str, to: &str) -> Result<Vec<f64>> {
    let begin = |member: &Member| Moving::begin(lab, &member.name, from, to, Mode::Auto);
    let moves: Vec<_> = members.iter().map(begin).collect::<Result<_>>()?;
    let end = |moving: Moving| {
        let ended = moving.end()?;
        ensure!(ended.success, "{}", ended.error());
        blackout(ended.report.as_ref().context("no report")?)
    };
    moves.into_iter().map(end).collect()
}

fn longest(all: &[f64]) -> f64 {
    all.iter().copied().fold(0.0, f64::max)
}

fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn eight_at_once_are_frozen_no_longer_than_alone(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut members = start(lab)?;
    let mut last = String::new();
    for attempt in 0..ATTEMPTS {
        let mut alone = Vec::new();
        for member in &members {
            alone.push(blackout(&move_container(lab, "a", &member.name, "b")?)?);
        }
        let together = at_once(lab, &members, "b", "a")?;
        for member in &mut members {
            connection_alive(&mut member.counter).with_context(|| member.name.clone())?;
        }
        last = format!(
            "blackouts alone {:.0} ms, up to {:.0} ms; {CROWD} at once {:.0} ms, up to {:.0} ms: \
             {alone:.0?}, {together:.0?}",
            median(&alone),
            longest(&alone),
            median(&together),
            longest(&together)
        );
        eprintln!("attempt {attempt}: {last}");
        // On a busy machine any single one may be longer.
        if median(&together) <= FACTOR * median(&alone) && longest(&together) <= FACTOR * longest(&alone) {
            break;
        }
        ensure!(attempt + 1 < ATTEMPTS, "{last}");
    }
    for member in members {
        ensure!(quiet(lab, &member.name)? == "a", "{} is not on node a", member.name);
        remove(lab, &member.name)?;
    }
    ensure!(!last.is_empty(), "nothing was measured");
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[("eight_at_once_are_frozen_no_longer_than_alone", eight_at_once_are_frozen_no_longer_than_alone)])
}
