//! The zoo: one program with a bit of everything that a process can have, to be run in a container that is moved again
//! and again. Each *animal* is one kind of state (a pipe with data in it, a held lock, a pending signal …) together with
//! a check that notices when that state is no longer what it was. All checks run all the time, about fifty times a
//! second, so a move always falls between two of them or into the middle of one.
//!
//! ```text
//! keeper (pid 1 of the container): TCP server, gathers reports
//!   ├── cage "channels": runs the animals of that cage one after the other, for ever
//!   ├── cage "files":    …           └── kin: processes that an animal forked for its purposes
//!   └── …
//! ```
//!
//! A client of the TCP port receives one line of JSON every 50 ms on a connection that is never closed:
//! `{"line": n, "tick": n, "complaints": [..], "checks": {animal: count}}`. Complaints stay in the list for ever.
//!
//! It makes SysV objects, so run it in an IPC namespace of its own (a container has one).

mod channels;
mod files;
mod keeper;
mod kin;
mod limits;
mod locks;
mod memory;
mod network;
mod processes;
mod raw;
mod sharing;
mod signals;
mod species;
mod sysv;
mod terminals;
mod threads;
mod timers;
mod unix;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;

/// A program whose parts check themselves all the time and report over TCP.
#[derive(Parser)]
struct Arguments {
    /// Print the animals with their cages and end
    #[arg(long)]
    list: bool,
    /// Run only these animals
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// TCP port of the reports
    #[arg(long, default_value_t = 7000)]
    port: u16,
    /// Directory that the animals may write to, on a file system that moves with the container
    #[arg(long, default_value = "/tmp")]
    dir: PathBuf,
    /// Be this cage (the keeper starts one process for each)
    #[arg(long, hide = true)]
    cage: Option<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zoo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.list {
        for species in species::ALL {
            let wild = species.wild.map(|why| format!("only if named; CRIU: {why}"));
            println!("{:<24} {:<12} {}", species.name, species.cage, wild.unwrap_or_default());
        }
        return Ok(());
    }
    for name in &arguments.only {
        ensure!(species::ALL.iter().any(|s| s.name == name), "no animal is called {name:?}; --list shows the names");
    }
    let named = |s: &&species::Species| arguments.only.iter().any(|name| name == s.name);
    let all = arguments.only.is_empty();
    let chosen: Vec<_> = species::ALL.iter().filter(|s| if all { s.wild.is_none() } else { named(s) }).collect();
    match &arguments.cage {
        Some(cage) => keeper::run_cage(cage, &chosen, &arguments.dir),
        None => keeper::keep(&chosen, &arguments.dir, arguments.port),
    }
}
