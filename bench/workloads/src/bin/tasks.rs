//! Many tasks of one kind, which do nothing: what each of them adds to a blackout.
//!
//! Besides what every program answers: `VERIFY` (an error if one of them is not there, or is not as it was).

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use tranship_workloads::{Answer, PORT, Service, serve};

/// What the tasks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Children that have ended, and that nobody has waited for
    Zombies,
    /// Processes each of which is the child of the one before
    Nested,
    /// Threads of the first process
    Threads,
    /// Children of the first process
    Processes,
}

/// Many tasks of one kind.
#[derive(Parser)]
struct Arguments {
    /// What they are
    #[arg(long)]
    kind: Kind,
    /// How many there are
    #[arg(long)]
    count: usize,
    /// Be one of them: the last one, or one that has `count` below it
    #[arg(long, hide = true)]
    child: bool,
}

/// A child of this program with so many below it.
fn start(kind: Kind, below: usize) -> Result<Child> {
    let kind = kind.to_possible_value().context("a kind")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", "--kind", kind.get_name(), "--count"]).arg(below.to_string());
    command.stdin(Stdio::null()).spawn().context("cannot start a child")
}

fn sleep() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(86_399));
    }
}

struct Tasks {
    kind: Kind,
    count: usize,
    children: Vec<Child>,
}

/// State and parent of a process.
fn state(pid: u32) -> Result<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid} is gone"))?;
    let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let state = fields.next().context("a state")?.to_owned();
    Ok((state, fields.next().context("a parent")?.parse()?))
}

impl Tasks {
    fn start(kind: Kind, count: usize) -> Result<Self> {
        let children = match kind {
            Kind::Zombies | Kind::Processes => (0..count).map(|_| start(kind, 0)).collect::<Result<_>>()?,
            Kind::Nested if count > 0 => vec![start(kind, count - 1)?],
            Kind::Nested => Vec::new(),
            Kind::Threads => {
                let small = || std::thread::Builder::new().stack_size(64 << 10);
                (0..count).try_for_each(|_| small().spawn(|| sleep()).map(drop))?;
                Vec::new()
            }
        };
        let tasks = Self { kind, count, children };
        while tasks.check().is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(tasks)
    }

    fn check(&self) -> Result<()> {
        let own = std::process::id();
        let are = |expected: &str| {
            self.children.iter().try_for_each(|child| {
                let found = state(child.id())?;
                ensure!(found == (expected.to_owned(), own), "process {} is {found:?}", child.id());
                Ok(())
            })
        };
        match self.kind {
            Kind::Zombies => are("Z"),
            Kind::Processes => are("S"),
            Kind::Threads => {
                let found = fs::read_dir("/proc/self/task")?.count();
                ensure!(found >= self.count, "there are {found} threads");
                Ok(())
            }
            Kind::Nested => {
                let (mut pid, mut found) = (own, 0);
                loop {
                    let below = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
                    let Some(child) = below.split_ascii_whitespace().next() else { break };
                    (pid, found) = (child.parse()?, found + 1);
                }
                ensure!(found == self.count, "there are {found} levels");
                Ok(())
            }
        }
    }
}

impl Service for Tasks {
    fn answer(&self, command: &[String]) -> Option<Answer> {
        let checked = || match self.check() {
            Ok(()) => Answer::Text("OK".to_owned()),
            Err(error) => Answer::Refused(format!("{error:#}")),
        };
        (command == ["VERIFY"]).then(checked)
    }
}

fn main() -> Result<()> {
    let Arguments { kind, count, child } = Arguments::parse();
    match kind {
        Kind::Zombies if child => Ok(()),
        Kind::Nested if child && count > 0 => {
            let _below = start(kind, count - 1)?;
            sleep()
        }
        _ if child => sleep(),
        _ => {
            let tasks = Tasks::start(kind, count)?;
            serve(&Arc::new(tasks)).with_context(|| format!("cannot listen on TCP port {PORT}"))
        }
    }
}
