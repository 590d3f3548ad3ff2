//! Runs the test suites of the workspace side by side, each in namespaces of its own; see `docs/testing.md`.

mod cgroups;
mod discovery;
mod isolation;
mod run;
mod table;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Runs test suites, each in namespaces of its own")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the tests and run suites side by side; one that fails is run once more, alone
    Run {
        /// How many suites run at a time
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
        jobs: u8,
        /// Every case of every matrix, with deadlines that allow for it
        #[arg(long)]
        all: bool,
        /// Show the names of all suites and run none
        #[arg(long)]
        list: bool,
        /// Names of suites, as the table at the end shows them; all where there are none
        #[arg(value_name = "SUITE")]
        suites: Vec<String>,
    },
    /// Run a command in network, mount, pid, uts, ipc and cgroup namespaces of its own (root only)
    Isolate(Isolate),
    /// Enter the cgroups, then the namespaces
    #[command(hide = true)]
    Enter(Isolate),
    /// Be process 1 of the namespaces
    #[command(hide = true)]
    Init(Isolate),
}

/// What to run in namespaces of its own.
#[derive(Debug, Clone, Args)]
struct Isolate {
    /// Mount version 2 of cgroups alone, also where the machine has version 1
    #[arg(long)]
    cgroup2: bool,
    /// End it after so many seconds, with a list of the processes that ran
    #[arg(long)]
    limit: Option<u64>,
    /// The directory whose `tmp` and `var-tmp` become /tmp and /var/tmp
    #[arg(long, hide = true)]
    scratch: Option<PathBuf>,
    /// A name for its cgroups: letters, digits, '-' and '_'
    name: String,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { jobs, all, list, suites } => run(jobs, all, list, &suites),
        Command::Isolate(what) => isolation::isolate(what),
        Command::Enter(what) => isolation::enter(&what),
        Command::Init(what) => isolation::init(&what),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("suites: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(jobs: u8, all: bool, list: bool, wanted: &[String]) -> Result<ExitCode> {
    let suites = discovery::suites(wanted)?;
    if list {
        suites.iter().for_each(|suite| println!("{}", suite.name));
        return Ok(ExitCode::SUCCESS);
    }
    let limit = Duration::from_secs(if all { 2 * 3600 } else { 900 });
    run::all(suites, usize::from(jobs), limit)
}

/// The path of this program. Where `run` has just built it anew, the file of that name is another one by now, and does the same.
fn own_program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let replaced = path.as_os_str().as_bytes().strip_suffix(b" (deleted)").map(OsStr::from_bytes);
    Ok(replaced.map_or_else(|| path.clone(), PathBuf::from))
}
