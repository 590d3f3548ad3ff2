//! The cgroups of a suite: one in every hierarchy, which its cgroup namespace has as its root.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, unshare};

/// What the names of all cgroups of suites begin with.
const PREFIX: &str = "tranship-suite-";
/// How long the kernel may take to empty cgroups after the processes were killed.
const EMPTY_LIMIT: Duration = Duration::from_secs(10);

/// A mounted cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub point: PathBuf,
    /// The options that mount the same hierarchy again; `None` for version 2.
    pub v1: Option<String>,
}

/// The hierarchies that are mounted, each once, in the order of their mounts.
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    let mut found: Vec<Hierarchy> = Vec::new();
    for hierarchy in text.lines().filter_map(parse) {
        if !found.iter().any(|other| other.v1 == hierarchy.v1) {
            found.push(hierarchy);
        }
    }
    Ok(found)
}

/// A hierarchy from a line of mountinfo, proc_pid_mountinfo(5).
fn parse(line: &str) -> Option<Hierarchy> {
    let (before, after) = line.split_once(" - ")?;
    let point = PathBuf::from(before.split(' ').nth(4)?);
    let mut fields = after.split(' ');
    match fields.next()? {
        "cgroup2" => Some(Hierarchy { point, v1: None }),
        "cgroup" => Some(Hierarchy { point, v1: Some(options(fields.nth(1)?)) }),
        _ => None,
    }
}

/// Of the options of a superblock of version 1 those that say which hierarchy it is: its controllers, or its name.
fn options(all: &str) -> String {
    const FLAGS: [&str; 6] = ["rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"];
    let named = all.split(',').filter(|word| !FLAGS.contains(word) && !word.starts_with("release_agent="));
    let words: Vec<&str> = named.collect();
    let controllers = words.iter().any(|word| !word.starts_with("name="));
    if controllers { words.join(",") } else { format!("none,{}", words.join(",")) }
}

/// The cgroup of version 2, below that of a suite, for what stays outside of its namespaces: one with controllers for its children has no
/// processes itself.
const OUTSIDE: &str = "outside";

/// Moves this process into a new cgroup of this name in every hierarchy: on version 2 into one below it, from which
/// [`enter_namespace`] goes on.
pub fn enter(name: &str) -> Result<()> {
    for Hierarchy { point, v1 } in hierarchies()? {
        let group = point.join(format!("{PREFIX}{name}"));
        if v1.is_none() {
            enable_controllers(&point);
        }
        // Another run may take the new cgroup for one that a dead run has left.
        let mut tries = 0;
        while let Err(error) = enter_one(&point, &group) {
            tries += 1;
            if error.kind() != ErrorKind::NotFound || tries == 10 {
                return Err(error).with_context(|| format!("cannot enter the new cgroup {}", group.display()));
            }
        }
        if v1.is_none() {
            let outside = group.join(OUTSIDE);
            enter_one(&group, &outside)
                .with_context(|| format!("cannot enter the new cgroup {}", outside.display()))?;
        }
    }
    Ok(())
}

/// Gives this process a cgroup namespace that has the cgroups of this name as its roots.
pub fn enter_namespace(name: &str) -> Result<()> {
    for Hierarchy { point, .. } in hierarchies()?.into_iter().filter(|hierarchy| hierarchy.v1.is_none()) {
        let group = point.join(format!("{PREFIX}{name}"));
        fs::write(group.join("cgroup.procs"), "0")
            .with_context(|| format!("cannot enter the cgroup {}", group.display()))?;
    }
    unshare(CloneFlags::CLONE_NEWCGROUP).context("cannot make a cgroup namespace")
}

fn enter_one(above: &Path, group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // A cpuset of version 1 takes no process before it has been told its CPUs and memory nodes.
    if group.join("cpuset.cpu_exclusive").exists() {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::write(group.join(file), fs::read(above.join(file))?)?;
        }
    }
    fs::write(group.join("cgroup.procs"), "0")
}

/// Lets the children of a cgroup of version 2 have every controller that it has.
pub fn enable_controllers(group: &Path) {
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_whitespace() {
        // One that cannot be enabled is missing in the suite, as it would be without namespaces.
        let _ = fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// The CPU time that all processes of a suite have used.
pub fn cpu_time(name: &str) -> Option<Duration> {
    hierarchies().ok()?.iter().find_map(|Hierarchy { point, .. }| {
        let group = point.join(format!("{PREFIX}{name}"));
        let v1 = || fs::read_to_string(group.join("cpuacct.usage")).ok()?.trim().parse().ok().map(Duration::from_nanos);
        let v2 = || {
            let text = fs::read_to_string(group.join("cpu.stat")).ok()?;
            text.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok().map(Duration::from_micros)
        };
        v1().or_else(v2)
    })
}

/// Removes the cgroups of a suite whose processes have been killed.
pub fn remove(name: &str) -> Result<()> {
    let deadline = Instant::now() + EMPTY_LIMIT;
    for Hierarchy { point, .. } in hierarchies()? {
        let group = point.join(format!("{PREFIX}{name}"));
        while group.exists() {
            thaw(&group);
            if remove_tree(&group) {
                break;
            }
            if Instant::now() > deadline {
                bail!("the cgroup {} is still busy", group.display());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Removes cgroups that runs have left which were killed. Those in use stay: the kernel removes none with processes.
pub fn remove_stale() -> Result<()> {
    for Hierarchy { point, .. } in hierarchies()? {
        for entry in fs::read_dir(&point).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                let deadline = Instant::now() + EMPTY_LIMIT;
                while !remove_tree(&entry.path()) && thaw_killed(&entry.path()) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }
    Ok(())
}

/// Thaws the cgroups, of this one and those below it, whose tasks were killed while the freezer of version 1 held them: these do not die
/// before, nor does the first process of their pid namespace. Whether there were any.
fn thaw_killed(group: &Path) -> bool {
    let state = fs::read_to_string(group.join("freezer.state")).unwrap_or_default();
    let tasks = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let own = state.trim() != "THAWED" && tasks.lines().any(is_killed);
    // Where its parent is frozen this changes nothing.
    let mut found = own && fs::write(group.join("freezer.state"), "THAWED").is_ok();
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        found |= thaw_killed(&entry.path());
    }
    found
}

/// Whether a SIGKILL waits for a process.
fn is_killed(pid: &str) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = |field: &str| {
        let word = status.lines().find_map(|line| line.strip_prefix(field))?;
        u64::from_str_radix(word.trim(), 16).ok()
    };
    ["SigPnd:", "ShdPnd:"].into_iter().filter_map(pending).any(|set| set & KILL != 0)
}

/// Removes a cgroup and those below it, the innermost first; whether it is gone.
fn remove_tree(group: &Path) -> bool {
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_tree(&entry.path());
    }
    fs::remove_dir(group).is_ok() || !group.exists()
}

/// Thaws a cgroup and those below it: a task that the freezer of version 1 holds does not even die.
fn thaw(group: &Path) {
    for (file, value) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        if group.join(file).exists() {
            // The removal fails, with the cgroup's name, where this does.
            let _ = fs::write(group.join(file), value);
        }
    }
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        thaw(&entry.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hierarchy_is_told_by_its_controllers_or_its_name() {
        let both = "33 28 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct";
        let v1 = |point: &str, options: &str| Hierarchy { point: point.into(), v1: Some(options.into()) };
        assert_eq!(parse(both), Some(v1("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct")));
        let named = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd";
        assert_eq!(parse(named), Some(v1("/sys/fs/cgroup/systemd", "none,name=systemd")));
        let v2 = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        assert_eq!(parse(v2), Some(Hierarchy { point: "/sys/fs/cgroup/unified".into(), v1: None }));
        assert_eq!(parse("31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw"), None);
    }
    #[test]
    fn only_frozen_tasks_that_were_killed_are_thawed() {
        let Some(freezer) = hierarchies()
            .unwrap()
            .into_iter()
            .find(|h| h.point.join("cgroup.procs").exists() && h.v1.as_deref() == Some("freezer"))
        else {
            println!("skipped: there is no freezer of version 1");
            return;
        };
        let group = freezer.point.join(format!("tranship-test-{}", std::process::id()));
        if fs::create_dir(&group).is_err() {
            println!("skipped: cgroups need root");
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(group.join("cgroup.procs"), child.id().to_string()).unwrap();
        fs::write(group.join("freezer.state"), "FROZEN").unwrap();
        let state = || fs::read_to_string(group.join("freezer.state")).unwrap();
        let deadline = Instant::now() + EMPTY_LIMIT;
        while state() != "FROZEN\n" && Instant::now() < deadline {}
        assert!(!thaw_killed(&group));
        assert_eq!(state(), "FROZEN\n");
        child.kill().unwrap();
        assert!(thaw_killed(&group));
        child.wait().unwrap();
        while !remove_tree(&group) && Instant::now() < deadline {}
        assert!(!group.exists());
    }
}
