//! Whether two copies of a container ever run at the same time, from the kernel's own trace of what they do: not a look now and then, but
//! each call of a program, with its time.
//!
//! The program is a Redis that is executed under a name of its own. Each turn of its event loop begins with `epoll_wait`, which CRIU's code
//! and ours never call in a task. Each copy has another pid; so the lives of two copies overlap if one calls
//! it between two calls of the other.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tranship_lab::redis_command;

use crate::runner::wait_until;

const INSTANCE: &str = "tranship-lives-";
/// What the file system of the trace is called.
const KIND: &str = "tracefs";
/// KiB of each processor's buffer: some 10,000 calls.
const BUFFER_KIB: &str = "4096";
/// How long its reader waits for more.
const PAUSE: Duration = Duration::from_millis(5);
/// How many letters the name of a program can have.
const LONGEST: usize = 15;

/// From the first call of a copy to the last one, in µs of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Life {
    /// As the first pid namespace numbers it.
    pid: u32,
    first: u64,
    last: u64,
    calls: u64,
    /// The process has ended: the kernel may give its pid to another one.
    ended: bool,
}

#[derive(Debug, Default)]
struct Seen {
    /// By the name of the program.
    lives: BTreeMap<String, Vec<Life>>,
    /// Calls that the buffer had no space for.
    lost: u64,
    /// The time of the last line.
    now: u64,
}

/// Watches from its beginning until it is dropped.
#[derive(Debug)]
pub struct Lives {
    /// Where the trace is mounted, in the mount namespace that tests have to themselves.
    mount: PathBuf,
    instance: PathBuf,
    /// Names of the programs begin so.
    prefix: String,
    seen: Arc<Mutex<Seen>>,
    ends: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

/// Reads the trace until it is to end.
fn read(mut pipe: File, seen: &Mutex<Seen>, ends: &AtomicBool) {
    let (mut text, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    while !ends.load(Ordering::Relaxed) {
        match pipe.read(&mut chunk) {
            Ok(length) if length > 0 => text.extend_from_slice(&chunk[..length]),
            // The kernel wakes a reader late, and does not tell it that the trace was switched off.
            _ => std::thread::sleep(PAUSE),
        }
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text[..whole]).lines().for_each(|line| seen.take(line));
        text.drain(..whole);
    }
}

impl Lives {
    /// Begins to watch.
    ///
    /// # Errors
    /// If the kernel has no tracepoints of system calls (CONFIG_FTRACE_SYSCALLS), or another reader keeps the trace.
    pub fn watch() -> Result<Self> {
        let unique = SystemTime::UNIX_EPOCH.elapsed()?.as_nanos() as u64 % (1 << 32);
        let directory = PathBuf::from(format!("/tmp/lives-{unique:08x}"));
        fs::create_dir(&directory)?;
        mount(Some(KIND), &directory, Some(KIND), MsFlags::empty(), None::<&str>).context("the kernel's trace")?;
        let instances = directory.join("instances");
        // Those of tests that were killed; one that is read cannot be removed.
        for entry in fs::read_dir(&instances)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(INSTANCE) {
                let _ = fs::remove_dir(entry.path());
            }
        }
        let prefix = format!("r{unique:08x}-");
        let instance = instances.join(format!("{INSTANCE}{unique:08x}"));
        fs::create_dir(&instance).context("another instance of the trace")?;
        let mut lives =
            Self { mount: directory, instance, prefix, seen: Arc::default(), ends: Arc::default(), reader: None };
        lives.begin()?;
        Ok(lives)
    }

    fn begin(&mut self) -> Result<()> {
        let instance = self.instance.clone();
        let file = |name: &str| instance.join(name);
        let pipe = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file("trace_pipe"))?;
        let write =
            |name: &str, text: &str| fs::write(file(name), text).with_context(|| format!("{name} of the trace"));
        write("buffer_size_kb", BUFFER_KIB)?;
        write("trace_clock", "mono")?;
        for event in ["events/syscalls/sys_enter_epoll_wait", "events/sched/sched_process_exit"] {
            write(&format!("{event}/filter"), &format!("comm ~ \"{}*\"", self.prefix))?;
            write(&format!("{event}/enable"), "1")?;
        }
        let (seen, ends) = (Arc::clone(&self.seen), Arc::clone(&self.ends));
        self.reader = Some(std::thread::Builder::new().name("lives".into()).spawn(move || read(pipe, &seen, &ends))?);
        Ok(())
    }

    /// A Redis whose lives are told apart from those of others by this name, of a few letters.
    #[must_use]
    pub fn redis(&self, name: &str) -> Vec<String> {
        let program = format!("{}{name}", self.prefix);
        assert!(program.len() <= LONGEST, "{program:?} is too long");
        let words = redis_command();
        let quoted: Vec<String> = words[1..].iter().map(|word| format!("'{word}'")).collect();
        let script =
            format!("ln -s \"$(command -v {})\" /tmp/{program} && exec /tmp/{program} {}", words[0], quoted.join(" "));
        ["sh", "-c", &script].map(str::to_owned).to_vec()
    }

    /// Checks that no two copies of a program lived at the same time so far, and that the last one lives.
    ///
    /// # Errors
    /// If two did, with the time of each; if none was seen.
    pub fn check(&self, name: &str) -> Result<()> {
        let program = format!("{}{name}", self.prefix);
        let since = self.seen().now;
        // Whatever had been called before is told then.
        wait_until("the container to go on in the trace", Duration::from_secs(10), || {
            let seen = self.seen();
            let goes_on = |lives: &Vec<Life>| lives.iter().any(|life| life.last > since);
            Ok(seen.lives.get(&program).is_some_and(goes_on).then_some(()))
        })?;
        let seen = self.seen();
        ensure!(seen.lost == 0, "the trace lacks {} calls", seen.lost);
        match overlap(&seen.lives[&program]) {
            None => Ok(()),
            Some(timeline) => bail!("two copies of {name} ran at the same time:\n{timeline}"),
        }
    }

    /// How many copies of a program have lived so far.
    #[must_use]
    pub fn count(&self, name: &str) -> usize {
        self.seen().lives.get(&format!("{}{name}", self.prefix)).map_or(0, Vec::len)
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lives {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        // Of a process that has just been forked the pipe may be open for a moment.
        let removed = || Ok(fs::remove_dir(&self.instance).is_ok().then_some(()));
        if let Err(error) = wait_until("the trace to end", Duration::from_secs(5), removed) {
            eprintln!("{} stays until the next test: {error:#}", self.instance.display());
        }
        let _ = umount2(&self.mount, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.mount);
    }
}

impl Seen {
    /// A line of the trace: `NAME-PID [CPU] FLAGS SECONDS.MICROSECONDS: sys_epoll_wait(…)`.
    fn take(&mut self, line: &str) {
        if let Some((_, lost)) = line.split_once("[LOST ") {
            self.lost += lost.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(1);
            return;
        }
        let Some((task, rest)) = line.split_once(" [") else { return };
        let Some((program, pid)) = task.trim().rsplit_once('-') else { return };
        let time = rest.split(": ").next().and_then(|head| head.split_whitespace().last()).unwrap_or_default();
        let micros =
            time.split_once('.').and_then(|(s, us)| Some(s.parse::<u64>().ok()? * 1_000_000 + us.parse::<u64>().ok()?));
        let (Ok(pid), Some(at)) = (pid.parse(), micros) else { return };
        self.now = self.now.max(at);
        let lives = self.lives.entry(program.to_owned()).or_default();
        let known = lives.iter_mut().find(|life| life.pid == pid && !life.ended);
        match known {
            Some(life) if rest.contains("sched_process_exit") => life.ended = true,
            Some(life) => {
                // Lines of two processors may change places.
                (life.first, life.last) = (life.first.min(at), life.last.max(at));
                life.calls += 1;
            }
            None if rest.contains("sched_process_exit") => {}
            None => lives.push(Life { pid, first: at, last: at, calls: 1, ended: false }),
        }
    }
}

/// The lives of a program, if two of them overlap.
fn overlap(lives: &[Life]) -> Option<String> {
    let mut sorted = lives.to_vec();
    sorted.sort_by_key(|life| life.first);
    if sorted.is_sorted_by(|earlier, later| earlier.last < later.first) {
        return None;
    }
    let begin = sorted[0].first;
    let ms = |at: u64| (at - begin) as f64 / 1000.0;
    let line = |life: &Life| {
        format!("  {:11.3} to {:11.3} ms: pid {}, {} turns", ms(life.first), ms(life.last), life.pid, life.calls)
    };
    Some(sorted.iter().map(line).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(lines: &[&str]) -> Seen {
        let mut seen = Seen::default();
        lines.iter().for_each(|line| seen.take(line));
        seen
    }

    fn seen_of_pid_that_comes_again() -> Seen {
        let exit = "x-1 [001] ..... 1.100000: sched_process_exit: comm=x pid=1 prio=120 group_dead=true";
        seen(&["x-1 [000] ..... 1.000000: sys", exit, "x-2 [001] ..... 2.000000: sys", "x-1 [000] ..... 3.000000: sys"])
    }

    #[test]
    fn lives_that_follow_each_other_are_right() {
        let seen = seen(&[
            "        r1-7-x-100     [000] .....   12.000100: sys_epoll_wait(epfd: 5, events: 7f, maxevents: 3f0, timeout: 64)",
            "        r1-7-x-100     [001] .....   12.500000: sys_epoll_wait(epfd: 5, events: 7f, maxevents: 3f0, timeout: 64)",
            "        r1-7-x-230     [001] .....   13.000000: sys_epoll_wait(epfd: 5, events: 7f, maxevents: 3f0, timeout: 64)",
        ]);
        assert_eq!(seen.lives["r1-7-x"].len(), 2);
        assert_eq!((seen.lives["r1-7-x"][0].first, seen.lives["r1-7-x"][0].last), (12_000_100, 12_500_000));
        assert_eq!((overlap(&seen.lives["r1-7-x"]), seen.lost, seen.now), (None, 0, 13_000_000));
    }

    #[test]
    fn two_lives_at_a_time_are_found() {
        let mut seen =
            seen(&["x-1 [000] ..... 1.000000: sys", "x-2 [001] ..... 2.000000: sys", "x-1 [000] ..... 2.000001: sys"]);
        let timeline = overlap(&seen.lives["x"]).unwrap();
        assert!(timeline.contains("pid 1, 2 turns") && timeline.contains("pid 2, 1 turns"), "{timeline}");
        // The same process goes on after a move that failed.
        seen.lives.get_mut("x").unwrap().remove(1);
        assert_eq!(overlap(&seen.lives["x"]), None);
        // And so does a later copy that gets the pid of an earlier one.
        let mut seen = seen_of_pid_that_comes_again();
        assert_eq!((seen.lives["x"].len(), overlap(&seen.lives["x"])), (3, None));
        seen.take("CPU:1 [LOST 12 EVENTS]");
        assert_eq!(seen.lost, 12);
    }
}
