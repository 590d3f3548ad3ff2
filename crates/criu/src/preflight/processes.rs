//! Rules about processes and threads.

use std::collections::BTreeMap;

use tranship_sys::process::{owner_of_namespace, waits_for_vforked};
use tranship_types::Blocker;

use super::container::{Container, Task};
use super::procfs::{self, Status};
use super::sessions::{self, Obstacle, Process};
use super::{Look, Subject, zombies};

const SIGTRAP: u32 = 5;

pub(super) fn check(container: &Container, subject: &Subject, look: &mut Look) {
    for task in container.entered.values() {
        count(task, look);
        // Its children are named with it; its descriptors and sessions are alien for the same reason.
        if !container.entered.contains_key(&task.status.ppid) {
            // A health check is over in a moment.
            look.wait(0, entered(task));
        }
    }
    for task in container.tasks.values() {
        count(task, look);
        session(container, task, look);
        if task.zombie() {
            core_file(task, look);
            continue;
        }
        if matches!(task.status.state, 'Z' | 'X') {
            // seize.c: a dead leader among living threads.
            let what = "has a main thread that has ended while other threads go on";
            look.block(task.blocker(what, "restart the program, or wait until it has ended"));
            continue;
        }
        threads(container, task, look);
        namespaces(container, task, look);
        limits(task, subject, look);
        machine(task, subject, look);
    }
    for task in container.zombies.values() {
        session(container, task, look);
        core_file(task, look);
    }
    look.findings.zombies = container.tasks.values().filter(|task| task.zombie()).count() + container.zombies.len();
    let levels = |task: &Task| {
        let above = std::iter::successors(Some(task), |task| container.tasks.get(&task.status.ppid));
        above.take(container.tasks.len()).count()
    };
    look.findings.depth = container.tasks.values().map(levels).max().unwrap_or_default();
    tree(container, look);
    let root = procfs::link(format!("/proc/{}/root", container.init)).unwrap_or_default();
    if !root.is_empty() && root != "/" {
        // mount.c: the first task's root must be the root of its mount namespace.
        let what = format!("has changed its root to {root} inside the container");
        look.block(container.first().blocker(&what, "start the container without a chroot in its first process"));
    }
}

fn count(task: &Task, look: &mut Look) {
    look.findings.tasks += 1;
    look.findings.threads += task.status.threads.max(1);
    look.findings.memory_bytes += task.status.anonymous;
}

fn entered(task: &Task) -> Blocker {
    task.blocker(
        "was started by exec and its parent is outside of the container, where it would stay behind",
        "end it, or wait until it has ended, and try again",
    )
}

fn core_file(task: &Task, look: &mut Look) {
    if zombies::has_core_file(task.pid) {
        look.block(zombies::core_file(task.pid, &task.status.name));
    }
}

fn session(container: &Container, task: &Task, look: &mut Look) {
    let status = &task.status;
    if status.inner_pid == 0 {
        return;
    }
    if status.inner_sid == 0 {
        // cr-dump.c, for tasks and zombies alike.
        let what = "belongs to a session whose leader is outside of the container";
        let found = task.blocker(what, "start it in a session of its own (setsid)");
        // One that has ended is soon gone.
        if task.zombie() { look.wait(task.pid.into(), found) } else { look.block(found) }
    } else if task.pid == container.init && status.inner_sid != status.inner_pid {
        // pstree.c: the root task leads its session, unless it is a shell's job.
        let what = "is the first process but does not lead its session";
        look.block(task.blocker(what, "start the container with an engine that gives it a session of its own"));
    }
}

/// Sessions and groups that CRIU does not restore; each is named once.
fn tree(container: &Container, look: &mut Look) {
    let process = |task: &Task| {
        let status = &task.status;
        Process { parent: status.ppid, session: status.session, group: status.group }
    };
    if container.first().status.session != container.init {
        return;
    }
    // Sessions and groups from outside are named one by one.
    let all = || container.tasks.values().chain(container.zombies.values());
    let own = all().filter(|task| task.status.inner_sid != 0);
    let processes: BTreeMap<u32, Process> = own.map(|task| (task.pid, process(task))).collect();
    let named = |pid: u32| all().find(|task| task.pid == pid);
    let mut found: BTreeMap<(Obstacle, u32), Vec<u32>> = BTreeMap::new();
    for (pid, obstacle) in sessions::obstacles(container.init, &processes) {
        let number = if obstacle == Obstacle::Session { processes[&pid].session } else { processes[&pid].group };
        found.entry((obstacle, number)).or_default().push(pid);
    }
    for ((obstacle, number), pids) in found {
        let Some(task) = named(pids[0]) else { continue };
        let others = match pids.len() - 1 {
            0 => String::new(),
            1 => ", as is another process".to_owned(),
            n => format!(", as are {n} other processes"),
        };
        let (what, remedy) = match obstacle {
            Obstacle::Session => (
                format!("is in the session of process {number}, which CRIU cannot restore below these ancestors{others}"),
                "start it in a session of its own (setsid), or leave it to the container's first process to inherit orphans \
                 (no PR_SET_CHILD_SUBREAPER)"
                    .to_owned(),
            ),
            Obstacle::Group => {
                let leader = named(number).map_or_else(|| format!("process {number}"), Task::name);
                (
                    format!("is in the process group of {leader}, which has left it for another group{others}"),
                    format!("end {leader}, or let it go back to its group (setpgid)"),
                )
            }
        };
        // A process may have ended between two looks at others.
        look.wait(u64::from(number), task.blocker(&what, remedy));
    }
}

fn threads(container: &Container, task: &Task, look: &mut Look) {
    let tids = procfs::numbers(format!("/proc/{}/task", task.pid)).unwrap_or_default();
    let (mut stopped, mut running) = (0, 0);
    for tid in tids {
        let Ok(thread) = Status::read(task.pid, Some(tid)) else { continue };
        if thread.tracer != 0 {
            look.block(traced(container, task, thread.tracer));
            return;
        }
        match thread.state {
            'D' => look.wait((u64::from(tid) << 40) ^ thread.switches, stuck(task, tid)),
            'T' => stopped += 1,
            _ => running += 1,
        }
        // compel's infect.c: "with a pending SIGTRAP".
        if thread.pending & 1 << (SIGTRAP - 1) != 0 {
            let what = "has a SIGTRAP that it has not taken, with which CRIU cannot tell its own stops";
            let remedy = "let the program unblock or take the signal (sigwait), or restart it";
            look.wait(u64::from(tid), task.blocker(what, remedy));
        }
    }
    if stopped > 0 && running > 0 {
        // seize.c, "individually stopped threads".
        let what = "has some threads stopped and others not";
        look.wait(0, task.blocker(what, "continue it (SIGCONT) or stop all of it (SIGSTOP)"));
    } else if stopped > 0 {
        // CRIU sends it the signal once more.
        look.change(format!("{} is stopped by a signal, of which its parent is told once more", task.name()));
    }
}

fn traced(container: &Container, task: &Task, tracer: u32) -> Blocker {
    let by = match container.tasks.get(&tracer) {
        Some(tracer) => format!("{} in the same container", tracer.name()),
        None => match Status::read(tracer, None) {
            Ok(status) => format!("{} (pid {tracer})", status.name),
            Err(_) => format!("pid {tracer}"),
        },
    };
    task.blocker(&format!("is being traced by {by}"), "detach the debugger or tracer")
}

fn stuck(task: &Task, tid: u32) -> Blocker {
    let whereabouts = procfs::text(format!("/proc/{}/task/{tid}/wchan", task.pid)).unwrap_or_default();
    if waits_for_vforked(&whereabouts) {
        // The child shares its parent's memory until it calls exec (cr-dump.c, KCMP_VM).
        let what = "waits for a child that it has vforked and that shares its memory";
        return task.blocker(what, "try again when that child has called exec or ended");
    }
    let place = if whereabouts.len() > 1 { format!(" (in {whereabouts})") } else { String::new() };
    let thread = if tid == task.pid { String::new() } else { format!("has a thread ({tid}) that ") };
    let what = format!("{thread}is stuck in the kernel for more than a second{place}");
    task.blocker(&what, "wait until its disk or network filesystem answers")
}

fn namespaces(container: &Container, task: &Task, look: &mut Look) {
    let own = &task.namespaces;
    let differs = |kind: &str| match (own.get(kind), container.first().namespaces.get(kind)) {
        (Some(a), Some(b)) => a != b,
        _ => false,
    };
    // namespaces.c: only mount namespaces may be nested, and network namespaces where criu restores the network, which it does not here
    // (net.c: "Unable to dump more than one netns if the --emptyns is set").
    for kind in ["pid", "user", "ipc", "uts", "cgroup", "time", "net"] {
        if differs(kind) {
            let what = format!("lives in a {kind} namespace of its own inside the container");
            look.block(task.blocker(&what, "run it without nested namespaces (no containers within the container)"));
            return;
        }
    }
    if task.pid == container.init {
        entered_user_namespace(task, look);
    }
    // Until the first child is there, the link leads nowhere.
    if own.contains_key("pid") && own.get("pid") != own.get("pid_for_children") {
        let what = "has prepared another pid namespace for its children";
        // So is that of a process that is just ending.
        look.wait(u64::from(task.pid), task.blocker(what, "run it without a nested pid namespace"));
    }
    if own.contains_key("time") && own.get("time") != own.get("time_for_children") {
        let what = "has prepared another time namespace for its children";
        look.wait(u64::from(task.pid), task.blocker(what, "run it without a nested time namespace"));
    }
    for kind in ["mnt", "net"] {
        if differs(kind) {
            let kind = if kind == "mnt" { "mount" } else { "network" };
            look.note(format!("{} lives in a {kind} namespace of its own inside the container", task.name()));
        }
    }
}

/// namespaces.c, `check_user_ns`: the first process's namespaces must be those of its user namespace.
fn entered_user_namespace(task: &Task, look: &mut Look) {
    let Some(user) = task.namespaces.get("user").and_then(|link| procfs::bracketed(link, "user")) else { return };
    let ours = procfs::namespaces(std::process::id()).unwrap_or_default();
    let own = ["mnt", "net", "ipc", "uts", "pid", "cgroup"].into_iter();
    let foreign = own
        .filter(|kind| task.namespaces.get(*kind) != ours.get(*kind))
        .find(|kind| owner_of_namespace(format!("/proc/{}/ns/{kind}", task.pid)).is_ok_and(|owner| owner != user));
    if foreign.is_some() {
        let what = "has entered a user namespace of its own (unshare -U), which is not that of the container";
        let remedy = "start the program without unshare, or let the engine make the user namespace";
        look.block(task.blocker(what, remedy));
    }
}

/// CRIU reads resource limits from outside (cr-dump.c), which prlimit(2) allows for another user's process only with
/// CAP_SYS_RESOURCE; some machines withhold that from root.
fn limits(task: &Task, subject: &Subject, look: &mut Look) {
    // The ids of the filesystem do not count.
    let same = task.status.ids.iter().enumerate().all(|(i, id)| i % 4 == 3 || *id == 0);
    if !same && !subject.limits_answered && !has_sys_resource() {
        let what = "runs as another user than root, and criu may not read its resource limits here";
        look.block(task.blocker(what, "give the agent the capability CAP_SYS_RESOURCE"));
    }
}

pub(super) fn has_sys_resource() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = procfs::text("/proc/thread-self/status").unwrap_or_default();
    let set = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("CapEff:")?.trim(), 16).ok());
    set.is_none_or(|s| s >> CAP_SYS_RESOURCE & 1 == 1)
}

/// The kind of machine that a program was built for.
fn machine(task: &Task, subject: &Subject, look: &mut Look) {
    // Not the executable itself, which may be watched.
    let vector = std::fs::read(format!("/proc/{}/auxv", task.pid)).unwrap_or_default();
    // infect.c of compel: "running in 32-bit mode", where criu was built without support for it.
    if !subject.compat && procfs::is_32_bit(&vector) {
        let what = "is a 32-bit program, which the criu in use cannot dump";
        look.block(task.blocker(what, "use a 64-bit build of it, or a criu that was built with compat support"));
    }
}
