//! The program whose memory is tracked: it does what it is told, a line at a time, and answers each with a line.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::raw::{self, PAGE};

/// Calls of mremap by threads that resize, and how many of them failed.
static RESIZED: AtomicUsize = AtomicUsize::new(0);
static REFUSED: AtomicUsize = AtomicUsize::new(0);

/// What it is called with.
pub const ARGUMENT: &str = "subject";

/// The subject's `main`.
pub fn main() -> io::Result<()> {
    let (mut lines, mut output) = (io::stdin().lines(), io::stdout());
    writeln!(output, "0")?;
    while let Some(line) = lines.next().transpose()? {
        let answer = obey(&line)?;
        writeln!(output, "{answer}")?;
    }
    Ok(())
}

fn obey(line: &str) -> io::Result<usize> {
    let mut words = line.split(' ');
    let deed = words.next().unwrap_or_default();
    let numbers: Vec<usize> = words.map(|word| word.parse().expect("a number")).collect();
    let done = match (deed, numbers[..].as_ref()) {
        ("map", [address, pages]) => raw::map(*address, *pages, false),
        ("huge", [pages]) => raw::map(raw::ANYWHERE, *pages, true),
        ("unmap", [address, pages]) => raw::unmap(*address, *pages).map(|()| 0),
        ("remap", [address, pages, new, to]) => raw::remap(*address, *pages, *new, *to),
        ("discard", [address, pages]) => raw::advise(*address, *pages, libc::MADV_DONTNEED).map(|()| 0),
        ("hide", [address, pages]) => raw::protect(*address, *pages, libc::PROT_NONE).map(|()| 0),
        ("write", [address, pages, value]) => {
            (0..*pages).for_each(|page| raw::write(address + page * PAGE, *value as u64));
            Ok(0)
        }
        // Each thread its own page, all the time.
        ("threads", [address, count]) => {
            for thread in 0..*count {
                let page = address + thread * PAGE;
                std::thread::spawn(move || raw::write_on(page));
            }
            Ok(0)
        }
        // Grows and shrinks for ever, beside others that do, and is moved where they are in the way.
        ("resize", [address, pages]) => {
            let (mut at, pages) = (*address, *pages);
            std::thread::spawn(move || {
                for value in 0.. {
                    for size in 0..pages {
                        let old = if size == 0 { pages } else { size };
                        let Ok(new) = raw::remap(at, old, size + 1, 0) else {
                            REFUSED.fetch_add(1, Ordering::Relaxed);
                            return;
                        };
                        RESIZED.fetch_add(1, Ordering::Relaxed);
                        at = new;
                        raw::write(at + size * PAGE, value);
                    }
                }
            });
            Ok(0)
        }
        ("resized", []) => Ok(RESIZED.load(Ordering::Relaxed)),
        ("refused", []) => Ok(REFUSED.load(Ordering::Relaxed)),
        ("fork", [address, value]) => raw::fork(false, || {
            raw::write(*address, *value as u64);
            raw::write_on(*address + PAGE);
        })
        .map(|child| child.as_raw() as usize),
        ("fork-briefly", [ms]) => raw::fork(true, || std::thread::sleep(Duration::from_millis(*ms as u64)))
            .map(|child| child.as_raw() as usize),
        ("share", [sibling]) => raw::share(*sibling != 0).map(|child| child.as_raw() as usize),
        ("reap", [pid]) => {
            let child = Pid::from_raw(*pid as i32);
            let _ = kill(child, Signal::SIGKILL);
            waitpid(child, None)?;
            Ok(0)
        }
        ("execute", []) => Err(Command::new(std::env::current_exe()?).arg(ARGUMENT).exec()),
        ("confine", []) => raw::confine().map(|()| 0),
        other => panic!("{other:?} is no deed"),
    };
    done.map_err(|error| io::Error::new(error.kind(), format!("{line}: {error}")))
}

/// A subject, as those see it who tell it what to do. Killed when dropped.
pub struct Subject {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Subject {
    pub fn start() -> Self {
        let own = std::env::current_exe().expect("this program has a name");
        let mut command = Command::new(own);
        let mut child = command
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started again");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut subject = Self { child, input, output: BufReader::new(output) };
        subject.answer();
        subject
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it do something.
    pub fn does(&mut self, deed: &str) -> usize {
        self.begins(deed);
        self.answer()
    }

    /// Has it begin to.
    pub fn begins(&mut self, deed: &str) {
        writeln!(self.input, "{deed}").expect("the subject lives");
    }

    /// What it answers to that.
    pub fn answer(&mut self) -> usize {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the subject answers");
        line.trim().parse().unwrap_or_else(|_| panic!("the subject has died: {:?}", self.child.try_wait()))
    }

    /// Maps pages and writes a value to them.
    pub fn fills(&mut self, pages: usize, value: usize) -> usize {
        let start = self.does(&format!("map 0 {pages}"));
        self.writes(start, pages, value);
        start
    }

    pub fn writes(&mut self, address: usize, pages: usize, value: usize) {
        self.does(&format!("write {address} {pages} {value}"));
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // Its children, too: one that was stopped before it said that it ends with its parent would stay.
        for pid in tranship_sys::process::family(self.pid()) {
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Stops processes for good, and waits until they stand.
pub fn stop(pids: &[u32]) {
    for pid in pids {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).expect("it lives");
        let stands = |task: &fs::DirEntry| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        while !fs::read_dir(format!("/proc/{pid}/task")).expect("it lives").flatten().all(|task| stands(&task)) {
            std::thread::yield_now();
        }
    }
}
