//! Threads: what belongs to each, their stacks, and their waiting for each other.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::species::{Check, Watch, pattern, pattern_bytes};

/// What a group of threads reports.
#[derive(Default)]
struct Report {
    rounds: AtomicU64,
    complaint: Mutex<Option<anyhow::Error>>,
}

impl Report {
    fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            *self.complaint.lock().expect("nobody panics with it") = Some(error);
        }
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    fn checked_by(self: Arc<Self>, what: &'static str) -> impl FnMut() -> Result<()> {
        let mut watch = Watch::new(what);
        move || {
            if let Some(error) = self.complaint.lock().expect("nobody panics with it").take() {
                bail!("{what}: {error:#}");
            }
            watch.look(self.rounds.load(Ordering::Relaxed))
        }
    }
}

thread_local! {
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// Threads that each have a value, an id, a name and a signal mask of their own.
pub fn thread_local(_: &Path) -> Result<Check> {
    const SIGNALS: [Signal; 4] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH, Signal::SIGIO];
    let mut checks = Vec::new();
    for n in 0..8u64 {
        let report = Arc::new(Report::default());
        checks.push(Arc::clone(&report).checked_by("a thread"));
        thread::Builder::new().name(format!("beast-{n}")).spawn(move || {
            OWN.set(pattern(n));
            let id = nix::unistd::gettid();
            let mask: SigSet = [SIGNALS[n as usize % SIGNALS.len()]].into_iter().collect();
            report.note(mask.thread_set_mask().map_err(Into::into));
            loop {
                report.note((|| {
                    ensure!(OWN.get() == pattern(n), "its own value is {:#x}", OWN.get());
                    ensure!(nix::unistd::gettid() == id, "its id was {id} and is {}", nix::unistd::gettid());
                    let mut found = SigSet::empty();
                    nix::sys::signal::pthread_sigmask(SigmaskHow::SIG_BLOCK, None, Some(&mut found))?;
                    ensure!(found == mask, "its signal mask is {found:?}");
                    // Not from /proc: CRIU cannot restore a file of /proc that belongs to a thread and happens to be open.
                    let name = nix::sys::prctl::get_name()?;
                    ensure!(name.to_bytes() == format!("beast-{n}").as_bytes(), "its name is {name:?}");
                    Ok(())
                })());
                thread::sleep(Duration::from_millis(10));
            }
        })?;
    }
    Ok(Box::new(move || checks.iter_mut().try_for_each(|check| check())))
}

/// One call's part of a deep stack.
struct Frame<'a> {
    data: [u8; 4000],
    depth: u64,
    caller: Option<&'a Frame<'a>>,
}

fn descend(depth: u64, caller: Option<&Frame>, report: &Report) {
    let mut frame = Frame { data: [0; 4000], depth, caller };
    frame.data.copy_from_slice(&pattern_bytes(depth << 32, 4000));
    if depth < 500 {
        return descend(depth + 1, Some(&frame), report);
    }
    loop {
        report.note((|| {
            let (mut at, mut right) = (Some(&frame), 500);
            while let Some(frame) = at {
                ensure!(frame.depth == right, "call {right} says that it is call {}", frame.depth);
                ensure!(frame.data[..] == pattern_bytes(frame.depth << 32, 4000), "the stack of call {right} changed");
                right = right.wrapping_sub(1);
                at = frame.caller;
            }
            ensure!(right == u64::MAX, "the stack ends at call {right}");
            Ok(())
        })());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Two megabytes of stack in five hundred calls.
pub fn deep_stack(_: &Path) -> Result<Check> {
    let report = Arc::new(Report::default());
    let check = Arc::clone(&report).checked_by("the deep stack");
    thread::Builder::new().name("diver".into()).stack_size(8 << 20).spawn(move || descend(0, None, &report))?;
    Ok(Box::new(check))
}

/// Threads that fight for a lock and wait for their turn: a counter that must never be torn.
pub fn futex(_: &Path) -> Result<Check> {
    const THREADS: u64 = 4;
    let turns = Arc::new((Mutex::new((0u64, 0u64)), Condvar::new()));
    let report = Arc::new(Report::default());
    let mut check = Arc::clone(&report).checked_by("threads taking turns");
    for n in 0..THREADS {
        let (turns, report) = (Arc::clone(&turns), Arc::clone(&report));
        thread::Builder::new().name(format!("turn-{n}")).spawn(move || {
            let (lock, next) = &*turns;
            loop {
                let mut turn = lock.lock().expect("nobody panics with it");
                while turn.0 % THREADS != n {
                    turn = next.wait(turn).expect("nobody panics with it");
                }
                turn.0 += 1;
                // Sleeping with the lock held makes the others queue up for it.
                thread::sleep(Duration::from_micros(500));
                turn.1 += 1;
                report.note(if turn.0 == turn.1 { Ok(()) } else { Err(anyhow::anyhow!("torn: {turn:?}")) });
                next.notify_all();
            }
        })?;
    }
    Ok(Box::new(move || {
        let turn = *turns.0.lock().expect("nobody panics with it");
        ensure!(turn.0 == turn.1, "torn: {turn:?}");
        check()
    }))
}

/// An open file of `/proc` that belongs to a thread which is not the first of its process.
pub fn proc_file(_: &Path) -> Result<Check> {
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::Builder::new().name("named".into()).spawn(move || {
        // Nobody waits for it if this cage is ending.
        let _ = sender.send(std::fs::File::open("/proc/thread-self/comm"));
        loop {
            thread::park();
        }
    })?;
    let mut file = receiver.recv()??;
    Ok(Box::new(move || {
        let mut name = String::new();
        std::io::Seek::rewind(&mut file)?;
        std::io::Read::read_to_string(&mut file, &mut name)?;
        ensure!(name == "named\n", "the thread's name is {name:?}");
        Ok(())
    }))
}
