use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tranship_lab::{CounterClient, Lab, REDIS_PORT};

use super::{ADDRESS, LIMIT};
use crate::run::Figures;

/// The key that it counts in.
pub const COUNTER: &str = "counter";
/// How often it asks, where there is one of it.
pub const INTERVAL: Duration = Duration::from_micros(500);
/// Replies before the move, so that the connection is in its stride.
const BEFORE: u64 = 1000;
/// Replies after it, so that a second gap right after the first is seen.
const AFTER: u64 = 1000;

/// The client that counts, one reply after the other, and sees every gap.
pub struct Witness(CounterClient);

impl Witness {
    /// Connects.
    pub fn start(lab: &Lab) -> Result<Self> {
        Self::start_at(lab, ADDRESS, INTERVAL)
    }

    /// Connects to the Redis at this address, and asks it so often.
    pub fn start_at(lab: &Lab, address: Ipv4Addr, interval: Duration) -> Result<Self> {
        Ok(Self(CounterClient::start(lab, (address, REDIS_PORT).into(), COUNTER, interval)?))
    }

    /// Begins the stretch of time in which gaps count.
    pub fn mark(&mut self) -> Result<()> {
        // The check of an earlier move has stopped it.
        self.0.resume()?;
        self.0.wait_replies(BEFORE, LIMIT).context("before the move")?;
        self.0.mark()?;
        Ok(())
    }

    /// Waits until it is served again, and stops counting. Fails if a reply was wrong, or the connection is another one.
    pub fn check(&mut self) -> Result<Figures> {
        self.0.wait_replies(AFTER, LIMIT)?;
        let seen = self.0.pause()?;
        if let Some(error) = seen.error {
            bail!("the client's connection failed: {error}");
        }
        if !seen.same_connection {
            bail!("the server does not know the client's connection any more");
        }
        let gaps = &seen.since_mark;
        let stalls = gaps.gaps.iter().map(|gap| gap.ms).sum();
        Ok(vec![("client_gap_ms", gaps.longest.ms), ("client_stalls_ms", stalls)])
    }
}
