//! Rules about what tasks share: only threads share memory and directories, and threads share all of both (CRIU: cr-dump.c,
//! `dump_task_kobj_ids`).

use std::cmp::Ordering;

use tranship_sys::kcmp::{Resource, compare};
use tranship_types::Blocker;

use super::Look;
use super::container::{Container, Task};
use super::procfs;

pub(super) fn check(container: &Container, look: &mut Look) {
    let tasks: Vec<&Task> = container.tasks.values().filter(|task| !task.ended()).collect();
    processes(&tasks, Resource::Memory, "its memory (CLONE_VM)", look);
    processes(&tasks, Resource::Directories, "its working directory and umask (CLONE_FS)", look);
    for task in tasks {
        // A thread that is just ending shares nothing any more.
        look.passing.extend(threads(task));
    }
}

/// A vforked child has its parent's memory for a moment.
fn processes(tasks: &[&Task], resource: Resource, what: &str, look: &mut Look) {
    // A process without an answer has just ended.
    let mut tasks: Vec<&Task> =
        tasks.iter().copied().filter(|task| compare(task.pid, task.pid, resource).is_some()).collect();
    tasks.sort_by(|one, other| compare(one.pid, other.pid, resource).unwrap_or(Ordering::Equal));
    for pair in tasks.windows(2) {
        if compare(pair[0].pid, pair[1].pid, resource) != Some(Ordering::Equal) {
            continue;
        }
        let (one, other) = if pair[0].pid < pair[1].pid { (pair[0], pair[1]) } else { (pair[1], pair[0]) };
        // Its parent is in the vfork, which is named as such.
        if resource == Resource::Memory && one.status.state == 'D' {
            continue;
        }
        let what = format!("shares {what} with {}", one.name());
        let remedy = "let the program use threads or processes, nothing between them";
        look.wait(u64::from(one.pid), other.blocker(&what, remedy));
    }
}

fn threads(task: &Task) -> Option<(u64, Blocker)> {
    if task.status.threads < 2 {
        return None;
    }
    let tids = procfs::numbers(format!("/proc/{}/task", task.pid)).ok()?;
    let own = [
        (Resource::Directories, "a working directory and umask of its own (unshare(CLONE_FS))"),
        (Resource::Descriptors, "descriptors of its own (unshare(CLONE_FILES))"),
    ];
    tids.into_iter().filter(|tid| *tid != task.pid).find_map(|tid| {
        let namespace = ["net", "uts", "ipc"].into_iter().find(|kind| {
            let now = procfs::link(format!("/proc/{}/task/{tid}/ns/{kind}", task.pid)).ok();
            now.is_some() && now.as_ref() != task.namespaces.get(*kind)
        });
        let differs = |resource| matches!(compare(task.pid, tid, resource), Some(Ordering::Less | Ordering::Greater));
        let (what, remedy) = match namespace {
            Some(kind) => (format!("in a {kind} namespace of its own"), "let it return to that of its process"),
            None => {
                let (_, what) = own.iter().find(|(resource, _)| differs(*resource))?;
                (format!("with {what}"), "run the program without it")
            }
        };
        let what = format!("has a thread ({tid}) {what}, which CRIU does not carry");
        Some((u64::from(tid), task.blocker(&what, remedy)))
    })
}
