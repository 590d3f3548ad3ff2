//! Descriptors that are kept for bad times: where a process has reached its limit, they are given up, so that what must
//! be done can be.

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

/// What to do where there are no descriptors.
pub const REMEDY: &str = "raise LimitNOFILE= of the agent's unit (ulimit -n)";

/// So many are kept.
const KEPT: usize = 32;
/// Where so many can be opened besides, nothing is lacking.
const ENOUGH: usize = 16;

static RESERVE: Mutex<Vec<File>> = Mutex::new(Vec::new());
/// Work for which they were given up, and which goes on.
static USERS: AtomicUsize = AtomicUsize::new(0);

fn reserve() -> MutexGuard<'static, Vec<File>> {
    RESERVE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Fills the reserve, as far as there are descriptors and nobody uses it; says whether it is full. To be called at the
/// start, and again and again.
pub fn fill() -> bool {
    let mut kept = reserve();
    while kept.len() < KEPT && USERS.load(Ordering::Acquire) == 0 {
        match spare() {
            Some(file) => kept.push(file),
            None => break,
        }
    }
    kept.len() == KEPT
}

/// Whether an error says that there are no descriptors.
pub fn is_lacking(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::EMFILE | Errno::ENFILE))
}

/// Whether so many descriptors can be opened now, beside the reserve.
pub fn are_there(count: usize) -> bool {
    let opened: Vec<_> = (0..count).map_while(|_| spare()).collect();
    opened.len() == count
}

/// For as long as it lives, the reserve is open to whoever needs descriptors.
#[derive(Debug)]
pub struct Use(());

/// Opens the reserve if descriptors are lacking. Called first by what must be done while a container waits.
pub fn open_if_needed() -> Option<Use> {
    if USERS.load(Ordering::Acquire) == 0 && are_there(ENOUGH) {
        return None;
    }
    USERS.fetch_add(1, Ordering::AcqRel);
    reserve().clear();
    Some(Use(()))
}

impl Drop for Use {
    fn drop(&mut self) {
        USERS.fetch_sub(1, Ordering::AcqRel);
        fill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    /// In a process of its own, whose limit is nobody else's.
    #[test]
    fn what_is_kept_can_be_used_where_the_limit_is_reached() {
        // SAFETY: the child has one thread, and ends by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let done = std::panic::catch_unwind(use_it).is_ok();
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(i32::from(!done)) }
            }
            ForkResult::Parent { child } => {
                assert!(matches!(waitpid(child, None).unwrap(), WaitStatus::Exited(_, 0)));
            }
        }
    }

    fn use_it() {
        assert!(fill());
        assert!(open_if_needed().is_none(), "nothing is lacking");
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 300, hard).unwrap();
        let taken: Vec<_> = std::iter::from_fn(spare).collect();
        assert!(is_lacking(&File::open("/dev/null").unwrap_err()));
        let used = open_if_needed();
        assert!(used.is_some() && are_there(KEPT / 2));
        let borrowed: Vec<_> = std::iter::from_fn(spare).collect();
        drop(used);
        assert!(!fill(), "there is nothing to fill it with");
        drop(borrowed);
        assert!(fill());
        drop(taken);
    }
}
