//! Rules about what the scheduler and the memory manager know of tasks, and CRIU drops without a word.

use tranship_sys::hidden_states::HiddenState;
use tranship_sys::sched_attr::{SchedulingAttributes, scheduling_attributes};

use super::Look;
use super::container::{Container, Task};
use super::{hidden, procfs};

const SCHED_OTHER: u32 = 0;
const SCHED_BATCH: u32 = 3;
const SCHED_DEADLINE: u32 = 6;
/// include/linux/sched.h: `PF_MCE_PROCESS`, set by prctl(PR_MCE_KILL).
const PF_MCE_PROCESS: u64 = 0x80;
/// `PF_MEMALLOC_NOIO | PF_LOCAL_THROTTLE`, set by prctl(PR_SET_IO_FLUSHER).
const PF_IO_FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;
const SIGCHLD: u64 = 17;

pub(super) fn check(container: &Container, look: &mut Look) {
    let own = procfs::text("/proc/thread-self/status").unwrap_or_default();
    let usual = scheduling_attributes(0).ok().filter(|own| matches!(own.policy, SCHED_OTHER | SCHED_BATCH));
    for task in container.tasks.values().filter(|task| !task.ended()) {
        let tids = procfs::numbers(format!("/proc/{}/task", task.pid)).unwrap_or_default();
        let odd = tids.iter().find_map(|&tid| Some((tid, odd(&scheduling_attributes(tid).ok()?, usual.as_ref())?)));
        if let Some((tid, (what, kind))) = odd {
            let thread = if tid == task.pid { String::new() } else { format!("has a thread ({tid}) that ") };
            let remedy = "give it another scheduling policy (chrt)";
            look.block(task.blocker(&format!("{thread}{what}, which CRIU does not carry"), remedy).allowable(kind));
        }
        let stat = procfs::text(format!("/proc/{}/stat", task.pid)).unwrap_or_default();
        if let Some((what, kind)) = flags(container, task, &stat) {
            look.block(task.blocker(what, "run the program without it").allowable(kind));
        }
        if let Some(personality) = personality(task.pid) {
            let what = format!("has a personality of its own ({personality}, setarch), which CRIU does not carry");
            look.block(task.blocker(&what, "run the program without it").allowable("personality"));
        }
        let status = |tid: u32| procfs::text(format!("/proc/{}/task/{tid}/status", task.pid)).unwrap_or_default();
        if tids.iter().any(|&tid| mitigates(&status(tid), &own)) {
            let what = "has limits of its own for what its processor may speculate on (PR_SET_SPECULATION_CTRL), which CRIU does not carry";
            look.block(task.blocker(what, "run the program without it").allowable("speculation-control"));
        }
        if merges_memory(task.pid) {
            let what = "has equal pages of all its memory merged (PR_SET_MEMORY_MERGE), which CRIU does not carry";
            look.block(task.blocker(what, "run the program without it").allowable("memory-merging"));
        }
        if task.status.locked > 0 {
            locked(task, look);
        }
        numa(task, look);
    }
}

/// What a thread has of scheduling that is not carried, and how that is called by `--allow`.
fn odd(thread: &SchedulingAttributes, usual: Option<&SchedulingAttributes>) -> Option<(&'static str, &'static str)> {
    if thread.policy == SCHED_DEADLINE {
        return Some(("uses deadline scheduling (SCHED_DEADLINE)", "deadline-scheduling"));
    }
    let usual = usual?;
    if thread.clamps != usual.clamps {
        return Some(("has limits of its own for its utilisation (uclamp)", "scheduling-attributes"));
    }
    let own_slice = matches!(thread.policy, SCHED_OTHER | SCHED_BATCH) && thread.runtime != usual.runtime;
    own_slice.then_some(("has a time slice of its own (sched_setattr)", "scheduling-attributes"))
}

/// What the fields of /proc/PID/stat tell: the flags (9) and the signal that the parent gets at the end (38).
fn flags(container: &Container, task: &Task, stat: &str) -> Option<(&'static str, &'static str)> {
    let field = |number: usize| stat.rsplit_once(')')?.1.split_whitespace().nth(number - 3)?.parse::<u64>().ok();
    if let Some(odd) = set_by_prctl(field(9)?) {
        return Some(odd);
    }
    let parent_inside = container.tasks.contains_key(&task.status.ppid);
    (parent_inside && field(38)? != SIGCHLD).then_some((
        "was made by clone() with another signal than SIGCHLD for its end, which CRIU does not carry",
        "exit-signal",
    ))
}

/// What personality(2) has set, in hexadecimal digits; nothing where that is Linux's own.
fn personality(pid: u32) -> Option<String> {
    let text = procfs::text(format!("/proc/{pid}/personality")).ok()?;
    let digits = text.trim();
    digits.chars().any(|digit| digit != '0').then(|| digits.to_owned())
}

/// Whether the status of a thread shows what prctl(PR_SET_SPECULATION_CTRL) has set (fs/proc/array.c, `task_seccomp`). Filters of seccomp set it, too,
/// for good, on some kernels, and do so again when CRIU installs them. `own` is the agent's status.
fn mitigates(status: &str, own: &str) -> bool {
    let of = |status: &str, key: &str| {
        status.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    let [bypass, branch] = ["Speculation_Store_Bypass:", "SpeculationIndirectBranch:"].map(|key| of(status, key));
    let by_itself = bypass == "thread mitigated" || branch == "conditional disabled";
    let for_good = bypass == "thread force mitigated" || branch == "conditional force disabled";
    // PR_SPEC_DISABLE_NOEXEC is shown so.
    let until_exec = bypass == "vulnerable" && of(own, "Speculation_Store_Bypass:").starts_with("thread");
    by_itself || until_exec || (for_good && of(status, "Seccomp:") != "2")
}

/// Told by Linux 6.16 and later.
fn merges_memory(pid: u32) -> bool {
    procfs::text(format!("/proc/{pid}/ksm_stat"))
        .is_ok_and(|text| text.lines().any(|line| line == "ksm_merge_any: yes"))
}

/// What the flags of a process (`PF_…` of the kernel's include/linux/sched.h) have that it has asked for.
fn set_by_prctl(flags: u64) -> Option<(&'static str, &'static str)> {
    if flags & PF_MCE_PROCESS != 0 {
        return Some((
            "has a policy of its own for memory errors (PR_MCE_KILL), which CRIU does not carry",
            "memory-error-policy",
        ));
    }
    if flags & PF_IO_FLUSHER == PF_IO_FLUSHER {
        return Some(("is an I/O flusher (PR_SET_IO_FLUSHER), which CRIU does not carry", "io-flusher"));
    }
    None
}

/// Locked memory: that of all mappings, which future ones will have too, and that which is locked only as it is used.
fn locked(task: &Task, look: &mut Look) {
    let smaps = procfs::text(format!("/proc/{}/smaps", task.pid)).unwrap_or_default();
    let flags: Vec<&str> = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:")).collect();
    let has = |flags: &str, flag: &str| flags.split_whitespace().any(|one| one == flag);
    if flags.iter().any(|flags| has(flags, "lf")) {
        let what = "has memory that is locked as it is used (mlock2(MLOCK_ONFAULT)), and CRIU locks all of it";
        look.block(task.blocker(what, "let the program use mlock()").allowable("lock-on-fault"));
    }
    // hidden.rs knows it for certain.
    if hidden::reader().is_some_and(|reader| reader.knows(HiddenState::LocksFutureMemory)) {
        return;
    }
    // The kernel's own mappings (vdso, vvar, vsyscall), those of devices and huge pages are never locked.
    let never = |flags: &str| ["de", "io", "pf", "ht"].iter().any(|flag| has(flags, flag)) || !has(flags, "mr");
    let own = flags.iter().filter(|flags| !never(flags));
    if own.clone().count() > 0 && own.clone().all(|flags| has(flags, "lo")) {
        let what =
            "has locked all of its memory (mlockall), and CRIU does not carry that for memory to come (MCL_FUTURE)";
        look.block(
            task.blocker(what, "let the program call mlockall(MCL_CURRENT) alone").allowable("lock-future-memory"),
        );
    }
}

/// The policy of a process for the nodes of its memory, as its first mapping shows it if that has none of its own.
fn numa(task: &Task, look: &mut Look) {
    let Ok(maps) = procfs::beginning(format!("/proc/{}/numa_maps", task.pid)) else { return };
    if let Some(policy) = first_policy(&maps).filter(|policy| *policy != "default") {
        let what = format!("has a NUMA policy for its memory ({policy}), which CRIU does not carry");
        look.block(task.blocker(&what, "start it without numactl and set_mempolicy()").allowable("numa-policy"));
    }
}

/// The policy in the first line of the beginning of numa_maps. The last line of it may end anywhere.
pub(super) fn first_policy(maps: &str) -> Option<&str> {
    let (line, _) = maps.split_once('\n').unwrap_or((maps, ""));
    let (_address, policy) = line.split_once(' ')?;
    match policy.split_once(' ') {
        Some((policy, _)) => Some(policy),
        None if maps.contains('\n') => Some(policy),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_asked_for_less_speculation_is_known_by_its_status() {
        let status = |seccomp: u8, bypass: &str, branch: &str| {
            format!(
                "Name:\tx\nSeccomp:\t{seccomp}\nSpeculation_Store_Bypass:\t{bypass}\nSpeculationIndirectBranch:\t{branch}\n"
            )
        };
        let own = status(0, "thread vulnerable", "conditional enabled");
        let asked = |seccomp, bypass, branch| mitigates(&status(seccomp, bypass, branch), &own);
        assert!(asked(0, "thread mitigated", "conditional enabled") && asked(2, "thread mitigated", "always enabled"));
        assert!(asked(0, "thread vulnerable", "conditional disabled"));
        assert!(asked(0, "thread force mitigated", "not affected") && asked(0, "vulnerable", "not affected"));
        // By a filter of seccomp.
        assert!(!asked(2, "thread force mitigated", "conditional force disabled"));
        let machine = status(0, "vulnerable", "always enabled");
        assert!(!mitigates(&machine, &machine) && !mitigates("", "") && !mitigates(&own, &own));
        assert!(!asked(0, "globally mitigated", "always disabled") && !asked(0, "not vulnerable", "not affected"));
    }

    #[test]
    fn processes_that_have_asked_for_it_are_known_by_their_flags() {
        // The second is of a program that has called prctl(PR_SET_IO_FLUSHER), which takes CAP_SYS_RESOURCE.
        assert_eq!(set_by_prctl(0x0040_0100), None);
        assert_eq!(set_by_prctl(0x0058_0100).map(|(_, kind)| kind), Some("io-flusher"));
        // Either flag alone the kernel sets for a moment itself.
        assert_eq!(set_by_prctl(0x0048_0100).or(set_by_prctl(0x0050_0100)), None);
        assert_eq!(set_by_prctl(0x0040_0180).map(|(_, kind)| kind), Some("memory-error-policy"));
    }

    #[test]
    fn a_numa_policy_is_known_by_the_first_line_alone() {
        let of_program = "55fc46c06000 default file=/usr/bin/python3.11 mapped=2 N0=2 kern";
        assert_eq!(first_policy(of_program), Some("default"));
        // Of mappings without pages, whose lines are short, as those of a container that has just arrived.
        let short = "00400000 default\n7ffff7ff9000 default\n7ffff7ffd000 default\n7ffffff";
        for end in 17..=short.len() {
            assert_eq!(first_policy(&short[..end]), Some("default"), "{end}");
        }
        for end in 0..17 {
            assert_eq!(first_policy(&short[..end]), None, "{end}");
        }
        assert_eq!(first_policy("00400000 bind:0-3,7\n00500000 default\n"), Some("bind:0-3,7"));
        assert_eq!(first_policy("00400000 prefer=static:1 anon=1 dirty=1"), Some("prefer=static:1"));
    }
}
