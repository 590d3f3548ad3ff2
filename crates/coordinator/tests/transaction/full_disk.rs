//! A disk that is full at any byte of the journals, and has space again some time later.
//!
//! It is a limit on the size of files, which holds for a whole process: so the test runs itself in a process of its own.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use tranship_coordinator::Ending;

use crate::stage::{Case, Mishap, run};

const NAME: &str = "full_disk::a_disk_that_is_full_at_any_byte_harms_nothing";
const WITHIN: &str = "TRANSHIP_TEST_FULL_DISK";
/// The action at which there is space again: long after a move that nothing disturbs has ended.
const FREED_AT: usize = 400;

fn limit(bytes: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).expect("a limit");
    setrlimit(Resource::RLIMIT_FSIZE, bytes.min(hard), hard).expect("a limit can be set");
}

/// Lets files grow again.
pub fn free_space() {
    limit(RLIM_INFINITY);
}

struct Full;

impl Full {
    fn at(bytes: u64) -> Self {
        limit(bytes);
        Self
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        free_space();
    }
}

#[test]
fn a_disk_that_is_full_at_any_byte_harms_nothing() {
    if std::env::var_os(WITHIN).is_none() {
        let output = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", NAME, "--nocapture"])
            .env(WITHIN, "1")
            .output()
            .expect("it runs itself");
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(told.contains("1 passed"), "{NAME} is not the name of this test: {told}");
        return;
    }
    // The kernel says it by a signal too, which would end this process; the agents' threads inherit the mask.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().expect("a signal can be blocked");

    let mut moved = 0;
    for faults in ["", "source.commit.before.error"] {
        for bytes in 0.. {
            let case = Case {
                seed: 7,
                mishaps: vec![(FREED_AT, Mishap::FreeSpace)],
                faults: faults.into(),
                ..Case::default()
            };
            let full = Full::at(bytes);
            let end = run(&case);
            drop(full);
            moved += usize::from(end.endings == [Ending::Moved]);
            if end.actions < FREED_AT && !end.endings.is_empty() && bytes > 2000 {
                break;
            }
        }
    }
    assert!(moved > 0, "the disk was always too full");
}
