//! Zombies that CRIU does not see.
//!
//! For each process that has ended, and that its parent has not waited for, CRIU forks itself, with all its memory: 0.7 ms.
//! A container whose first process waits for nobody has thousands. Those that have nothing but a number, a name and an exit
//! status are hidden from CRIU's dump, and made by the preloaded library in the restored parent (its `zombies`), 50 µs each.
//!
//! ```text
//!   before the freeze    find: which there are, and what they have
//!   in the freeze        confirm: which of them are there still; written beside the images, for both ends
//! ```

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io;
use std::path::Path;

use tranship_sys::process::children;

use super::procfs;

/// The environment variable that names the list, for a dump and for a restore.
pub const VARIABLE: &str = "TRANSHIP_ZOMBIES";
/// The list's name among the images.
pub const FILE: &str = "zombies";
/// Fewer than these are left to CRIU.
const FEW: usize = 16;
const SIGCHLD: i64 = 17;

/// A process that has ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zombie {
    /// Its pid on this node.
    pid: u32,
    /// Its parent's.
    parent: u32,
    /// Both in the container.
    inner: [u32; 2],
    status: u8,
    /// Whether it leads a process group, of which it is all that there is; else it is in its parent's.
    leads_group: bool,
    name: Vec<u8>,
}

/// What `/proc/PID/stat` tells (proc_pid_stat(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stat {
    name: Vec<u8>,
    state: u8,
    /// From the fourth field on.
    numbers: Vec<i64>,
}

impl Stat {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (from, to) = (bytes.iter().position(|b| *b == b'(')?, bytes.iter().rposition(|b| *b == b')')?);
        let mut rest = str::from_utf8(bytes.get(to + 2..)?).ok()?.split_ascii_whitespace();
        let state = *rest.next()?.as_bytes().first()?;
        let numbers = rest.map(|word| word.parse().unwrap_or(-1)).collect();
        Some(Self { name: bytes.get(from + 1..to)?.to_owned(), state, numbers })
    }

    fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// By the number that the manual page gives it.
    fn field(&self, number: usize) -> i64 {
        self.numbers.get(number - 4).copied().unwrap_or(-1)
    }

    fn group(&self) -> i64 {
        self.field(5)
    }

    fn session(&self) -> i64 {
        self.field(6)
    }

    fn threads(&self) -> i64 {
        self.field(20)
    }

    fn exit_signal(&self) -> i64 {
        self.field(38)
    }

    fn exit_code(&self) -> i64 {
        self.field(52)
    }
}

/// Those of the processes of a container that CRIU need not see; none where they are few, or CRIU would make helpers.
pub fn find(processes: &[u32]) -> Vec<Zombie> {
    let stats: BTreeMap<u32, Stat> = processes.iter().filter_map(|pid| Some((*pid, Stat::read(*pid)?))).collect();
    let parents = stats.iter().filter(|(_, stat)| stat.state != b'Z');
    let of_parent =
        |(parent, _): (&u32, &Stat)| children(*parent).into_iter().map(|pid| (pid, *parent)).collect::<Vec<_>>();
    let ended = parents.flat_map(of_parent).filter_map(|(pid, parent)| {
        let stat = stats.get(&pid).cloned().or_else(|| Stat::read(pid)).filter(|stat| stat.state == b'Z')?;
        Some((pid, parent, stat))
    });
    let ended: Vec<(u32, u32, Stat)> = ended.collect();
    if ended.len() < FEW {
        return Vec::new();
    }
    // For a session or group without a leader CRIU makes one for a while, with a number that is free as far as it knows.
    let is_led = |stat: &Stat, own: i64| {
        [(stat.group(), own), (stat.session(), 0)].iter().all(|(leader, own)| {
            let leads =
                u32::try_from(*leader).ok().and_then(|pid| stats.get(&pid)).is_some_and(|stat| stat.state != b'Z');
            *leader == 0 || leader == own || leads
        })
    };
    let all_are_led = stats.iter().all(|(pid, stat)| is_led(stat, (*pid).into()))
        && ended.iter().all(|(pid, _, stat)| is_led(stat, (*pid).into()));
    if !all_are_led {
        return Vec::new();
    }
    // Whose number is a group's, a session's or a terminal's is more than a number.
    let known = |stat: &Stat| [stat.group(), stat.session(), stat.field(8)];
    let living: HashSet<i64> = stats.values().filter(|stat| stat.state != b'Z').flat_map(known).collect();
    let mut groups: BTreeMap<i64, usize> = BTreeMap::new();
    ended.iter().for_each(|(_, _, stat)| *groups.entry(stat.group()).or_default() += 1);
    let inner = |pid: u32| procfs::Status::read(pid, None).ok().map(|status| status.inner_pid);
    let parents: BTreeSet<u32> = ended.iter().map(|(_, parent, _)| *parent).collect();
    let parents: BTreeMap<u32, u32> = parents.into_iter().filter_map(|pid| Some((pid, inner(pid)?))).collect();
    let plain = ended.into_iter().filter_map(|(pid, parent, stat)| {
        let number = i64::from(pid);
        let of_parent = stats.get(&parent)?;
        let leads_group = stat.group() == number;
        let is_alone = !living.contains(&number) && (!leads_group || groups[&number] == 1);
        let in_group = leads_group || stat.group() == of_parent.group();
        let has_exited = stat.exit_code() & 0x7f == 0 && stat.exit_signal() == SIGCHLD && stat.threads() <= 1;
        let is_plain = is_alone && in_group && has_exited && stat.session() == of_parent.session();
        let status = procfs::Status::read(pid, None).ok().filter(|status| is_plain && status.tracer == 0)?;
        let inner = [status.inner_pid, *parents.get(&parent)?];
        let code = (stat.exit_code() >> 8 & 0xff) as u8;
        Some(Zombie { pid, parent, inner, status: code, leads_group, name: stat.name })
    });
    let plain: Vec<Zombie> = plain.collect();
    if plain.len() < FEW { Vec::new() } else { plain }
}

/// Lists those that are there still, now that the container is frozen, for the dump and for the restore.
///
/// # Errors
/// The list cannot be written.
pub fn confirm(found: &[Zombie], images: &Path) -> io::Result<usize> {
    if found.is_empty() {
        return Ok(0);
    }
    let parents: HashSet<u32> = found.iter().map(|zombie| zombie.parent).collect();
    let there: HashSet<(u32, u32)> =
        parents.into_iter().flat_map(|parent| children(parent).into_iter().map(move |pid| (parent, pid))).collect();
    let mut text = String::new();
    let mut count = 0;
    // A number may have become another child's; one that lives has a program.
    let has_ended = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).is_err();
    for zombie in found.iter().filter(|zombie| there.contains(&(zombie.parent, zombie.pid)) && has_ended(zombie.pid)) {
        let Zombie { pid, inner: [own, parent], status, leads_group, name, .. } = zombie;
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{pid} {parent} {own} {status} {} {name}\n", u8::from(*leads_group));
        count += 1;
    }
    fs::write(images.join(FILE), text)?;
    Ok(count)
}

/// How many the list has for each parent, by its pid in the container. Empty where there is no list.
///
/// # Errors
/// The list cannot be read, or is none.
pub fn listed(images: &Path) -> io::Result<BTreeMap<u32, usize>> {
    let text = match fs::read_to_string(images.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut parents = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let parent = words.nth(1).and_then(|word| word.parse().ok());
        let is_whole = words.count() == 4;
        let Some(parent) = parent.filter(|_| is_whole) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} is no zombie")));
        };
        *parents.entry(parent).or_default() += 1;
    }
    Ok(parents)
}

/// Of those that are listed for these parents, by their pids on this node, how many have not been made: all of a parent's
/// children are zombies but those that are `living`.
pub fn missing(parents: impl Iterator<Item = (u32, usize)>, living: &HashSet<u32>) -> usize {
    let of = |(parent, expected): (u32, usize)| {
        expected.saturating_sub(children(parent).iter().filter(|pid| !living.contains(pid)).count())
    };
    parents.map(of).sum()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn plain_zombies_are_found_and_those_that_were_waited_for_are_not_listed() {
        let mut all: Vec<_> =
            (0..2 * FEW).map(|n| Command::new("sh").args(["-c", &format!("exit {n}")]).spawn().unwrap()).collect();
        let own = std::process::id();
        let ended = |pid: u32| Stat::read(pid).is_some_and(|stat| stat.state == b'Z');
        while !all.iter().all(|child| ended(child.id())) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let found = find(&[own]);
        let of = |child: &std::process::Child| found.iter().find(|zombie| zombie.pid == child.id());
        for (n, child) in all.iter().enumerate() {
            let zombie = of(child).unwrap_or_else(|| panic!("{} is not among {found:?}", child.id()));
            assert_eq!(
                (zombie.parent, usize::from(zombie.status), zombie.leads_group, &*zombie.name),
                (own, n, false, &b"sh"[..])
            );
        }
        all[3].wait().unwrap();
        let images = tempfile::tempdir().unwrap();
        let count = confirm(&found, images.path()).unwrap();
        assert_eq!(count, found.len() - 1);
        let listed = listed(images.path()).unwrap();
        assert_eq!(listed.values().sum::<usize>(), count);
        let none = HashSet::new();
        assert_eq!(missing(std::iter::once((own, count)), &none), 0);
        assert!(missing(std::iter::once((own, count + 1000)), &none) > 0);
        for child in &mut all {
            child.wait().unwrap();
        }
    }
}
