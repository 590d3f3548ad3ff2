//! The pages with the arguments and the environment that a process was started with. The kernel reads them for others, who ask for
//! `/proc/PID/cmdline` and `environ` as `ps` does; unlike the process itself it does not wait for a page that is missing, but tells less. So
//! these pages are in place before the process runs.

use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use tranship_sys::threads;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use tranship_sys::process;
use tranship_sys::schedule::{self, Standing};

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;
/// Most processes that are waited for at the same time.
const AT_ONCE: usize = 32;

/// Has these stopped processes get them, many at the same time: where a page has to come from the source each waits for a round trip.
/// The calling thread is one of those that wait, and favoured from then on.
///
/// # Errors
/// The first of those of [`fetch`]; the other processes have theirs all the same.
pub fn fetch_all(pids: &[u32]) -> io::Result<()> {
    for_each(pids, fetch)
}

fn for_each(pids: &[u32], fetch: impl Fn(u32) -> io::Result<u64> + Sync) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        schedule::stand(Standing::Favoured);
        let mut result = Ok(());
        while let Some(pid) = pids.get(next.fetch_add(1, Ordering::Relaxed)) {
            result = result.and(fetch(*pid).map(drop));
        }
        result
    };
    thread::scope(|scope| {
        // As many as there can be: the calling thread does what is left.
        let others = (1..pids.len().min(AT_ONCE)).map_while(|_| threads::start_within(scope, "arguments", work).ok());
        let others: Vec<_> = others.collect();
        let own = work();
        others.into_iter().fold(own, |result, other| result.and(threads::joined(other.join())))
    })
}

/// Has a stopped process get these pages, by reading them as another process may, who waits for what is missing. Returns their bytes:
/// what the process has unmapped has none.
///
/// # Errors
/// The process is gone; or the system's refusal.
pub fn fetch(pid: u32) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK];
    let mut fetched = 0;
    for range in process::strings(pid)? {
        let mut at = range.start;
        while at < range.end {
            let len = CHUNK.min((range.end - at) as usize);
            let remote = RemoteIoVec { base: at as usize, len };
            match process_vm_readv(Pid::from_raw(pid as i32), &mut [IoSliceMut::new(&mut buffer[..len])], &[remote]) {
                Ok(0) | Err(Errno::EFAULT) => break,
                Ok(read) => at += read as u64,
                Err(error) => return Err(error.into()),
            }
        }
        fetched += at - range.start;
    }
    Ok(fetched)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    #[test]
    fn all_that_the_kernel_tells_is_read() {
        let told = |file| std::fs::read(format!("/proc/self/{file}")).unwrap().len() as u64;
        assert_eq!(fetch(std::process::id()).unwrap(), told("cmdline") + told("environ"));
        assert!(fetch(u32::MAX / 2).is_err());
    }

    #[test]
    fn no_process_waits_for_another_ones() {
        let pids: Vec<u32> = (1..=AT_ONCE as u32 + 5).collect();
        let (asked, others) = (Mutex::new(0), Condvar::new());
        let fetched = for_each(&pids, |pid| {
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            others.notify_all();
            let alone = |asked: &mut usize| *asked < AT_ONCE;
            let waited = others.wait_timeout_while(asked, Duration::from_secs(20), alone).unwrap().1;
            assert!(!waited.timed_out(), "{pid} waits alone");
            if pid == 3 { Err(io::ErrorKind::NotFound.into()) } else { Ok(0) }
        });
        assert_eq!(fetched.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(*asked.lock().unwrap(), pids.len(), "what fails keeps no other from being asked for");
    }
}
