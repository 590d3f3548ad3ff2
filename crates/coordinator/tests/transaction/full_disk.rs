//! A disk that is full at any byte of the journals, and has space again some time later.
//!
//! It is a limit on the size of files, which holds for a whole process: so the test runs itself in a process of its own.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};

use tranship_types::Side;

use crate::stage::{Case, Mishap, run};

const NAME: &str = "full_disk::a_disk_that_is_full_at_any_byte_harms_nothing";
const WITHIN: &str = "TRANSHIP_TEST_FULL_DISK";
/// The action at which there is space again: long after a move that nothing disturbs has ended.
const FREED_AT: usize = 400;
/// Bytes from one size of the disk to the next: no divisor of what lines are long.
const STRIDE: u64 = 7;

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

    let (undo, give_up) = ("source.commit.before.error", "source.deliver.before.error");
    let cases = [
        ("", None),
        (undo, None),
        (give_up, None),
        ("", Some(Side::Source)),
        ("", Some(Side::Destination)),
        (undo, Some(Side::Source)),
        (give_up, Some(Side::Source)),
    ];
    for (faults, long) in cases {
        // Where one journal is long, the disk is full for that side alone; before it, neither can begin.
        let mut bytes = if long.is_some() { 2000 } else { 0 };
        // Until the disk has been large enough for longer than any line but the first is.
        let mut enough = 0;
        while enough < 256 {
            let mut mishaps = vec![(FREED_AT, Mishap::FreeSpace)];
            mishaps.extend((faults == give_up).then_some((1, Mishap::GiveUp)));
            let full = Full::at(bytes);
            let end = run(&Case { seed: 7, mishaps, faults: faults.into(), long, ..Case::default() });
            drop(full);
            let as_wanted = end.world.decided == (faults != undo) && end.world.given_up == (faults == give_up);
            let undisturbed = end.actions < FREED_AT && end.endings.len() == 1 && as_wanted;
            enough = if undisturbed { enough + STRIDE } else { 0 };
            bytes += STRIDE;
        }
        assert!(bytes > 512, "no journal is as short as that");
    }
}
