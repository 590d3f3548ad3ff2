//! SIGKILL for real processes of a migration, at moments drawn by a seed. `TRANSHIP_SEED` takes one back.

use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;
use tranship_e2e::{Helper, MODES, Moving, processes, send};
use tranship_lab::Lab;
use tranship_types::Mode;

use crate::play::{NAME, Play};

/// How many.
const KILLS: usize = 16;
/// A move takes about so long.
const SPREAD_MS: u64 = 450;

/// What is killed, and when.
#[derive(Debug, Clone, Copy)]
pub struct Kill {
    number: usize,
    kind: &'static str,
    mode: Mode,
    after: Duration,
}

/// A seed of this run's own, or the one that was asked for.
pub fn seed() -> u64 {
    let asked = std::env::var("TRANSHIP_SEED").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or_else(|| std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |d| d.as_nanos() as u64 % 1_000_000))
}

/// The kills that a seed makes.
pub fn drawn(seed: u64) -> Vec<Kill> {
    let mut state = seed;
    // splitmix64
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let kinds = ["criu", "front", "pager", "keeper"];
    let mut one = |number| {
        let kind = kinds[number % kinds.len()];
        let mode = MODES[number / kinds.len() % MODES.len()];
        Kill { number, kind, mode, after: Duration::from_millis(next() % SPREAD_MS) }
    };
    (0..KILLS).map(&mut one).collect()
}

impl Kill {
    pub fn name(&self) -> String {
        format!("kill.{}.{}-after-{}ms.{}", self.number, self.kind, self.after.as_millis(), self.mode)
    }

    pub fn play(&self, lab: &Lab, play: &mut Play) -> Result<()> {
        let (from, to) = play.direction();
        let mut moving = Moving::begin(lab, NAME, &from, &to, self.mode)?;
        let begun = Instant::now();
        while moving.goes_on()? {
            if begun.elapsed() >= self.after
                && let Some(victim) = self.victim(lab, &[&from, &to])?
            {
                send(Signal::SIGKILL, victim.pid)?;
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = moving.end()?;
        play.settle(lab, &ended, None)
    }

    fn victim(&self, lab: &Lab, nodes: &[&String]) -> Result<Option<Helper>> {
        for &node in nodes {
            // In the middle of a dump criu has the container's connections in repair mode; if it is killed there, the tasks
            // run before anybody else could take them out of it. While it waits and when it is done is in the matrix.
            if self.kind == "criu" && node == nodes[0] {
                continue;
            }
            if let Some(found) = processes(lab, node)?.into_iter().find(|p| p.kind == self.kind) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}
