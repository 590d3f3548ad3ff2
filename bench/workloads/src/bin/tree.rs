//! A tree of processes, each with threads that sleep most of the time and with descriptors of several kinds.
//!
//! Besides what every program answers: `WAKEUPS` (of all threads so far) and `VERIFY` (an error if a child does not answer, lacks
//! a thread that goes on, or a descriptor does not hold what it held).

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use tranship_workloads::{Answer, PORT, Service, serve};

/// For how long a thread sleeps at a time.
const SLEEP: Duration = Duration::from_millis(50);

/// A tree of processes with threads and descriptors.
#[derive(Parser)]
struct Arguments {
    /// Children of the first process
    #[arg(long, default_value_t = 0)]
    children: usize,
    /// Threads of each child
    #[arg(long)]
    threads: usize,
    /// Descriptors of each child
    #[arg(long)]
    descriptors: usize,
    /// Be one of the children
    #[arg(long, hide = true)]
    child: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.child { be_child(&arguments) } else { be_parent(&arguments) }
}

/// One child, asked and answering by its standard streams.
struct Asked {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Kept, so that it is not closed.
    _process: Child,
}

impl Asked {
    fn start(arguments: &Arguments) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--child").arg(format!("--threads={}", arguments.threads));
        command.arg(format!("--descriptors={}", arguments.descriptors));
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start a child")?;
        let input = process.stdin.take().context("a child without an input")?;
        let output = BufReader::new(process.stdout.take().context("a child without an output")?);
        let mut child = Self { input, output, _process: process };
        child.ask()?;
        Ok(child)
    }

    /// How often its threads have woken up; an error if something is not as it was.
    fn ask(&mut self) -> Result<u64> {
        self.input.write_all(b"?\n")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("a child says {line:?}"))
    }
}

struct Tree(Mutex<Vec<Asked>>);

impl Tree {
    fn ask_all(&self) -> Result<u64> {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.iter_mut().map(Asked::ask).sum()
    }
}

impl Service for Tree {
    fn answer(&self, command: &[String]) -> Option<Answer> {
        let words: Vec<_> = command.iter().map(String::as_str).collect();
        let refused = |error: anyhow::Error| Answer::Refused(format!("{error:#}"));
        match words.as_slice() {
            ["WAKEUPS"] => Some(self.ask_all().map_or_else(refused, |n| Answer::Integer(n as i64))),
            ["VERIFY"] => {
                let before = self.ask_all();
                std::thread::sleep(SLEEP * 4);
                let each = before.and_then(|before| Ok((before, self.ask_all()?)));
                Some(match each {
                    Ok((before, after)) if after > before => Answer::Text("OK".to_owned()),
                    Ok(_) => Answer::Refused("no thread wakes up any more".to_owned()),
                    Err(error) => refused(error),
                })
            }
            _ => None,
        }
    }
}

fn be_parent(arguments: &Arguments) -> Result<()> {
    let children = (0..arguments.children).map(|_| Asked::start(arguments)).collect::<Result<_>>()?;
    serve(&Arc::new(Tree(Mutex::new(children)))).with_context(|| format!("cannot listen on TCP port {PORT}"))
}

/// Descriptors that hold something.
enum Held {
    /// A file at a place in it.
    File(File, u64),
    /// A pipe with a byte in it.
    Pipe(PipeReader, PipeWriter, u8),
    /// Two connected sockets, one with a byte to be read.
    Sockets(UnixStream, UnixStream, u8),
}

impl Held {
    fn open(number: usize) -> Result<Self> {
        let byte = number as u8;
        Ok(match number % 3 {
            0 => {
                use std::io::Seek;
                let mut file = File::open(std::env::current_exe()?)?;
                file.seek(std::io::SeekFrom::Start(number as u64))?;
                Self::File(file, number as u64)
            }
            1 => {
                let (reader, mut writer) = std::io::pipe()?;
                writer.write_all(&[byte])?;
                Self::Pipe(reader, writer, byte)
            }
            _ => {
                let (one, mut other) = UnixStream::pair()?;
                other.write_all(&[byte])?;
                Self::Sockets(one, other, byte)
            }
        })
    }

    fn descriptors(&self) -> usize {
        if matches!(self, Self::File(..)) { 1 } else { 2 }
    }

    fn check(&mut self) -> Result<()> {
        let same = |from: &mut dyn Read, to: &mut dyn Write, byte: u8| -> Result<()> {
            let mut found = [0];
            from.read_exact(&mut found)?;
            ensure!(found == [byte], "{} instead of {byte}", found[0]);
            Ok(to.write_all(&found)?)
        };
        match self {
            Self::File(file, place) => {
                use std::io::Seek;
                let found = file.stream_position()?;
                ensure!(found == *place, "a file at {found} instead of {place}");
                Ok(())
            }
            Self::Pipe(reader, writer, byte) => same(reader, writer, *byte).context("a pipe"),
            Self::Sockets(one, other, byte) => same(one, other, *byte).context("a socket"),
        }
    }
}

fn be_child(arguments: &Arguments) -> Result<()> {
    let mut held: Vec<Held> = Vec::new();
    while held.iter().map(Held::descriptors).sum::<usize>() < arguments.descriptors {
        held.push(Held::open(held.len())?);
    }
    let wakeups: Vec<Arc<AtomicU64>> = (0..arguments.threads).map(|_| Arc::default()).collect();
    // The first thread is the one that answers.
    for counter in wakeups.iter().skip(1) {
        let counter = Arc::clone(counter);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(SLEEP);
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    for line in std::io::stdin().lines() {
        line?;
        let checked = held.iter_mut().try_for_each(Held::check);
        match checked {
            Ok(()) => println!("{}", wakeups.iter().map(|n| n.load(Ordering::Relaxed)).sum::<u64>()),
            Err(error) => println!("{error:#}"),
        }
    }
    bail!("the parent is gone")
}
