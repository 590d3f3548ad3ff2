//! The container as /proc shows it at one moment: tasks, namespaces, mounts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use tranship_sys::process::children;
use tranship_types::{Blocker, BlockerKind};

use super::procfs::{self, Mount, Status};
use super::{PreflightError, Subject};

/// A process.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub pid: u32,
    pub status: Status,
    /// Its namespaces: `net` to `net:[…]`; empty for a zombie.
    pub namespaces: HashMap<String, String>,
}

impl Task {
    /// How a sentence names it: `redis-server (pid 812)`.
    pub(super) fn name(&self) -> String {
        format!("{} (pid {})", self.status.name, self.pid)
    }

    /// What is in the way of a move in this process: a sentence that begins with its name.
    pub(super) fn blocker(&self, what: &str, remedy: impl Into<String>) -> Blocker {
        Blocker::new(BlockerKind::Process, format!("{} {what}", self.name()), remedy).at(self.pid, None)
    }

    /// Whether its first thread has ended, whatever others do.
    pub(super) fn ended(&self) -> bool {
        matches!(self.status.state, 'Z' | 'X')
    }

    pub(super) fn zombie(&self) -> bool {
        self.ended() && self.status.threads <= 1
    }
}

/// A container at one moment.
#[derive(Debug)]
pub(super) struct Container {
    pub init: u32,
    /// The user id on this node of the container's root.
    pub root: u32,
    /// The tree that CRIU dumps, by pid: the first process and its descendants.
    pub tasks: BTreeMap<u32, Task>,
    /// Processes of the tree that have ended and for which nobody has waited: cgroups do not list them.
    pub zombies: BTreeMap<u32, Task>,
    /// Processes of the container that are no descendants of the first one: they were started by exec.
    pub entered: BTreeMap<u32, Task>,
    /// The first process's mounts.
    pub mounts: Vec<Mount>,
    /// Those of all mount namespaces in use.
    pub all_mounts: Vec<Mount>,
    /// Ids of the mounts of all mount namespaces in use.
    pub mount_ids: HashSet<u32>,
    /// Ids of the mounts that another one hides.
    pub covered: HashSet<u32>,
}

impl Container {
    pub(super) fn read(subject: &Subject) -> Result<Self, PreflightError> {
        let init = subject.init_pid;
        let mut tasks = BTreeMap::new();
        let pids: BTreeSet<u32> = with_born_since(init, subject.pids.iter().copied().chain([init]).collect());
        for pid in pids {
            // Of a process that ends they are there no more, one after the other: whoever lives afterwards had all.
            let namespaces = procfs::namespaces(pid).unwrap_or_default();
            let status = match Status::read(pid, None) {
                Ok(status) => status,
                Err(e) if pid == init => return Err(PreflightError::reading("status", pid)(e)),
                // It ended in the meantime, which is its right.
                Err(_) => continue,
            };
            let mut task = Task { pid, status, namespaces };
            if task.ended() {
                task.namespaces.clear();
            }
            tasks.insert(pid, task);
        }
        if tasks[&init].zombie() {
            return Err(PreflightError::Gone { pid: init });
        }
        let (tasks, entered) = tree(init, tasks);
        let zombies = zombies(&tasks);
        let mountinfo = |pid: u32| procfs::text(format!("/proc/{pid}/mountinfo")).map(|t| Mount::parse_all(&t));
        let mounts = mountinfo(init).map_err(PreflightError::reading("mountinfo", init))?;
        let mut covered = covered(&mounts);
        let mut all_mounts = mounts.clone();
        let mut seen: HashSet<&str> = tasks[&init].namespaces.get("mnt").map(String::as_str).into_iter().collect();
        for task in tasks.values() {
            if let Some(namespace) = task.namespaces.get("mnt").filter(|n| !seen.contains(n.as_str())) {
                seen.insert(namespace);
                let more = mountinfo(task.pid).unwrap_or_default();
                covered.extend(self::covered(&more));
                all_mounts.extend(more);
            }
        }
        let mount_ids = all_mounts.iter().map(|m| m.id).collect();
        let map = procfs::text(format!("/proc/{init}/uid_map")).unwrap_or_default();
        let root = map.split_ascii_whitespace().nth(1).and_then(|id| id.parse().ok()).unwrap_or(0);
        Ok(Self { init, root, tasks, zombies, entered, mounts, all_mounts, mount_ids, covered })
    }

    pub(super) fn first(&self) -> &Task {
        &self.tasks[&self.init]
    }

    /// Whether a process is one of the container's, also if it was born after the list of them was made. One that has ended is nobody's.
    pub(super) fn owns(&self, pid: u32) -> bool {
        let mut current = pid;
        for _ in 0..64 {
            if self.tasks.contains_key(&current) || self.entered.contains_key(&current) {
                return true;
            }
            match Status::read(current, None) {
                Ok(status) if status.ppid > 1 => current = status.ppid,
                // An ancestor that has just ended: its children have another parent by now.
                Err(_) if current != pid => current = pid,
                _ => return false,
            }
        }
        false
    }

    /// The tree's pids in the order in which CRIU dumps them (pstree.c, `pstree_item_next`): each before its children, and these in the order in
    /// which the kernel lists them, which is that of their births but where one was inherited.
    pub(super) fn dump_order(&self) -> Vec<u32> {
        let mut order = Vec::with_capacity(self.tasks.len());
        let mut next = vec![self.init];
        while let Some(pid) = next.pop() {
            order.push(pid);
            next.extend(
                self.tasks.values().rev().filter(|t| t.status.ppid == pid && t.pid != self.init).map(|t| t.pid),
            );
        }
        order
    }

    /// All namespaces that a task lives in, as links (`net:[…]`).
    pub(super) fn namespaces(&self) -> HashSet<&str> {
        self.tasks.values().flat_map(|t| t.namespaces.values()).map(String::as_str).collect()
    }
}

/// These processes of a container, and those of their descendants in its cgroup that were born since they were listed.
fn with_born_since(init: u32, mut pids: BTreeSet<u32>) -> BTreeSet<u32> {
    let cgroup = |pid: u32| procfs::text(format!("/proc/{pid}/cgroup")).ok();
    let own = cgroup(init);
    let mut parents: Vec<u32> = pids.iter().copied().collect();
    while let Some(parent) = parents.pop() {
        for child in children(parent) {
            if !pids.contains(&child) && own.is_some() && cgroup(child) == own {
                pids.insert(child);
                parents.push(child);
            }
        }
    }
    pids
}

/// Parts the descendants of `init`, which is what CRIU finds (seize.c), from the rest.
fn tree(init: u32, mut tasks: BTreeMap<u32, Task>) -> (BTreeMap<u32, Task>, BTreeMap<u32, Task>) {
    for task in tasks.values_mut() {
        // Where the parent ended between two looks, the first process has inherited the child by now.
        let lost = task.pid != init && task.status.ppid != init;
        if let Some(status) = lost.then(|| Status::read(task.pid, None).ok()).flatten() {
            task.status = status;
        }
    }
    let descends = |task: &Task| {
        let parents = std::iter::successors(Some(task), |t| tasks.get(&t.status.ppid));
        parents.take(tasks.len() + 1).any(|t| t.pid == init)
    };
    let inside: BTreeSet<u32> = tasks.values().filter(|t| descends(t)).map(|t| t.pid).collect();
    tasks.into_iter().partition(|(pid, _)| inside.contains(pid))
}

/// Children of these that have ended and are not among them.
fn zombies(tasks: &BTreeMap<u32, Task>) -> BTreeMap<u32, Task> {
    let all = tasks.values().flat_map(|task| children(task.pid)).filter(|pid| !tasks.contains_key(pid));
    let ended =
        all.filter_map(|pid| Some(Task { pid, status: Status::read(pid, None).ok()?, namespaces: HashMap::new() }));
    ended.filter(Task::zombie).map(|task| (task.pid, task)).collect()
}

/// Mounts that cannot be seen at their place: another mount lies on top of them, or on a directory on the way there
/// (CRIU: mount.c, `mnt_is_overmounted`).
pub(super) fn covered(mounts: &[Mount]) -> HashSet<u32> {
    let by_id: HashMap<u32, &Mount> = mounts.iter().map(|m| (m.id, m)).collect();
    let mut children: HashMap<u32, Vec<&Mount>> = HashMap::new();
    for m in mounts {
        children.entry(m.parent).or_default().push(m);
    }
    let hidden_by_sibling =
        |m: &Mount| children[&m.parent].iter().any(|t| t.id != m.id && Path::new(&m.point).starts_with(&t.point));
    let hidden = |m: &Mount| {
        let on_top = children.get(&m.id).is_some_and(|c| c.iter().any(|c| c.point == m.point));
        // A line that names itself as its parent, or a circle of them, cannot come from a kernel; the bound is cheap.
        let way = std::iter::successors(Some(m), |m| by_id.get(&m.parent).copied()).take(mounts.len());
        on_top || way.filter(|m| by_id.contains_key(&m.parent)).any(hidden_by_sibling)
    };
    mounts.iter().filter(|m| hidden(m)).map(|m| m.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(text: &str) -> Vec<u32> {
        let mut ids: Vec<u32> = covered(&Mount::parse_all(text)).into_iter().collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn a_mount_on_top_hides_what_is_below_and_its_children() {
        let base = "1 0 0:1 / / rw - overlay o rw\n2 1 0:2 / /a rw - tmpfs t rw\n3 2 0:3 / /a/b rw - tmpfs t rw\n";
        assert!(hidden(base).is_empty());
        assert_eq!(hidden(&format!("{base}4 2 0:4 / /a rw - tmpfs t rw\n")), [2, 3]);
        assert!(hidden(&format!("{base}4 1 0:4 / /abc rw - tmpfs t rw\n")).is_empty());
    }

    #[test]
    fn a_later_mount_on_the_way_hides_too() {
        let text = "1 0 0:1 / / rw - overlay o rw\n2 1 0:2 / /a/b rw - tmpfs t rw\n3 1 0:3 / /a rw - tmpfs t rw\n";
        assert_eq!(hidden(text), [2]);
    }
}
