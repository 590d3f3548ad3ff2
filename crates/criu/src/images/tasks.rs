//! Processes: their namespaces, credentials and filters of system calls.

use std::collections::HashSet;

use super::allowed::{Allowed, CAPABILITIES};
use super::messages::{Core, Creds, Filter, Ids, Inventory, Process, Seccomp, Thread, UserNamespace};
use super::{Finding, Images, shown};

/// States of a task (CRIU's task-state.h).
const ALIVE: u32 = 1;
const DEAD: u32 = 2;
const STOPPED: u32 = 3;
const ZOMBIE: u32 = 6;
/// The version of images whose files begin with a common number.
const VERSION: u32 = 2;
/// `SECCOMP_FILTER_FLAG_TSYNC`: the filter is that of all threads, which CRIU leaves out of the others' images.
const ALL_THREADS: u32 = 1;
const FILTER: u32 = 2;
const STRICT: u32 = 1;
/// Most processes and threads of a container.
const MOST: usize = 1 << 17;

/// A kind of namespace: as the images, and as a configuration call it.
type Kind = (&'static str, fn(&Ids) -> Option<u32>);

/// Kinds of which CRIU makes new ones where the first process' number is not that of the criu that dumped.
const KINDS: [Kind; 6] = [
    ("pid", |ids| ids.pid),
    ("ipc", |ids| ids.ipc),
    ("uts", |ids| ids.uts),
    ("mount", |ids| ids.mnt),
    ("user", |ids| ids.user),
    ("time", |ids| ids.time),
];

pub(super) fn check(images: &Images, allowed: &Allowed, found: &mut Vec<Finding>) -> Result<(), Finding> {
    let inventory: Inventory = images.only("inventory", None)?;
    if inventory.img_version != VERSION {
        return Err(Finding::new(format!("are of version {}, which is not known here", inventory.img_version)));
    }
    if let Some(plugin) = inventory.plugins.iter().flat_map(|all| &all.plugins).next() {
        found.push(Finding::new(format!("need the plugin {}", shown(plugin))));
    }
    let outside = inventory.root_ids.ok_or_else(|| Finding::new("do not tell which namespaces are the node's"))?;
    let processes: Vec<Process> = images.all("pstree", None)?;
    let first = processes.first().ok_or_else(|| Finding::new("have no process"))?;
    // A process that has ended may have a thread that another one has; it is not looked at.
    let mut pids = HashSet::new();
    if let Some(twice) = processes.iter().find(|process| !pids.insert(process.pid)) {
        return Err(Finding::new(format!("have process {} twice", twice.pid)));
    }
    let threads = processes.iter().fold(processes.len(), |sum, one| sum.saturating_add(one.threads.len()));
    if threads > MOST {
        return Err(Finding::new(format!("have {threads} processes and threads")));
    }
    let root: Ids = images.only("ids", Some(first.pid.into()))?;
    namespaces(&outside, &root, allowed, found);
    if let Some(id) = root.user.filter(|_| root.user != outside.user) {
        user_namespace(&images.only("userns", Some(id.into()))?, allowed, found);
    }
    let seccomp: Vec<Seccomp> = images.all_if_there("seccomp", None)?;
    let filters = seccomp.first().map(|all| all.filters.as_slice()).unwrap_or_default();
    for process in &processes {
        one(images, process, (&root, filters), allowed, found)?;
    }
    Ok(())
}

/// Compares which namespaces the container has of its own.
fn namespaces(outside: &Ids, root: &Ids, allowed: &Allowed, found: &mut Vec<Finding>) {
    if allowed.privileged {
        return;
    }
    let has = |kind: &str| allowed.has_namespace(kind);
    for (kind, of) in KINDS {
        match (of(root) != of(outside), has(kind)) {
            (false, true) => found.push(Finding::new(format!("leave it in the node's {kind} namespace"))),
            // A kind that the source's kernel does not know, or a new one, in which it has less.
            (true, false) if kind == "user" => {
                found.push(Finding::new("put it into a user namespace, which its configuration does not"));
            }
            _ => {}
        }
    }
    let own = root.net != outside.net;
    if allowed.in_network && own {
        found.push(Finding::new("have a network namespace made besides that which has been made"));
    } else if !allowed.in_network && !own && has("network") {
        found.push(Finding::new("leave it in the node's network namespace"));
    }
}

fn user_namespace(entry: &UserNamespace, allowed: &Allowed, found: &mut Vec<Finding>) {
    if !allowed.privileged && (&entry.uids, &entry.gids) != (&allowed.maps.0, &allowed.maps.1) {
        found.push(Finding::new("map users to other users of the node than its configuration does"));
    }
}

/// One process with its threads.
fn one(
    images: &Images,
    process: &Process,
    (root, filters): (&Ids, &[Filter]),
    allowed: &Allowed,
    found: &mut Vec<Finding>,
) -> Result<(), Finding> {
    let core: Core = images.only("core", Some(process.pid.into()))?;
    let task = core.task.unwrap_or_default();
    let name = format!("process {} ({})", process.pid, shown(&task.comm));
    match task.state {
        ALIVE | STOPPED => {}
        // It has ended, and runs nothing any more.
        DEAD | ZOMBIE => return Ok(()),
        other => return Err(Finding::new(format!("have {name} in state {other}"))),
    }
    let ids: Ids = images.only("ids", Some(process.pid.into()))?;
    let differs = KINDS.iter().find(|(kind, of)| *kind != "mount" && of(&ids) != of(root));
    if let Some((kind, _)) = differs {
        found.push(Finding::new(format!("put {name} into another {kind} namespace than its container")));
    }
    for (kind, inner, outer) in [("mount", ids.mnt, root.mnt), ("network", ids.net, root.net)] {
        if inner != outer && !allowed.mounts_freely() {
            found.push(Finding::new(format!(
                "put {name} into a {kind} namespace of its own, for which it lacks CAP_SYS_ADMIN"
            )));
        }
    }
    if let Some(id) = ids.mnt.filter(|id| ids.mnt != root.mnt && !images.has("mountpoints", (*id).into())) {
        return Err(Finding::new(format!("put {name} into the mount namespace {id}, of which they have no mounts")));
    }
    let leader = core.thread.unwrap_or_default();
    // Where its filters are all threads', CRIU has none for the others.
    let is_shared = leader.seccomp_mode == Some(FILTER) && are_shared(&leader, filters);
    let threads = process.threads.iter().filter(|id| **id != process.pid);
    let others: Vec<Thread> = threads
        .map(|id| Ok(images.only::<Core>("core", Some((*id).into()))?.thread.unwrap_or_default()))
        .collect::<Result<_, Finding>>()?;
    if allowed.privileged {
        return Ok(());
    }
    for (at, thread) in std::iter::once(&leader).chain(&others).enumerate() {
        let Some(creds) = &thread.creds else {
            return Err(Finding::new(format!("do not tell the credentials of {name}")));
        };
        credentials(&name, creds, allowed, found);
        let is_filtered = matches!(thread.seccomp_mode, Some(FILTER | STRICT)) || (at > 0 && is_shared);
        if allowed.seccomp && !(is_filtered && has_filter(thread, filters)) {
            found.push(Finding::new(format!("take from {name} the filter of system calls that its configuration has")));
        }
    }
    Ok(())
}

/// The filters of a thread, from the last one that was installed on.
fn chain<'a>(thread: &Thread, filters: &'a [Filter]) -> impl Iterator<Item = &'a Filter> {
    let first = thread.seccomp_filter.and_then(|at| filters.get(at as usize));
    let previous = |filter: &&'a Filter| filters.get(filter.previous? as usize);
    // No more than there are: a forged image may have them in a ring.
    std::iter::successors(first, previous).take(filters.len())
}

fn are_shared(leader: &Thread, filters: &[Filter]) -> bool {
    let mut chain = chain(leader, filters).peekable();
    chain.peek().is_some() && chain.all(|filter| filter.flags.unwrap_or_default() & ALL_THREADS != 0)
}

/// Whether a thread that has filters has one in the image.
fn has_filter(thread: &Thread, filters: &[Filter]) -> bool {
    thread.seccomp_mode != Some(FILTER) || chain(thread, filters).any(|filter| !filter.program.is_empty())
}

fn credentials(name: &str, creds: &Creds, allowed: &Allowed, found: &mut Vec<Finding>) {
    let sets = [&creds.permitted, &creds.effective, &creds.inheritable, &creds.bounding, &creds.ambient];
    if sets.iter().any(|set| set.len() > 2) {
        found.push(Finding::new(format!("give {name} capabilities that no kernel has")));
    }
    let bits = |set: &Vec<u32>| set.iter().take(2).rev().fold(0, |bits, word| bits << 32 | u64::from(*word));
    let more = sets.iter().fold(0, |all, set| all | bits(set)) & !allowed.capabilities;
    if more != 0 {
        let names = (0..u64::BITS as usize).filter(|bit| more >> bit & 1 == 1);
        let text = |bit: usize| CAPABILITIES.get(bit).map_or_else(|| bit.to_string(), |name| format!("CAP_{name}"));
        let names: Vec<_> = names.map(text).collect();
        found.push(
            Finding::new(format!("give {name} {}, which its configuration does not", names.join(", ")))
                .with_remedy("end the process, or start the container with the capability"),
        );
    }
    if allowed.no_new_privileges && creds.no_new_privs.unwrap_or_default() == 0 {
        found.push(Finding::new(format!("allow {name} new privileges, which its configuration forbids")));
    }
    if let Some(profile) = &allowed.profile {
        let label = creds.lsm_profile.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
        if !profile.has(&label) {
            found.push(Finding::new(format!("have {name} run under the security profile {label:?}, not {profile:?}")));
        }
    }
}
