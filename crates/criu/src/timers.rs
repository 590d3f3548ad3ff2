//! Periodic timer descriptors that have expired and were not read yet.
//!
//! The kernel begins the next period of such a timer only when it is read. So CRIU finds that nothing is left of this one, and sets a
//! timer of which nothing is left, which is one that has been stopped: it never expires again (checkpoint-restore/criu issue 3162).

use std::fs;
use std::io;

use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_gettime, timerfd_settime};
use serde::{Deserialize, Serialize};
use tranship_sys::process::take_descriptor;

/// A periodic timer descriptor that is running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeriodicTimer {
    /// A process that has it open, as the container calls it.
    pub task: u32,
    /// Under which number.
    pub descriptor: i32,
    /// Its period, in seconds and ns.
    interval: (i64, u32),
}

/// What stands in the line of a timer's description that begins so, in seconds and ns.
fn time(text: &str, name: &str) -> Option<(i64, u32)> {
    let pair = text.lines().find_map(|line| line.strip_prefix(name))?.trim();
    let (seconds, ns) = pair.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    Some((seconds.trim().parse().ok()?, ns.trim().parse().ok()?))
}

/// Of `/proc/PID/fdinfo/FD`: the period, of a timer that runs or has expired.
pub(crate) fn running(text: &str) -> Option<(i64, u32)> {
    let interval = time(text, "it_interval:").filter(|interval| *interval != (0, 0))?;
    let left = time(text, "it_value:")?;
    let ticks = text.lines().find_map(|line| line.strip_prefix("ticks:"))?.trim();
    // One that has been stopped remembers its period, too.
    (left != (0, 0) || ticks != "0").then_some(interval)
}

/// What the timer descriptor of a process, given by its pids here and in the container, is: nothing if it is not periodic, or stopped.
/// Also one that has not expired is told of: it may have, before CRIU looks.
pub fn periodic(pid: u32, task: u32, descriptor: i32) -> Option<PeriodicTimer> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
    Some(PeriodicTimer { task, descriptor, interval: running(&text)? })
}

impl PeriodicTimer {
    /// Has the restored timer, of the process `pid`, expire at once and go on if CRIU has stopped it. Returns whether it had.
    ///
    /// # Errors
    /// There is no such descriptor, or it is no timer.
    pub fn go_on(&self, pid: u32) -> io::Result<bool> {
        let timer = take_descriptor(pid, self.descriptor)?;
        let left = timerfd_gettime(&timer)?.it_value;
        if (left.tv_sec, left.tv_nsec) != (0, 0) {
            return Ok(false);
        }
        let time = |seconds, ns: u32| Timespec { tv_sec: seconds, tv_nsec: ns.into() };
        let again = Itimerspec { it_interval: time(self.interval.0, self.interval.1), it_value: time(0, 1) };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &again)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

    use super::*;

    #[test]
    fn a_timer_that_was_stopped_when_it_had_expired_goes_on() {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty()).unwrap();
        let time = |ms: i64| Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
        let set = |value, interval| {
            let new = Itimerspec { it_interval: time(interval), it_value: time(value) };
            timerfd_settime(&timer, TimerfdTimerFlags::empty(), &new).unwrap();
        };
        let expirations = || {
            let mut count = [0; 8];
            rustix::io::read(&timer, &mut count).unwrap();
            u64::from_ne_bytes(count)
        };
        let here = || periodic(std::process::id(), 1, timer.as_raw_fd());
        assert_eq!(here(), None, "it was never set");
        set(20, 0);
        assert_eq!(here(), None, "it is not periodic");
        set(10, 10);
        let before = here().unwrap();
        assert!(!before.go_on(std::process::id()).unwrap(), "it runs");
        expirations();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(here().unwrap(), before, "it has expired");
        // As CRIU does it.
        set(0, 10);
        assert_eq!(here(), None, "it was stopped");
        assert!(before.go_on(std::process::id()).unwrap());
        let start = Instant::now();
        (0..3).for_each(|_| assert!(expirations() > 0));
        assert!(start.elapsed() > Duration::from_millis(10), "it is a period of 10 ms");
    }
}
