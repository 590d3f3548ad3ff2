//! A program that changes its mappings at random, to be run in a container that is moved again and again: it maps, unmaps, grows,
//! shrinks, moves, copies, cuts, replaces and advises them some thousand times a second, checks that each system call does what it
//! must, and that each page is what it must be. (The torturer has more memory, threads and kinds of children; this one has more
//! ways to change mappings, at a higher rate, so that they change between two looks and within one.)
//!
//! There is one process for each kind of memory, and a keeper that starts them and reports over TCP, as the torturer's does. What
//! is done depends on the seed alone, when it is done depends on the machine.

#[path = "../torturer/chance.rs"]
mod chance;
mod deeds;
#[path = "../torturer/keeper.rs"]
mod keeper;
mod raw;
mod world;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;

use deeds::Deed;
use keeper::Word;
use world::{Kind, World};

/// Time between two words to the keeper.
const WORD: Duration = Duration::from_millis(50);

/// A program that changes its mappings all the time and tells over TCP whether all of it is right.
#[derive(Parser)]
struct Arguments {
    /// What is done, and in which order, depends on it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Microseconds of rest after each deed
    #[arg(long, default_value_t = 100)]
    pace: u64,
    /// Only these kinds of memory
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Leave these deeds out
    #[arg(long, value_enum, value_delimiter = ',')]
    without: Vec<Deed>,
    /// Directory for files on a tmpfs
    #[arg(long, default_value = "/tmp")]
    dir: PathBuf,
    /// Directory for files on a disk that moves with the container; none: there are none
    #[arg(long)]
    disk: Option<PathBuf>,
    /// TCP port of the reports
    #[arg(long, default_value_t = 7002)]
    port: u16,
    /// End after so many seconds: without a keeper
    #[arg(long)]
    seconds: Option<u64>,
    /// Be the process of this kind (the keeper starts one for each)
    #[arg(long, value_enum, hide = true)]
    only: Option<Kind>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.only {
        Some(kind) => change(kind, &arguments),
        None => keep(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let told = say(&Word::Complaint(format!("{error:#}")));
            if told.is_err() || arguments.only.is_none() {
                eprintln!("mapper: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn keep(arguments: &Arguments) -> Result<()> {
    let own: Vec<String> = std::env::args().collect();
    let wanted = |kind: &Kind| match arguments.kinds[..] {
        [] => *kind != Kind::DiskFile || arguments.disk.is_some(),
        ref kinds => kinds.contains(kind),
    };
    let command = |kind: Kind| (kind.name(), [&own[..], &[format!("--only={}", kind.name())]].concat());
    let processes: Vec<_> = Kind::ALL.into_iter().filter(wanted).map(command).collect();
    keeper::keep(&processes, arguments.port)
}

fn say(word: &Word) -> Result<()> {
    let mut line = serde_json::to_string(word)?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes()).context("the keeper is gone")
}

fn change(kind: Kind, arguments: &Arguments) -> Result<()> {
    let directory = match kind {
        Kind::DiskFile => arguments.disk.as_ref().context("no directory on a disk is named")?,
        _ => &arguments.dir,
    };
    let mut world = World::new(kind, chance::mix(arguments.seed ^ (kind as u64) << 32), directory)?;
    let (begun, mut told, mut steps) = (Instant::now(), Instant::now(), 0u64);
    loop {
        world.step(&arguments.without).with_context(|| format!("step {steps}"))?;
        steps += 1;
        if told.elapsed() > WORD {
            say(&Word::Counts(BTreeMap::from([(format!("step.{}", kind.name()), steps)])))?;
            told = Instant::now();
        }
        if arguments.seconds.is_some_and(|seconds| begun.elapsed().as_secs() >= seconds) {
            return world.check_object();
        }
        std::thread::sleep(Duration::from_micros(arguments.pace));
    }
}
