//! A program that tortures its own memory, to be run in a container that is moved again and again. It writes pages that
//! tell which page they are and in which version, to memory of every kind, maps, unmaps, moves, resizes, cuts, forgets,
//! protects, forks and executes at random, and checks all the time that each page is what it must be. What must be there
//! is kept in the program itself, so that it moves too; it has a checksum.
//!
//! ```text
//! keeper (pid 1 of the container): TCP server, gathers what the others say
//!   ├── crowd: threads in one address space, each with regions of its own
//!   │     ├── forked children: check their copy, change it, end soon or late
//!   │     └── sprouts: forked children that execute the program anew, and torture memory of their own
//!   └── phoenix: executes itself again and again
//! ```
//!
//! A client of the TCP port receives a line of JSON every 50 ms on a connection that is never closed:
//! `{"line": n, "complaint": null | "the first mismatch", "counts": {"check.KIND": pages, "deed.DEED": times,
//! "step.WHO": steps}}`. What is done depends on the seed alone, but when it is done depends on the machine.

mod chance;
mod keeper;
mod kin;
mod page;
mod phoenix;
mod raw;
mod region;
mod torture;

use std::ffi::CString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use chance::mix;
use keeper::Word;
use kin::Nursery;
use raw::PAGE;
use region::Kind;
use torture::{Counts, Deed, Diet, Torture};

/// Time between two words of the crowd to the keeper.
const WORD: Duration = Duration::from_millis(50);
/// Pages that each process but the crowd tortures.
const FEW: usize = 2048;

static COUNTS: Counts = Counts::new();

/// A program that tortures its own memory and tells over TCP whether it is still right.
#[derive(Parser)]
struct Arguments {
    /// What is done, and in which order, depends on it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Memory of the threads together, in MiB; children have copies of it
    #[arg(long, default_value_t = 64)]
    memory: usize,
    /// Threads in one address space
    #[arg(long, default_value_t = 3)]
    threads: u32,
    /// Microseconds of rest after each deed
    #[arg(long, default_value_t = 500)]
    pace: u64,
    /// Torture only these kinds of memory
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Leave these deeds out
    #[arg(long, value_enum, value_delimiter = ',')]
    without: Vec<Deed>,
    /// Directory for files that are mapped, on a file system that moves with the container
    #[arg(long, default_value = "/tmp")]
    dir: PathBuf,
    /// TCP port of the reports
    #[arg(long, default_value_t = 7002)]
    port: u16,
    /// What this process is (each starts the others)
    #[arg(long, value_enum, default_value = "keeper", hide = true)]
    role: Role,
    /// How many deeds a sprout does
    #[arg(long, default_value_t = 0, hide = true)]
    steps: usize,
    /// Which life of the phoenix it is
    #[arg(long, default_value_t = 1, hide = true)]
    life: u32,
    /// The descriptor that the phoenix inherits
    #[arg(long, hide = true)]
    memfd: Option<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Keeper,
    Crowd,
    Sprout,
    Phoenix,
}

impl Arguments {
    /// The command line of another process with the same diet. A sprout's seed and steps are put behind it.
    fn command(&self, role: Role) -> Result<Vec<String>> {
        let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|v| v.get_name().to_owned()).unwrap_or_default()
        };
        let kinds: Vec<_> = self.kinds.iter().map(|kind| name(&|| kind.to_possible_value())).collect();
        let without: Vec<_> = self.without.iter().map(|deed| name(&|| deed.to_possible_value())).collect();
        let mut command = vec![
            std::env::current_exe()?.display().to_string(),
            format!("--role={}", name(&|| role.to_possible_value())),
            format!("--memory={}", self.memory),
            format!("--threads={}", self.threads),
            format!("--pace={}", self.pace),
            format!("--dir={}", self.dir.display()),
        ];
        for (option, list) in [("kinds", kinds), ("without", without)] {
            if !list.is_empty() {
                command.push(format!("--{option}={}", list.join(",")));
            }
        }
        if role != Role::Sprout {
            command.push(format!("--seed={}", self.seed));
        }
        Ok(command)
    }

    fn diet(&self, pages: usize) -> Diet {
        Diet {
            kinds: if self.kinds.is_empty() { Kind::ALL.to_vec() } else { self.kinds.clone() },
            without: self.without.clone(),
            pages,
            dir: self.dir.clone(),
            pace: Duration::from_micros(self.pace),
        }
    }
}

/// Says where it was that memory was not there.
fn last_words(address: usize, instruction: usize) {
    let thread = std::thread::current().name().unwrap_or("?").to_owned();
    let mapping = raw::mapping_of(address);
    let text = format!("{thread} touched {address:#x} at crash{instruction:+#x}; mapping: {mapping}");
    let _ = say(&Word::Complaint(text));
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = raw::on_crash(last_words) {
        eprintln!("torturer: {error:#}");
        return ExitCode::FAILURE;
    }
    let done = match arguments.role {
        Role::Keeper => keep(&arguments),
        Role::Crowd => crowd(&arguments),
        Role::Sprout => sprout(&arguments),
        Role::Phoenix => phoenix(&arguments),
    };
    match (done, arguments.role) {
        (Ok(()), _) => ExitCode::SUCCESS,
        (Err(error), Role::Sprout) => {
            // Its parent reads this, and complains.
            println!("{error:#}");
            ExitCode::FAILURE
        }
        (Err(error), Role::Phoenix) => {
            let _ = say(&Word::Complaint(format!("{error:#}")));
            ExitCode::FAILURE
        }
        (Err(error), _) => {
            eprintln!("torturer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn keep(arguments: &Arguments) -> Result<()> {
    let processes = [("crowd", arguments.command(Role::Crowd)?), ("phoenix", arguments.command(Role::Phoenix)?)];
    let wanted = |name: &str| name != "phoenix" || !arguments.without.contains(&Deed::Exec);
    let processes: Vec<_> = processes.into_iter().filter(|(name, _)| wanted(name)).collect();
    keeper::keep(&processes, arguments.port)
}

fn say(word: &Word) -> Result<()> {
    let mut line = serde_json::to_string(word)?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes()).context("the keeper is gone")
}

fn crowd(arguments: &Arguments) -> Result<()> {
    let pages = (arguments.memory << 20) / PAGE / arguments.threads.max(1) as usize;
    let complaint: Arc<Mutex<Option<String>>> = Arc::default();
    let mut steps: Vec<(u32, Arc<AtomicU64>)> = Vec::new();
    let sprout = arguments.command(Role::Sprout)?.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    for number in 1..=arguments.threads {
        let (counter, complaint) = (Arc::new(AtomicU64::new(0)), Arc::clone(&complaint));
        steps.push((number, Arc::clone(&counter)));
        let seed = mix(arguments.seed << 8 | u64::from(number));
        let nursery = Nursery::new(sprout.clone());
        let mut torture = Torture::new(arguments.diet(pages), number, seed, Some(nursery), &COUNTS);
        std::thread::Builder::new().name(format!("torture-{number}")).spawn(move || {
            loop {
                if let Err(error) = torture.step() {
                    let text = format!("step {} of {error:#}", counter.load(Ordering::Relaxed));
                    complaint.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
                    // Its children end with the thread, and it is seen no more.
                    std::thread::park();
                }
                counter.fetch_add(1, Ordering::Relaxed);
                torture.rest();
            }
        })?;
    }
    loop {
        let own = steps.iter().map(|(number, n)| (format!("step.{number}"), n.load(Ordering::Relaxed)));
        say(&Word::Counts(COUNTS.rows().into_iter().chain(own).collect()))?;
        if let Some(text) = complaint.lock().unwrap_or_else(PoisonError::into_inner).take() {
            say(&Word::Complaint(text))?;
        }
        std::thread::sleep(WORD);
    }
}

fn sprout(arguments: &Arguments) -> Result<()> {
    let mut torture = Torture::new(arguments.diet(FEW), 0x40, arguments.seed, None, &COUNTS);
    for _ in 0..arguments.steps {
        torture.step()?;
        torture.rest();
    }
    torture.check_all()?;
    torture.end()?;
    println!("{} 0", COUNTS.checked());
    Ok(())
}

fn phoenix(arguments: &Arguments) -> Result<()> {
    let seed = mix(arguments.seed ^ u64::from(arguments.life) << 32);
    let mut torture = Torture::new(arguments.diet(FEW), 0x60, seed, None, &COUNTS);
    let steps = seed as usize % 400;
    phoenix::live(&mut torture, arguments.command(Role::Phoenix)?, arguments.life, arguments.memfd, steps)
}
