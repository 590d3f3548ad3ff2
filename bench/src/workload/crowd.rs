use std::net::Ipv4Addr;

use anyhow::{Context, Result, bail};
use tranship_lab::Lab;

use super::redis::RedisLoad;
use super::witness::INTERVAL;
use super::{ADDRESS, Workload};
use crate::crowd;
use crate::run::Figures;

/// Several Redis, each in a container of its own, with a client each.
pub struct CrowdLoad(Vec<RedisLoad>);

impl CrowdLoad {
    /// Starts them. All clients together ask as often as the one of a single Redis.
    pub fn start(lab: &Lab, node: &str, name: &str, containers: u8, keys: u64) -> Result<Self> {
        let [a, b, c, first] = ADDRESS.octets();
        let one = |number: u8| {
            let address = Ipv4Addr::new(a, b, c, first + number);
            let name = crowd::name(name, number);
            RedisLoad::start_at(lab, node, &name, (address, INTERVAL * u32::from(containers)), keys)
        };
        Ok(Self((0..containers).map(one).collect::<Result<_>>()?))
    }
}

impl Workload for CrowdLoad {
    fn resident_bytes(&self) -> u64 {
        self.0.iter().map(RedisLoad::resident_bytes).sum()
    }

    fn mark(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(RedisLoad::mark)
    }

    /// What the client saw that waited the longest.
    fn check(&mut self) -> Result<Figures> {
        let all: Vec<Figures> = self.0.iter_mut().map(RedisLoad::check).collect::<Result<_>>()?;
        let gap =
            |figures: &Figures| figures.iter().find(|(name, _)| *name == "client_gap_ms").map_or(0.0, |(_, ms)| *ms);
        all.into_iter().max_by(|a, b| gap(a).total_cmp(&gap(b))).context("a crowd of none")
    }

    fn check_all(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(RedisLoad::check_all)
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("an idle Redis makes no progress")
    }
}
