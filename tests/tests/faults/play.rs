//! What every case plays with: a small Redis, a client that checks each reply on one connection, and the conditions that
//! must hold when all is quiet again.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Ended, Lives, Managed, connection_alive, move_container, quiet, quiet_under, remove};
use tranship_lab::{CLIENT, CounterClient, Lab, REDIS_PORT, Redis, RunOptions};
use tranship_types::Side;

pub const NAME: &str = "redis";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);
/// What its program is called in the trace.
const PROGRAM: &str = "one";
const KEYS: u64 = 500;
const COUNTER: &str = "counter";

/// A container with its client.
pub struct Play {
    /// Whose it is; runc's where there is none.
    engine: Option<&'static Managed>,
    /// Of its copies.
    pub lives: Lives,
    redis: Redis,
    counter: CounterClient,
    /// Number of keys, and their checksum.
    truth: (u64, String),
    /// The node that the container is on.
    pub at: String,
}

impl Play {
    pub fn begin(lab: &Lab, engine: Option<&'static Managed>) -> Result<Self> {
        // The last play's container had the same address, and another MAC.
        lab.check(CLIENT, &["ip", "neigh", "flush", "all"])?;
        let lives = Lives::watch()?;
        let command = lives.redis(PROGRAM);
        match engine {
            None => lab.run("a", NAME, &RunOptions::new(IP, command))?,
            Some(engine) => {
                (engine.prepare)(lab)?;
                (engine.run)(lab, "a", engine.name, IP, engine.image, &[], &command)?;
            }
        }
        let mut redis = Redis::connect(lab, IP, Duration::from_secs(10))?;
        redis.populate(KEYS, "key", 100)?;
        let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), COUNTER, Duration::from_micros(500))?;
        counter.pause()?;
        let truth = redis.verify_without(COUNTER)?;
        counter.resume()?;
        Ok(Self { engine, lives, redis, counter, truth, at: "a".to_owned() })
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.engine.map_or(NAME, |engine| engine.name)
    }

    /// The nodes of the next move: from where, to where.
    pub fn direction(&self) -> (String, String) {
        let other = if self.at == "a" { "b" } else { "a" };
        (self.at.clone(), other.to_owned())
    }

    /// Checks that the container answers its client, wherever it is.
    pub fn goes_on(&mut self) -> Result<()> {
        let seen = self.counter.wait_replies(20, Duration::from_secs(15)).context("the client's connection")?;
        ensure!(seen.error.is_none(), "the client's connection: {seen:?}");
        Ok(())
    }

    /// Waits until nothing is left to be done, checks everything that must hold then, and does a second move.
    pub fn settle(&mut self, lab: &Lab, ended: &Ended, ends_on: Option<Side>) -> Result<()> {
        let (from, to) = self.direction();
        let at = self.engine.map_or_else(|| quiet(lab, NAME), |engine| quiet_under(lab, engine))?;
        let seen = self.counter.wait_replies(20, Duration::from_secs(30)).context("the client's connection")?;
        ensure!(seen.error.is_none(), "the client's connection: {seen:?}");
        let seen = connection_alive(&mut self.counter)?;
        ensure!(
            seen.value == seen.total.replies.cast_signed(),
            "{} replies, but the counter is {}",
            seen.total.replies,
            seen.value
        );
        self.counter.pause()?;
        let now = self.redis.verify_without(COUNTER).context("on the connection that was idle")?;
        self.counter.resume()?;
        ensure!(now == self.truth, "keys and checksum were {:?} and are {now:?}", self.truth);
        self.lived_once()?;
        ended.fits(&from, &to, &at)?;
        if let Some(side) = ends_on {
            let wanted = if side == Side::Source { &from } else { &to };
            ensure!(
                *wanted == at,
                "the container must be on the {side:?}, {wanted}, and is on {at}: {}",
                ended.error()
            );
        }
        self.at = at;
        self.second_move(lab)
    }

    /// Checks that no two copies ever ran at the same time.
    pub fn lived_once(&self) -> Result<()> {
        self.lives.check(PROGRAM)
    }

    fn second_move(&mut self, lab: &Lab) -> Result<()> {
        let (from, to) = self.direction();
        move_container(lab, &from, self.name(), &to).context("the second move")?;
        self.at = to;
        self.counter.wait_replies(20, Duration::from_secs(5)).context("after the second move")?;
        Ok(())
    }

    /// Checks what the client has seen in all, and removes the container.
    pub fn end(self, lab: &Lab) -> Result<u64> {
        let last = self.counter.stop()?;
        ensure!(last.error.is_none() && last.same_connection, "the counter ended badly: {last:?}");
        match self.engine {
            None => remove(lab, NAME)?,
            Some(engine) => {
                engine.remove(lab, &self.at)?;
                // An engine tells no agent that a container which had come is gone: its bundle is.
                lab.check(&self.at, &["tranship", "doctor", "--fix"])?;
            }
        }
        Ok(last.total.replies)
    }
}
