//! Children: copies of a thread's memory, and programs of their own.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, execv, pipe2};

use crate::chance::Chance;
use crate::raw;
use crate::region::Region;
use crate::torture::{Counts, Torture};

/// Children that live for more than a moment, of all threads: each one's memory is as large as its parent's.
static LASTING: AtomicUsize = AtomicUsize::new(0);
const MOST_LASTING: usize = 2;
/// Rest of a child after each step.
const PACE: Duration = Duration::from_millis(5);
/// No child lives so long, but for one that waits for something that never comes.
const OLD: Duration = Duration::from_secs(240);

/// A child that has not ended.
struct Kin {
    pid: Pid,
    /// Where it says how it went, at its end.
    word: File,
    /// Shared memory that it alone writes to meanwhile, and the seed of what it writes.
    lent: Option<(Region, u64)>,
    lasting: bool,
    born: Instant,
}

/// The children of one thread.
pub struct Nursery {
    /// Program and arguments of a child that executes another program; a seed is put behind them.
    program: Vec<CString>,
    kin: Vec<Kin>,
}

impl Nursery {
    pub fn new(program: Vec<CString>) -> Self {
        Self { program, kin: Vec::new() }
    }

    /// Forks a child that checks its copy of this thread's private memory, changes it for a while, and ends. `copies`
    /// makes that of the thread's own regions, in the child.
    pub fn fork(
        &mut self,
        chance: &mut Chance,
        lent: Option<Region>,
        copies: impl FnOnce(&mut Option<Region>) -> (Torture, Option<Region>),
    ) -> Result<()> {
        let (seed, steps, lasting) = (chance.next(), chance.between(50, 1500), self.may_last());
        let steps = if lasting { steps } else { chance.below(4) };
        let mut lent = lent;
        let (pid, word) = fork(|| {
            let (mut copies, lent) = copies(&mut lent);
            live(&mut copies, lent, seed, steps)
        })?;
        self.kin.push(Kin { pid, word, lent: lent.map(|region| (region, seed)), lasting, born: Instant::now() });
        Ok(())
    }

    /// Forks a child that executes this program anew, to torture memory of its own.
    pub fn execute(&mut self, chance: &mut Chance) -> Result<()> {
        let lasting = self.may_last();
        let steps = if lasting { chance.between(50, 1500) } else { chance.below(20) };
        let seed = chance.next();
        let rest = [format!("--seed={seed}"), format!("--steps={steps}")].map(CString::new);
        let mut arguments = self.program.clone();
        arguments.extend(rest.into_iter().collect::<Result<Vec<_>, _>>()?);
        let (pid, word) = fork(|| execute(&arguments))?;
        self.kin.push(Kin { pid, word, lent: None, lasting, born: Instant::now() });
        Ok(())
    }

    fn may_last(&self) -> bool {
        let add = |count| (count < MOST_LASTING).then_some(count + 1);
        LASTING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// Buries those that have ended; returns the regions that were lent to them.
    pub fn visit(&mut self, counts: &Counts) -> Result<Vec<Region>> {
        let mut returned = Vec::new();
        for at in (0..self.kin.len()).rev() {
            let status = waitpid(self.kin[at].pid, Some(WaitPidFlag::WNOHANG))?;
            if status == WaitStatus::StillAlive {
                let age = self.kin[at].born.elapsed();
                ensure!(age < OLD, "child process {} has not ended after {} s", self.kin[at].pid, age.as_secs());
                continue;
            }
            let mut kin = self.kin.swap_remove(at);
            if kin.lasting {
                LASTING.fetch_sub(1, Ordering::Relaxed);
            }
            let mut text = String::new();
            kin.word.read_to_string(&mut text)?;
            ensure!(matches!(status, WaitStatus::Exited(_, 0)), "child process: {status:?}; it said {text:?}");
            let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let [checks, scribbles] = numbers[..] else { bail!("child process {} said {text:?}", kin.pid) };
            counts.of_children.fetch_add(checks, Ordering::Relaxed);
            if let Some((mut region, seed)) = kin.lent {
                let mut chance = Chance::new(seed);
                (0..scribbles).for_each(|_| region.scribble(&mut chance, false));
                let pages = region.pages();
                region.check(0, pages).context("after a child had written to it")?;
                returned.push(region);
            }
        }
        Ok(returned)
    }
}

/// Forks a child that says one line at its end; it is killed if its parent ends first.
fn fork(child: impl FnOnce() -> Result<String>) -> Result<(Pid, File)> {
    let (hear, say) = pipe2(OFlag::O_CLOEXEC)?;
    let pid = raw::fork(|| {
        // Cannot fail with these arguments.
        let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
        // The executed program finds the pipe as its stdout; to keep it so is simplest for both.
        if nix::unistd::dup2_stdout(&say).is_err() {
            return 3;
        }
        let (text, status) = match child() {
            Ok(text) => (text, 0),
            Err(error) => (format!("{error:#}"), 1),
        };
        i32::from(File::from(say).write_all(text.as_bytes()).is_err()).max(status)
    })?;
    Ok((pid, File::from(hear)))
}

/// The life of a forked child.
fn live(copies: &mut Torture, mut lent: Option<Region>, seed: u64, steps: usize) -> Result<String> {
    let before = copies.checked();
    let mut chance = Chance::new(seed);
    copies.check_all().context("right after the fork")?;
    for _ in 0..steps {
        copies.step()?;
        if let Some(region) = &mut lent {
            region.scribble(&mut chance, true);
        }
        std::thread::sleep(PACE);
    }
    copies.check_all().context("at a child's end")?;
    if let Some(region) = &mut lent {
        let pages = region.pages();
        region.check(0, pages).context("shared memory at a child's end")?;
    }
    Ok(format!("{} {steps}", copies.checked() - before))
}

fn execute(arguments: &[CString]) -> Result<String> {
    let program = arguments.first().context("no program")?;
    execv(program, arguments).context("cannot execute this program anew")?;
    bail!("execv returned")
}
