//! The link between the nodes goes down, for real: at the moment at which an agent is held, and for a while or until the
//! other side has given up.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{Log, Moving, restart_agent, send, state, wait_until};
use tranship_lab::Lab;
use tranship_types::{Mode, Side};

use crate::play::{NAME, Play};

/// For how long a link is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// Shorter than any patience: nobody gives up.
    Short,
    /// Until the source has given up, and the container runs there again.
    UntilUndone,
    /// Longer than a connection lives without a word, after the decision.
    Long,
}

/// One outage.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Whose agent is held.
    pub side: Side,
    /// Where.
    pub place: &'static str,
    /// Whose link goes down.
    pub of: Side,
    /// For how long.
    pub outage: Outage,
}

/// Around READY and COMMIT above all.
pub const CUTS: &[Cut] = &[
    Cut { side: Side::Source, place: "offer.before", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Source, place: "transfer.before", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Source, place: "await-ready.before", of: Side::Source, outage: Outage::Short },
    Cut { side: Side::Destination, place: "restore.before", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Destination, place: "ready.after", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Source, place: "commit.before", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Source, place: "commit.after", of: Side::Source, outage: Outage::Short },
    Cut { side: Side::Destination, place: "commit.after", of: Side::Destination, outage: Outage::Short },
    Cut { side: Side::Destination, place: "announce.after", of: Side::Source, outage: Outage::Short },
    Cut { side: Side::Source, place: "release.before", of: Side::Source, outage: Outage::Short },
    Cut { side: Side::Source, place: "transfer.before", of: Side::Destination, outage: Outage::UntilUndone },
    Cut { side: Side::Destination, place: "ready.after", of: Side::Destination, outage: Outage::UntilUndone },
    Cut { side: Side::Source, place: "commit.after", of: Side::Source, outage: Outage::Long },
    Cut { side: Side::Destination, place: "announce.after", of: Side::Source, outage: Outage::Long },
];

/// A link without a word is given up after 10 s. (The client's own retransmissions come after 6, 13 and 25 s.)
const LONG: Duration = Duration::from_millis(10_700);
const SHORT: Duration = Duration::from_millis(1200);
/// How long a source may take to give up: its patience with a silent destination, and some.
const GIVING_UP: Duration = Duration::from_secs(30);

impl Cut {
    pub fn name(&self) -> String {
        let side = |side| if side == Side::Source { "source" } else { "destination" };
        let outage = match self.outage {
            Outage::Short => "short",
            Outage::UntilUndone => "until-undone",
            Outage::Long => "long",
        };
        format!("link.{}.{}.{}-{outage}", side(self.side), self.place, side(self.of))
    }

    pub fn play(&self, lab: &Lab, play: &mut Play, mode: Mode) -> Result<()> {
        let (from, to) = play.direction();
        let node = |side| if side == Side::Source { &from } else { &to };
        let held = node(self.side);
        let prefix = if self.side == Side::Source { "source" } else { "destination" };
        restart_agent(lab, held, &format!("{prefix}.{}.hold", self.place))?;
        let agent = lab.agent_pid(held)?.context("the agent has just been started")?;
        let log = Log::mark(lab, &from)?;
        let moving = Moving::begin(lab, NAME, &from, &to, mode)?;
        wait_until("the agent to be held", Duration::from_secs(20), || Ok((state(agent) == Some('T')).then_some(())))?;

        lab.cut_link(node(self.of))?;
        let during = self.outage(lab, &log, &from, agent);
        lab.restore_link(node(self.of))?;
        during?;
        let ended = moving.end()?;
        let ends_on = if self.outage == Outage::UntilUndone { Side::Source } else { Side::Destination };
        play.settle(lab, &ended, Some(ends_on))
    }

    /// What happens while the link is down.
    fn outage(&self, lab: &Lab, log: &Log, from: &str, agent: u32) -> Result<()> {
        let begun = Instant::now();
        send(Signal::SIGCONT, agent)?;
        let down = match self.outage {
            Outage::Short => SHORT,
            Outage::Long => LONG,
            Outage::UntilUndone => {
                let undone = || Ok(log.text().contains("phase=undone").then_some(()));
                wait_until("the source to give up", GIVING_UP, undone)?;
                ensure!(runs_on(lab, from)?, "the container does not run on the source while the link is down");
                return Ok(());
            }
        };
        // The passing of time is what this is about.
        std::thread::sleep(down.saturating_sub(begun.elapsed()));
        Ok(())
    }
}

/// Whether the container runs on this node, whatever stopped copy the other one may hold meanwhile.
fn runs_on(lab: &Lab, node: &str) -> Result<bool> {
    let state = lab.check(node, &["runc", "state", NAME])?;
    Ok(state.contains("\"running\""))
}
