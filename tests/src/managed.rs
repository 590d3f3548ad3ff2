use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::{CounterClient, Lab, LabError, REDIS_PORT, Redis, redis_command};
use tranship_types::BlockerKind;

use crate::agents::restart_agent;
use crate::moves::{Refusal, connection_alive, move_container};
use crate::runner::wait_until;

/// The longest that a client may wait, in ms: many times what a move takes, and less than the engines' own checkpoints do.
const GAP: f64 = 1500.0;
/// The same where the copy has to be made again, by another start of the engine's.
const GAP_WHEN_MADE_AGAIN: f64 = 5000.0;
/// How long what a move has left may take to be cleared away.
const CLEARED: Duration = Duration::from_secs(30);

/// Starts a container in a node: name, address, options, command.
pub type Run = fn(&Lab, &str, &str, Ipv4Addr, &[&str], &[String]) -> Result<(), LabError>;

/// An engine with a command line as Docker's, and the container that scenarios move under it.
#[derive(Clone, Copy)]
pub struct Managed {
    /// What the engine is called.
    pub engine: &'static str,
    /// The container's name.
    pub name: &'static str,
    /// Starts the engine in all nodes.
    pub prepare: fn(&Lab) -> Result<(), LabError>,
    /// Runs one of its commands in a node; what it prints.
    pub command: fn(&Lab, &str, &[&str]) -> Result<String, LabError>,
    /// Starts a container in one.
    pub run: Run,
    /// Checks that there is nothing of the container on a node.
    pub is_gone: fn(&Lab, &str) -> Result<()>,
}

impl Managed {
    /// Starts Redis in node `a`, at the address of this number, and a client that counts with it. Each scenario has an
    /// address of its own: the client remembers for a while which interface had one.
    ///
    /// # Errors
    /// If one of them does not start.
    pub fn start(&self, lab: &Lab, number: u8, options: &[&str], redis: &[&str]) -> Result<CounterClient> {
        (self.prepare)(lab)?;
        let (ip, mut command) = (Ipv4Addr::new(10, 77, 0, number), redis_command());
        command.extend(redis.iter().map(|&argument| argument.to_owned()));
        (self.run)(lab, "a", self.name, ip, options, &command)?;
        Redis::connect(lab, ip, Duration::from_secs(10))?;
        Ok(CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?)
    }

    /// What `inspect` says of the container, by a template.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn told(&self, lab: &Lab, node: &str, template: &str) -> Result<String> {
        Ok((self.command)(lab, node, &["inspect", "--format", template, self.name])?.trim().to_owned())
    }

    /// The names of the containers that run; `more` are options of `ps`.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn names(&self, lab: &Lab, node: &str, more: &[&str]) -> Result<String> {
        Ok((self.command)(lab, node, &[&["ps", "--format", "{{.Names}}"], more].concat())?)
    }

    /// Removes the container.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn remove(&self, lab: &Lab, node: &str) -> Result<()> {
        Ok((self.command)(lab, node, &["rm", "--force", self.name]).map(drop)?)
    }

    /// Moves the container, and checks that the client has hardly seen it, that the one engine has it and that nothing of it is
    /// left to the other.
    ///
    /// # Errors
    /// If not.
    pub fn moves(&self, lab: &Lab, counter: &mut CounterClient, from: &str, to: &str) -> Result<()> {
        self.moves_within(lab, counter, (from, to), GAP)
    }

    fn moves_within(&self, lab: &Lab, counter: &mut CounterClient, nodes: (&str, &str), longest: f64) -> Result<()> {
        let (from, to) = nodes;
        counter.mark()?;
        let report = move_container(lab, from, self.name, to)?;
        let seen = connection_alive(counter).with_context(|| format!("after the move from {from} to {to}"))?;
        let gap = seen.since_mark.longest.ms;
        eprintln!(
            "{from} → {to}: client gap {gap:.0} ms, blackout {:.0} ms, total {:.0} ms",
            report.blackout_ms.unwrap_or_default(),
            report.total_ms.unwrap_or_default()
        );
        ensure!(gap < longest, "the client waited for {gap:.0} ms");
        (self.is_gone)(lab, from)?;
        let (engine, name) = (self.engine, self.name);
        ensure!(self.names(lab, to, &[])?.trim() == name, "{engine} on {to} does not show {name} as running");
        Ok(())
    }

    fn await_gone(&self, lab: &Lab, node: &str, after: &str) -> Result<()> {
        wait_until("the node to be as it was", CLEARED, || Ok((self.is_gone)(lab, node).ok()))
            .with_context(|| format!("after {after}: {:?}", (self.is_gone)(lab, node)))
    }

    /// After each of some faults the container is its engine's as it was, and there is nothing of it on the destination. The
    /// address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn survives_failed_moves(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, &["--restart", "always"], &[])?;
        let pid = self.told(lab, "a", "{{.State.Pid}}")?;
        for fault in ["engine.after.error", "engine.after.kill-criu", "restore.after.error", "restore.after.die"] {
            restart_agent(lab, "b", &format!("destination.{fault}"))?;
            let output = lab.exec("a", &["tranship", "move", self.name, "--to", "b"])?;
            ensure!(output.status.code() == Some(1), "with {fault} the move ended with {}", output.status);
            connection_alive(&mut counter).with_context(|| format!("after {fault}"))?;
            ensure!(self.told(lab, "a", "{{.State.Pid}}")? == pid, "after {fault} the container is another process");
            restart_agent(lab, "b", "")?;
            self.await_gone(lab, "b", fault)?;
        }
        self.moves(lab, &mut counter, "a", "b").context("after all the faults")?;
        drop(counter);
        self.remove(lab, "b")
    }

    /// A move that was decided comes to its end, also if the held copy is lost, or the agent dies before the original is
    /// removed. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn finishes_decided_moves(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, &["--restart", "always"], &[])?;
        restart_agent(lab, "b", "destination.restore.after.kill-criu")?;
        self.moves_within(lab, &mut counter, ("a", "b"), GAP_WHEN_MADE_AGAIN)
            .context("when the held copy was lost, and made again")?;
        restart_agent(lab, "b", "source.release.before.die")?;
        let output = lab.exec("b", &["tranship", "move", self.name, "--to", "a"])?;
        ensure!(!output.status.success(), "the agent did not die before the release");
        connection_alive(&mut counter).context("with a source that died before the release")?;
        restart_agent(lab, "b", "")?;
        self.await_gone(lab, "b", "the agent's restart")?;
        let (engine, name) = (self.engine, self.name);
        ensure!(self.names(lab, "a", &[])?.trim() == name, "{engine} on a does not show {name} as running");
        connection_alive(&mut counter)?;
        drop(counter);
        self.remove(lab, "a")
    }
}

impl Refusal {
    /// Checks that the move was blocked by something of this kind, whose cause has these words, and with a remedy.
    ///
    /// # Errors
    /// If not.
    pub fn names(&self, kind: BlockerKind, words: &str) -> Result<()> {
        let found = self.blockers.iter().any(|b| b.kind == kind && b.cause.contains(words) && !b.remedy.is_empty());
        ensure!(found && self.status == 3, "no blocker {kind:?} with {words:?}: {self:#?}");
        Ok(())
    }
}
