//! Rules about POSIX timers (CRIU: timer.c, `encode_notify_thread_id`).

use std::path::Path;

use super::Look;
use super::container::Container;
use super::procfs;

/// The threads that timers signal, as `/proc/PID/timers` numbers them.
pub(super) fn notified(timers: &str) -> impl Iterator<Item = u32> {
    timers.lines().filter_map(|line| line.strip_prefix("notify:")?.rsplit_once("/tid.")?.1.trim().parse().ok())
}

pub(super) fn check(container: &Container, look: &mut Look) {
    for task in container.tasks.values() {
        let timers = procfs::text(format!("/proc/{}/timers", task.pid)).unwrap_or_default();
        let has_ended = |tid: &u32| !Path::new(&format!("/proc/{}/task/{tid}", task.pid)).exists();
        if let Some(tid) = notified(&timers).find(has_ended) {
            let what = format!("has a timer that signals a thread ({tid}) that has ended");
            let remedy = "let the program delete the timer (timer_delete) when the thread ends, or restart it";
            look.block(task.blocker(&what, remedy));
        } else if notified(&timers).any(|tid| tid == task.pid) {
            // CRIU knows the first thread's number in the container when it has dumped the timers.
            let what = "has a timer that signals its first thread (SIGEV_THREAD_ID), which CRIU does not support";
            look.block(task.blocker(what, "let the timer signal the process, or another thread"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_are_signalled_are_found() {
        let text = "ID: 0\nsignal: 10/0000000000000000\nnotify: signal/tid.4268\nClockID: 1\n\
                    ID: 1\nsignal: 14/0000000000000000\nnotify: signal/pid.4262\nClockID: 0\n";
        assert_eq!(notified(text).collect::<Vec<_>>(), [4268]);
    }
}
