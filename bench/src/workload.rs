//! The container that is moved, and the client that is connected to it.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};

use crate::suite::Load;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
const COUNTER: &str = "counter";
const INTERVAL: Duration = Duration::from_micros(500);
const VALUE_BYTES: u32 = 100;
/// Replies before the move, so that the connection is in its stride.
const BEFORE: u64 = 1000;
/// Replies after it, so that a second gap right after the first is seen.
const AFTER: u64 = 1000;
const LIMIT: Duration = Duration::from_secs(60);

/// A running workload with its client.
pub struct Workload {
    redis: Redis,
    client: CounterClient,
    keys: u64,
    digest: String,
    resident_bytes: u64,
}

/// What the client saw across the move.
pub struct Seen {
    /// Longest time between two replies, in ms.
    pub longest_gap_ms: f64,
    /// All gaps of more than 20 ms together, in ms.
    pub stalls_ms: f64,
}

impl Workload {
    /// Starts it in a container of this name, fills it, and has the client count.
    pub fn start(lab: &Lab, node: &str, name: &str, load: &Load) -> Result<Self> {
        let Load::Redis { keys } = *load;
        lab.run(node, name, &RunOptions::new(ADDRESS, redis_command()))?;
        let mut redis = Redis::connect(lab, ADDRESS, LIMIT)?;
        redis.populate(keys, "key", VALUE_BYTES)?;
        let (found, digest) = redis.verify_without(COUNTER)?;
        if found != keys {
            bail!("Redis has {found} keys before the move, not {keys}");
        }
        let resident_bytes = redis.resident_bytes()?;
        let client = CounterClient::start(lab, (ADDRESS, REDIS_PORT).into(), COUNTER, INTERVAL)?;
        Ok(Self { redis, client, keys, digest, resident_bytes })
    }

    /// Resident memory before the move, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Begins the stretch of time in which gaps count.
    pub fn mark(&mut self) -> Result<()> {
        self.client.wait_replies(BEFORE, LIMIT).context("before the move")?;
        self.client.mark()?;
        Ok(())
    }

    /// Waits until the client is served again, and checks that the connection is the same one, each reply was right, and
    /// no key was lost or changed.
    pub fn check(&mut self) -> Result<Seen> {
        self.client.wait_replies(AFTER, LIMIT)?;
        let seen = self.client.pause()?;
        if let Some(error) = seen.error {
            bail!("the client's connection failed: {error}");
        }
        if !seen.same_connection {
            bail!("the server does not know the client's connection any more");
        }
        let (keys, digest) = self.redis.verify_without(COUNTER)?;
        if (keys, &digest) != (self.keys, &self.digest) {
            bail!("Redis has {keys} keys with digest {digest}; before the move {} with {}", self.keys, self.digest);
        }
        let gaps = &seen.since_mark;
        Ok(Seen { longest_gap_ms: gaps.longest.ms, stalls_ms: gaps.gaps.iter().map(|gap| gap.ms).sum() })
    }
}
