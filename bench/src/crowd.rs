//! Several containers that are moved at the same time, or one after the other.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tranship_lab::Lab;
use tranship_types::Mode;

use crate::row::Spread;
use crate::run::{Moved, tranship};

/// The name of one of them.
pub fn name(all: &str, number: u8) -> String {
    format!("{all}-{number}")
}

/// How they are moved.
#[derive(Debug, Clone, Copy)]
pub struct Crowd<'a> {
    /// What the name of each begins with.
    pub name: &'a str,
    pub containers: u8,
    pub at_once: bool,
}

impl Crowd<'_> {
    /// Moves all of them: what the one tells that was frozen for the longest, and the median of all blackouts in ms.
    pub fn perform(self, lab: &Lab, way: [&str; 2], mode: Mode, limit: Duration) -> Result<(Moved, f64)> {
        let one = |number: u8| tranship(lab, &name(self.name, number), way, mode, limit);
        let all: Vec<Moved> = if self.at_once {
            std::thread::scope(|scope| {
                let moves: Vec<_> = (0..self.containers).map(|number| scope.spawn(move || one(number))).collect();
                let ended = moves.into_iter().map(|one| one.join().map_err(|_| anyhow!("a thread panicked"))?);
                ended.collect::<Result<_>>()
            })?
        } else {
            (0..self.containers).map(one).collect::<Result<_>>()?
        };
        let blackout = |moved: &Moved| moved.blackout_ms.unwrap_or(0.0);
        let totals = all.iter().map(|moved| moved.total_ms);
        let total_ms = if self.at_once { totals.fold(0.0, f64::max) } else { totals.sum() };
        let median = Spread::of(all.iter().map(blackout)).context("a crowd of none")?.median;
        let longest = all.into_iter().max_by(|a, b| blackout(a).total_cmp(&blackout(b))).context("a crowd of none")?;
        Ok((Moved { total_ms, ..longest }, median))
    }
}
