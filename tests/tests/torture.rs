//! A program that tortures its own memory moves again and again, in every mode, while links are cut and agents killed: not
//! one page is ever wrong, and there is always exactly one copy.
//!
//! `TRANSHIP_MOVES=200` moves so often, `TRANSHIP_SEED=7` repeats a run, `TRANSHIP_MODES=precopy` takes these modes only,
//! `TRANSHIP_MISHAPS=none` leaves the mishaps out, and `TRANSHIP_TORTURE="--kinds=huge --without=fork"` is passed on to
//! the torturer: so one finds out what a failure is about. The same is done with `mapper`, which changes its mappings all the time.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    MODES, Moving, Stage, Torturer, arguments, asked, asked_modes, is_gone, quiet, remove, scenarios, send, wait_until,
};
use tranship_lab::Lab;
use tranship_types::Mode;

const MOVES: usize = 12;
/// Moves of the second program, which `tests/mappings.rs` moves without mishaps.
const MAPPER_MOVES: usize = 6;
/// The seed of a run that is given none: the same in each `make test`.
const SEED: u64 = 3;
/// Steps of each thread between two moves: about half a second.
const STEPS: u64 = 500;
/// A move takes about so long.
const SPREAD_MS: u64 = 1500;
/// Links are down no longer than anybody's patience lasts; what happens then is in the fault matrix.
const OUTAGE_MS: (u64, u64) = (50, 1200);
/// What the refusal of a move says that nothing but a coincidence is the cause of.
const SAME_NUMBER: &str = "have the same number";

/// What happens to a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mishap {
    None,
    CutSource,
    CutDestination,
    KillSourceAgent,
    KillDestinationAgent,
}

/// A program that checks its own memory, in a container of its own.
struct Program {
    name: &'static str,
    ip: Ipv4Addr,
    /// Moves where the environment names no number.
    moves: usize,
    /// The variable with further arguments.
    passed_on: &'static str,
}

/// One move.
#[derive(Debug, Clone, Copy)]
struct Turn {
    mode: Mode,
    mishap: Mishap,
    /// When it happens, from the beginning of the move.
    after: Duration,
    /// For how long a link is down or an agent not there.
    outage: Duration,
}

/// splitmix64
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn turns(seed: u64, count: usize, modes: &[Mode], calm: bool) -> Vec<Turn> {
    let mut state = seed;
    let mut turn = |number: usize| {
        // Half of the moves are left alone. In `make test` every mishap and every mode has its turn.
        let mishap = match draw(&mut state) % 8 {
            _ if calm || number == 0 => Mishap::None,
            0 => Mishap::CutSource,
            1 => Mishap::CutDestination,
            2 => Mishap::KillSourceAgent,
            3 => Mishap::KillDestinationAgent,
            _ => Mishap::None,
        };
        let (first, last) = OUTAGE_MS;
        Turn {
            mode: modes[number % modes.len()],
            mishap,
            after: Duration::from_millis(draw(&mut state) % SPREAD_MS),
            outage: Duration::from_millis(first + draw(&mut state) % (last - first)),
        }
    };
    (0..count).map(&mut turn).collect()
}

impl Turn {
    /// Moves the container; says where it is then, and how it went.
    fn play(&self, lab: &Lab, name: &str, from: &str, to: &str) -> Result<(String, String)> {
        let mut moving = Moving::begin(lab, name, from, to, self.mode)?;
        let begun = Instant::now();
        if self.mishap != Mishap::None {
            while moving.goes_on()? && begun.elapsed() < self.after {
                // The passing of time is what this is about.
                std::thread::sleep(Duration::from_millis(1));
            }
            self.befall(lab, from, to)?;
        }
        let ended = moving.end()?;
        let at = quiet(lab, name)?;
        ended.fits(from, to, &at)?;
        // Numbers of segments and of memfds that come and go meet by chance; criu cannot tell the two apart, and the move is refused.
        let met_by_chance = ended.error().contains(SAME_NUMBER);
        ensure!(
            self.mishap != Mishap::None || at == to || met_by_chance,
            "a move without a mishap failed: {}",
            ended.error()
        );
        let report = ended.report.as_ref();
        let blackout = report.and_then(|r| r.blackout_ms).map_or("none".to_owned(), |ms| format!("{ms:.0} ms"));
        let rounds = report.map_or(0, |r| r.rounds.len());
        let error = if at == to { String::new() } else { format!(", not moved: {}", ended.error()) };
        Ok((at, format!("blackout {blackout}, {rounds} rounds, {:.1} s{error}", begun.elapsed().as_secs_f64())))
    }

    fn befall(&self, lab: &Lab, from: &str, to: &str) -> Result<()> {
        let node = match self.mishap {
            Mishap::None => return Ok(()),
            Mishap::CutSource | Mishap::KillSourceAgent => from,
            Mishap::CutDestination | Mishap::KillDestinationAgent => to,
        };
        match self.mishap {
            Mishap::CutSource | Mishap::CutDestination => {
                lab.cut_link(node)?;
                std::thread::sleep(self.outage);
                lab.restore_link(node)?;
            }
            _ => {
                let agent = lab.agent_pid(node)?.context("there is no agent to be killed")?;
                send(Signal::SIGKILL, agent)?;
                wait_until("the agent to die", Duration::from_secs(5), || Ok(is_gone(agent).then_some(())))?;
                std::thread::sleep(self.outage);
                lab.start_agent(node, &[])?;
            }
        }
        Ok(())
    }
}

fn no_page_is_ever_wrong(stage: &mut Stage) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, 60);
    torture(&stage.lab, &Program { name: "torturer", ip, moves: MOVES, passed_on: "TRANSHIP_TORTURE" })
}

fn no_change_of_mappings_is_ever_wrong(stage: &mut Stage) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, 62);
    torture(&stage.lab, &Program { name: "mapper", ip, moves: MAPPER_MOVES, passed_on: "TRANSHIP_MAPPER" })
}

fn torture(lab: &Lab, program: &Program) -> Result<()> {
    let Program { name, ip, moves, passed_on } = *program;
    let seed = asked("TRANSHIP_SEED", |text| text.parse().ok())?.unwrap_or(SEED);
    let moves = asked("TRANSHIP_MOVES", |text| text.parse().ok())?.unwrap_or(moves);
    let modes = asked_modes()?;
    let calm = std::env::var("TRANSHIP_MISHAPS").is_ok_and(|text| text == "none");
    let arguments = arguments(seed, passed_on);

    let mut torturer = Torturer::start_program(lab, name, "a", name, ip, &arguments)?;
    torturer.goes_on(4 * STEPS).context("before the first move")?;
    let turns = turns(seed, moves, modes.as_deref().unwrap_or(&MODES), calm);
    let (mut at, mut moved) = ("a".to_owned(), 0);
    for (number, turn) in (1..).zip(&turns) {
        let (from, to) = (at.as_str(), if at == "a" { "b" } else { "a" });
        let what =
            format!("move {number} of {moves} {from} → {to}, {}, {:?} after {:?}", turn.mode, turn.mishap, turn.after);
        let hint = || format!("{what}; TRANSHIP_SEED={seed} TRANSHIP_MOVES={moves}");
        let (now, how) = turn.play(lab, name, from, to).with_context(hint)?;
        let line = torturer.goes_on(STEPS).with_context(hint)?;
        moved += usize::from(now == to);
        let checked = line.checks();
        let checked = if checked > 0 { format!("{checked} pages checked so far, none") } else { "nothing".to_owned() };
        eprintln!("{what}: {how}; {checked} wrong");
        at = now;
    }
    ensure!(2 * moved >= moves, "only {moved} of {moves} moves came to their end");
    remove(lab, name)
}

fn main() -> ExitCode {
    scenarios(&[
        ("no_page_is_ever_wrong", no_page_is_ever_wrong),
        ("no_change_of_mappings_is_ever_wrong", no_change_of_mappings_is_ever_wrong),
    ])
}
