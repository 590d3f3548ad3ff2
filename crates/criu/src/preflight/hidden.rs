//! Rules about states that /proc does not show. All but the first of them CRIU drops without a word.

use std::collections::BTreeSet;
use std::io;
use std::sync::OnceLock;

use tranship_sys::hidden_states::{HiddenState, HiddenStates};

use super::Look;
use super::container::Container;
use super::procfs::{self, Status};

/// What a state is in a sentence, its remedy, and its name for `--allow`.
fn words(state: HiddenState) -> (&'static str, &'static str, Option<&'static str>) {
    const WITHOUT: &str = "run the program without it";
    match state {
        HiddenState::TscForbidden => {
            ("has forbidden itself the time-stamp counter (PR_SET_TSC), with which CRIU does not work", WITHOUT, None)
        }
        HiddenState::LocalDescriptors => {
            ("has a local descriptor table (modify_ldt), which CRIU does not carry", WITHOUT, None)
        }
        HiddenState::DenyWriteExecute => (
            "has forbidden itself memory that becomes executable (PR_SET_MDWE), which CRIU does not carry",
            WITHOUT,
            Some("deny-write-execute"),
        ),
        HiddenState::LocksFutureMemory => (
            "locks all memory that it will map (mlockall(MCL_FUTURE)), which CRIU does not carry",
            "let the program call mlockall(MCL_CURRENT) alone",
            Some("lock-future-memory"),
        ),
        HiddenState::LandlockDomain => {
            ("has restricted itself with Landlock, which CRIU does not carry", WITHOUT, Some("landlock"))
        }
        HiddenState::MappingPolicy => (
            "has a NUMA policy for a part of its memory (mbind), which CRIU does not carry",
            "let the engine bind all of the container's memory (--cpuset-mems)",
            Some("numa-policy"),
        ),
        HiddenState::DispatchesSyscalls => (
            "has its system calls raise signals (PR_SET_SYSCALL_USER_DISPATCH), which CRIU does not carry",
            WITHOUT,
            None,
        ),
        HiddenState::IoPorts => ("may use I/O ports (ioperm), which CRIU does not carry", WITHOUT, None),
        HiddenState::CpuidForbidden => {
            ("has forbidden itself the instruction CPUID (ARCH_SET_CPUID), which CRIU does not carry", WITHOUT, None)
        }
        HiddenState::ProtectionKeys => (
            "has protection keys for parts of its memory (pkey_alloc), which CRIU does not carry",
            WITHOUT,
            Some("protection-keys"),
        ),
        HiddenState::SealedMemory => {
            ("has sealed memory (mseal), which CRIU does not carry", WITHOUT, Some("sealed-memory"))
        }
    }
}

/// The reader, if this kernel lets the agent have one. It is made once.
pub(super) fn reader() -> Option<&'static HiddenStates> {
    static READER: OnceLock<Option<HiddenStates>> = OnceLock::new();
    let load =
        || HiddenStates::load().inspect_err(|error| tracing::warn!(%error, "hidden states of tasks cannot be read"));
    READER.get_or_init(|| load().ok()).as_ref()
}

/// Whether all processes have it: some kernels seal mappings of their own in each of them.
fn usual(reader: &HiddenStates, state: HiddenState) -> bool {
    static SEALED: OnceLock<bool> = OnceLock::new();
    let of_agent = || reader.read(std::process::id()).is_ok_and(|states| states.contains(&HiddenState::SealedMemory));
    state == HiddenState::SealedMemory && *SEALED.get_or_init(of_agent)
}

pub(super) fn check(container: &Container, look: &mut Look) {
    let Some(reader) = reader() else { return };
    check_each(container, look, |pid| {
        let mut states = reader.read(pid)?;
        states.retain(|state| !usual(reader, *state));
        Ok(states)
    });
}

fn check_each(container: &Container, look: &mut Look, read: impl Fn(u32) -> io::Result<BTreeSet<HiddenState>>) {
    for task in container.tasks.values().filter(|task| !task.zombie()) {
        let states = match read(task.pid) {
            Ok(states) => states,
            Err(error) => {
                look.block_unread(task, &error);
                continue;
            }
        };
        // In strict mode (seccomp(2)) the kernel takes the counter away by itself, and does so again when CRIU sets the
        // mode.
        let goes_along = |state| state == HiddenState::TscForbidden && is_strict(task.pid);
        for state in states.into_iter().filter(|state| !goes_along(*state)) {
            let (what, remedy, allow) = words(state);
            let blocker = task.blocker(what, remedy);
            look.block(match allow {
                Some(name) => blocker.allowable(name),
                None => blocker,
            });
        }
    }
}

/// Whether all threads of a process are in seccomp's strict mode.
fn is_strict(pid: u32) -> bool {
    let threads = procfs::numbers(format!("/proc/{pid}/task")).unwrap_or_default();
    let strict = |tid: &u32| Status::read(pid, Some(*tid)).is_ok_and(|status| status.strict);
    !threads.is_empty() && threads.iter().all(strict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::tests::Sandbox;

    #[test]
    fn a_process_that_the_kernel_does_not_tell_of_is_refused() {
        let Some(sandbox) = Sandbox::run("untold", "ready()\n", None).map(Sandbox::started) else { return };
        let container = Container::read(&sandbox.subject()).unwrap();
        let (mut told, mut untold) = (Look::default(), Look::default());
        check_each(&container, &mut told, |_| Ok(BTreeSet::new()));
        assert_eq!(told.findings.blockers, []);
        check_each(&container, &mut untold, |_| Err(io::ErrorKind::PermissionDenied.into()));
        let blockers = untold.findings.blockers;
        assert_eq!(blockers.len(), 1, "{blockers:?}");
        assert!(blockers[0].cause.contains("the kernel cannot be asked"), "{}", blockers[0].cause);
    }
}
