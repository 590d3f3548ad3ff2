use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, bail};
use tranship_lab::{Lab, Redis, RunOptions, redis_command};
use tranship_types::EngineName;

use super::setter::Setter;
use super::witness::{COUNTER, INTERVAL, Witness};
use super::{ADDRESS, LIMIT, Workload};
use crate::run::Figures;
use crate::suite::Sets;

/// Bytes of each value.
const VALUE_BYTES: u32 = 100;

/// Under Podman it is given one, for Podman's own restore keeps no other.
const MAC: &str = "02:00:0a:4d:00:0a";

/// A Redis, idle but for the counting client, or under SETs.
pub struct RedisLoad {
    redis: Redis,
    client: Witness,
    setter: Option<Setter>,
    keys: u64,
    digest: Option<String>,
    resident_bytes: u64,
}

impl RedisLoad {
    /// Starts and fills it, in a container of this engine.
    pub fn start(lab: &Lab, node: &str, name: &str, engine: EngineName, keys: u64, sets: Sets) -> Result<Self> {
        run(lab, node, name, engine)?;
        Self::fill(lab, (ADDRESS, INTERVAL), keys, sets)
    }

    /// Starts and fills an idle one with this address, in a container of runc's, which its client asks so often.
    pub fn start_at(
        lab: &Lab,
        node: &str,
        name: &str,
        (address, interval): (Ipv4Addr, Duration),
        keys: u64,
    ) -> Result<Self> {
        lab.run(node, name, &RunOptions::new(address, redis_command()))?;
        Self::fill(lab, (address, interval), keys, Sets::Idle)
    }

    fn fill(lab: &Lab, (address, interval): (Ipv4Addr, Duration), keys: u64, sets: Sets) -> Result<Self> {
        let mut redis = Redis::connect(lab, address, LIMIT)?;
        redis.populate(keys, "key", VALUE_BYTES)?;
        let found = redis.keys()?;
        if found != keys {
            bail!("Redis has {found} keys before the move, not {keys}");
        }
        let rate = match sets {
            Sets::Idle => None,
            Sets::Rate(rate) => Some(rate),
            Sets::Full => Some(0),
        };
        // What changes has no digest; the client that changes it knows what must be there.
        let digest = rate.is_none().then(|| redis.digest()).transpose()?;
        let resident_bytes = redis.resident_bytes()?;
        let client = Witness::start_at(lab, address, interval)?;
        let setter = rate.map(|rate| Setter::start(lab, keys, rate)).transpose()?;
        Ok(Self { redis, client, setter, keys, digest, resident_bytes })
    }
}

/// Makes the container of a Redis under Docker on another node, where what is Docker's own expects it.
pub fn make_in_docker(lab: &Lab, node: &str, name: &str) -> tranship_lab::Result<()> {
    lab.docker_create(node, name, ADDRESS, &[], &redis_command())
}

fn run(lab: &Lab, node: &str, name: &str, engine: EngineName) -> tranship_lab::Result<()> {
    let command = redis_command();
    match engine {
        EngineName::Runc => lab.run(node, name, &RunOptions::new(ADDRESS, command)),
        EngineName::Docker => {
            lab.start_docker()?;
            lab.docker_run(node, name, ADDRESS, &[], &command)
        }
        EngineName::Podman => {
            lab.start_podman()?;
            lab.podman_run(node, name, ADDRESS, &["--mac-address", MAC], &command)
        }
        EngineName::Containerd => {
            lab.start_containerd()?;
            lab.ctr_run(node, name, ADDRESS, &[], &command)
        }
    }
}

impl Workload for RedisLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        self.client.mark()?;
        self.setter.as_mut().map_or(Ok(()), Setter::mark)
    }

    fn check(&mut self) -> Result<Figures> {
        let mut figures = self.client.check()?;
        if let Some(setter) = &mut self.setter {
            figures.push(("sets_per_s", setter.since_mark()?));
            setter.verify()?;
        }
        Ok(figures)
    }

    fn check_all(&mut self) -> Result<()> {
        let Some(before) = &self.digest else { return Ok(()) };
        let (keys, digest) = self.redis.verify_without(COUNTER)?;
        if (keys, &digest) != (self.keys, before) {
            bail!("Redis has {keys} keys with digest {digest}; at the beginning {} with {before}", self.keys);
        }
        Ok(())
    }

    fn progress(&mut self) -> Result<u64> {
        match &mut self.setter {
            Some(setter) => setter.sets(),
            None => bail!("an idle Redis makes no progress"),
        }
    }
}
