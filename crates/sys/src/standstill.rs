//! All threads of some processes stopped for a moment, with ptrace: what they see of it is that time has passed.
//!
//! If the process that stops them dies, or gives up because one of them cannot be stopped in time, the kernel lets all go on: a
//! tracer's threads are detached when the thread that traces them ends.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::interrupted::let_go;
use crate::process::waits_for_vforked;
use crate::threads;
use crate::tracee::{Tracee, state};

/// How often it is looked whether a thread has stopped.
const TICK: Duration = Duration::from_micros(50);
/// A thread that has not stopped by then may wait for a child that it has vforked.
const SOON: Duration = Duration::from_millis(2);

/// Does `work` while the processes stand still, and tells it if they could not be stopped within `patience`: then they run. A
/// thread that waits in the kernel without being interruptible stops only when it has waited, and one that waits for a child
/// of vfork is not waited for; one that another process traces cannot be stopped.
pub fn during<R: Send>(processes: &[u32], patience: Duration, work: impl FnOnce(io::Result<()>) -> R + Send) -> R {
    let work = Mutex::new(Some(work));
    let take = || lock(&work).take().expect("the work is done once");
    // One that has failed ends, and with it the stop; the work is done by another.
    let traced = threads::apart("standstill", || {
        let mut stopped = HashSet::new();
        let result = stop(processes, Instant::now() + patience, &mut stopped).map(|()| take()(Ok(())));
        stopped.into_iter().for_each(let_go);
        result
    });
    match traced.and_then(|result| result) {
        Ok(result) => result,
        Err(error) => take()(Err(error)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops every thread, also those that are started meanwhile by threads which still run.
fn stop(processes: &[u32], deadline: Instant, stopped: &mut HashSet<Tracee>) -> io::Result<()> {
    let late = |thread| io::Error::new(io::ErrorKind::TimedOut, format!("thread {thread} does not stop"));
    let mut seen = HashSet::new();
    loop {
        let mut asked = Vec::new();
        for process in processes {
            // One that is gone stands still.
            for thread in listed(*process) {
                if seen.insert(thread)
                    && let Some(tracee) = ask(*process, thread)?
                {
                    asked.push(tracee);
                }
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let mut failure = None;
        for tracee in asked {
            // After a failure, those that have stopped are only taken down, to be let go.
            match stops(&tracee, failure.as_ref().map_or(deadline, |_| Instant::now())) {
                Ok(true) => drop(stopped.insert(tracee)),
                Ok(false) => failure = failure.or_else(|| Some(late(tracee.thread()))),
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => failure = failure.or(Some(error)),
            }
            // Those that are asked start others, and could go on with that.
            if failure.is_none() && Instant::now() > deadline {
                failure = Some(late(tracee.thread()));
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
    }
}

/// The threads of a process, also those that have ended. Nothing is read of each, since those that were asked stand still meanwhile.
fn listed(process: u32) -> Vec<Pid> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw)).collect()
}

/// Whether a thread waits for a child that it has vforked, and stops only when that has called exec or ended.
fn waits_for_child(thread: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{thread}/wchan")).is_ok_and(|place| waits_for_vforked(&place))
}

/// Waits for the stop of a thread: whether it has come in time.
fn stops(tracee: &Tracee, deadline: Instant) -> io::Result<bool> {
    let wait = |until| tracee.wait_for_trap(Some(until), |_| std::thread::sleep(TICK));
    let soon = deadline.min(Instant::now() + SOON);
    Ok(wait(soon)? || (!waits_for_child(tracee.thread()) && wait(deadline)?))
}

/// Asks a thread to stop; `None` if it has ended.
pub(crate) fn ask(process: u32, thread: Pid) -> io::Result<Option<Tracee>> {
    match Tracee::seize(thread, 0).and_then(|tracee| tracee.interrupt().map(|()| tracee)) {
        Ok(tracee) => Ok(Some(tracee)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(_) if matches!(state(process, thread), None | Some(b'Z' | b'X')) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    const PATIENCE: Duration = Duration::from_secs(5);

    fn ticks(process: u32) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(11).unwrap().parse().unwrap()
    }

    struct Spinner(Child);

    impl Spinner {
        fn start() -> Self {
            let code = "import threading\ndef spin():\n while True: pass\n\
                        [threading.Thread(target=spin).start() for _ in range(3)]";
            let spinner = Self(Command::new("python3").args(["-c", code]).spawn().unwrap());
            let deadline = Instant::now() + PATIENCE;
            while std::fs::read_dir(format!("/proc/{}/task", spinner.0.id())).unwrap().count() < 4 {
                assert!(Instant::now() < deadline, "it starts no threads");
                std::thread::sleep(TICK);
            }
            spinner
        }
    }

    impl Drop for Spinner {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn no_thread_runs_meanwhile_and_all_run_afterwards() {
        let spinner = Spinner::start();
        let pid = spinner.0.id();
        for _ in 0..20 {
            let (before, after) = during(&[pid], PATIENCE, |stopped| {
                stopped.unwrap();
                let before = ticks(pid);
                std::thread::sleep(Duration::from_millis(30));
                (before, ticks(pid))
            });
            assert_eq!(before, after);
        }
        let (now, deadline) = (ticks(pid), Instant::now() + PATIENCE);
        while ticks(pid) == now {
            assert!(Instant::now() < deadline, "it does not go on");
            std::thread::sleep(TICK);
        }
    }

    #[test]
    fn signals_that_come_meanwhile_are_not_lost() {
        // Each one writes a byte at once; pause(2) would sleep on if it came right before that.
        let code = "import os, signal\nread, write = os.pipe()\nos.set_blocking(write, False)\n\
                    signal.set_wakeup_fd(write)\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nprint(0, flush=True)\n\
                    for n in range(1, 1000):\n os.read(read, 1)\n print(n, flush=True)";
        let mut child = Command::new("python3").args(["-c", code]).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for expected in 0..200u32 {
            assert_eq!(lines.next().unwrap().unwrap(), expected.to_string());
            let send = || nix::sys::signal::kill(Pid::from_raw(pid as i32), nix::sys::signal::SIGUSR1).unwrap();
            // Before, in the middle, or at just any moment of it.
            match expected % 3 {
                0 => during(&[pid], PATIENCE, |_| send()),
                1 => {
                    send();
                    during(&[pid], PATIENCE, |stopped| stopped.unwrap());
                }
                _ => std::thread::scope(|scope| {
                    scope.spawn(|| during(&[pid], PATIENCE, |stopped| stopped.unwrap()));
                    send();
                }),
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn one_that_is_gone_stands_still_and_one_that_is_traced_is_an_error() {
        during(&[4_000_000], PATIENCE, |stopped| stopped.unwrap());
        let spinner = Spinner::start();
        let pid = spinner.0.id();
        during(&[pid], PATIENCE, |stopped| {
            stopped.unwrap();
            during(&[pid], PATIENCE, |again| assert!(again.is_err()));
        });
        during(&[pid], PATIENCE, |stopped| stopped.unwrap());
    }
}
