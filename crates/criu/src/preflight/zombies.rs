//! Zombies that CRIU does not see.
//!
//! For each process that has ended, and that its parent has not waited for, CRIU forks itself, with all its memory: 0.7 ms.
//! A container whose first process waits for nobody has thousands. Those that have nothing but a number, a name and an exit
//! status are hidden from CRIU's dump, and made by the preloaded library in the restored parent (its `zombies`), 50 µs each.
//!
//! Of those that CRIU makes it is told how they ended where it would change that.
//!
//! ```text
//!   before the freeze    find: which there are, and what they have
//!   in the freeze        find: which have come and gone since; list: written beside the images, for both ends
//! ```

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use tranship_sys::process::children;
use tranship_types::{Blocker, BlockerKind};

use super::{procfs, references};

/// The environment variable that names the list, for a dump and for a restore.
pub const VARIABLE: &str = "TRANSHIP_ZOMBIES";
/// The list's name among the images.
pub const FILE: &str = "zombies";
/// The environment variable that names the list of ends for a restore.
pub const ENDS_VARIABLE: &str = "TRANSHIP_ENDS";
/// The name among the images of the list that tells how zombies ended that CRIU makes, where it would change that.
pub const ENDS: &str = "ends";
/// Fewer than these are left to CRIU.
const FEW: usize = 16;
const SIGCHLD: i64 = 17;
const LAST_SIGNAL: i64 = 64;
/// In an exit code: a core file was written.
const CORE_FILE: i64 = 0x80;
/// More bytes than a container's pids could fill.
const LONGEST_LIST: u64 = 64 << 20;

/// A process that has ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zombie {
    /// Its pid on this node.
    pid: u32,
    /// Its pid and its parent's in the container.
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

/// Whether this process has ended, and written a core file.
pub(super) fn has_core_file(pid: u32) -> bool {
    Stat::read(pid).is_some_and(|stat| stat.state == b'Z' && stat.exit_code() & CORE_FILE != 0)
}

/// CRIU kills a process of its own for a zombie, so that it writes no core file.
pub(super) fn core_file(pid: u32, name: &str) -> Blocker {
    let cause =
        format!("{name} (pid {pid}) has ended with a core file, which its parent would not be told after a move");
    let remedy = "let its parent wait for it (waitpid)";
    Blocker::new(BlockerKind::Process, cause, remedy).at(pid, None).allowable("core-files")
}

/// One that has ended. But for its parent nothing of it changes any more.
#[derive(Debug, Clone)]
struct Ended {
    stat: Stat,
    parent: u32,
    /// Its pid in the container.
    inner: u32,
    is_traced: bool,
}

impl Ended {
    fn read(pid: u32, parent: u32) -> Option<Self> {
        let stat = Stat::read(pid).filter(|stat| stat.state == b'Z')?;
        let status = procfs::Status::read(pid, None).ok()?;
        Some(Self { stat, parent, inner: status.inner_pid, is_traced: status.tracer != 0 })
    }

    /// Whether CRIU restores how it has ended: of a status it keeps seven bits, and the last signal it does not know.
    fn is_kept(&self) -> bool {
        let code = self.stat.exit_code();
        match code & 0x7f {
            0 => code >> 8 & 0x80 == 0,
            signal => signal < LAST_SIGNAL,
        }
    }
}

/// The processes of a container that have ended.
#[derive(Debug, Default)]
pub struct Zombies {
    /// By their pids on this node.
    ended: BTreeMap<u32, Ended>,
    hidden: Vec<Zombie>,
}

impl Zombies {
    /// Looks which there are, and which of them CRIU need not see, if any may be `hidden`. In the freeze that costs little
    /// where they are known from before.
    pub fn find(&mut self, processes: &[u32], hidden: bool) {
        let mut known = std::mem::take(&mut self.ended);
        // A number may have become another process's; one that lives has a program.
        known.retain(|pid, _| fs::read_link(format!("/proc/{pid}/exe")).is_err());
        let living: BTreeMap<u32, Stat> = processes
            .iter()
            .filter(|pid| !known.contains_key(pid))
            .filter_map(|pid| Some((*pid, Stat::read(*pid).filter(|stat| stat.state != b'Z')?)))
            .collect();
        for parent in living.keys() {
            for pid in children(*parent).into_iter().filter(|pid| !living.contains_key(pid)) {
                let again = known.remove(&pid).map(|before| Ended { parent: *parent, ..before });
                self.ended.extend(again.or_else(|| Ended::read(pid, *parent)).map(|ended| (pid, ended)));
            }
        }
        self.hidden = if hidden { self.plain(&living) } else { Vec::new() };
    }

    /// Those that CRIU need not see; none where they are few, or CRIU would make helpers.
    fn plain(&self, living: &BTreeMap<u32, Stat>) -> Vec<Zombie> {
        if self.ended.len() < FEW {
            return Vec::new();
        }
        // For a session or group without a leader CRIU makes one for a while, with a number that is free as far as it knows.
        let is_led = |stat: &Stat, own: u32| {
            [(stat.group(), own.into()), (stat.session(), 0)].iter().all(|(leader, own)| {
                let leads = u32::try_from(*leader).is_ok_and(|pid| living.contains_key(&pid));
                *leader == 0 || leader == own || leads
            })
        };
        let all = || living.iter().chain(self.ended.iter().map(|(pid, ended)| (pid, &ended.stat)));
        if !all().all(|(pid, stat)| is_led(stat, *pid)) {
            return Vec::new();
        }
        // Whose number is a group's, a session's or a terminal's is more than a number.
        let known = |stat: &Stat| [stat.group(), stat.session(), stat.field(8)];
        let taken: HashSet<i64> = living.values().flat_map(known).collect();
        let mut groups: BTreeMap<i64, usize> = BTreeMap::new();
        self.ended.values().for_each(|ended| *groups.entry(ended.stat.group()).or_default() += 1);
        let referred = references::of(living.keys().copied());
        let inner = |pid: u32| Some((pid, procfs::Status::read(pid, None).ok()?.inner_pid));
        let parents: BTreeSet<u32> = self.ended.values().map(|ended| ended.parent).collect();
        let parents: BTreeMap<u32, u32> = parents.into_iter().filter_map(inner).collect();
        let plain = self.ended.iter().filter_map(|(pid, ended)| {
            let Ended { stat, parent, inner, is_traced } = ended;
            let number = i64::from(*pid);
            let of_parent = living.get(parent)?;
            let leads_group = stat.group() == number;
            let is_alone = !taken.contains(&number) && (!leads_group || groups[&number] == 1);
            let in_group = leads_group || stat.group() == of_parent.group();
            let has_exited = stat.exit_code() & 0x7f == 0 && stat.exit_signal() == SIGCHLD && stat.threads() <= 1;
            let is_plain = is_alone && in_group && has_exited && stat.session() == of_parent.session();
            let inner = [*inner, *parents.get(parent)?];
            let status = (stat.exit_code() >> 8 & 0xff) as u8;
            (is_plain && !is_traced && !referred.has(*pid, inner[0])).then(|| Zombie {
                pid: *pid,
                inner,
                status,
                leads_group,
                name: stat.name.clone(),
            })
        });
        let plain: Vec<Zombie> = plain.collect();
        if plain.len() < FEW { Vec::new() } else { plain }
    }

    /// Those that CRIU restores, and whose end it would change.
    fn changed(&self) -> impl Iterator<Item = &Ended> {
        let hidden: HashSet<u32> = self.hidden.iter().map(|zombie| zombie.pid).collect();
        let left = self.ended.iter().filter(move |(pid, ended)| !hidden.contains(pid) && !ended.is_kept());
        left.map(|(_, ended)| ended)
    }

    /// CRIU makes all of them: nobody has hidden any.
    pub fn show(&mut self) {
        self.hidden.clear();
    }

    /// What is in the way of those that have ended with a core file.
    pub fn with_core_files(&self) -> impl Iterator<Item = Blocker> {
        let with_core = self.ended.iter().filter(|(_, ended)| ended.stat.exit_code() & CORE_FILE != 0);
        with_core.map(|(pid, ended)| core_file(*pid, &String::from_utf8_lossy(&ended.stat.name)))
    }

    /// How many there are of which CRIU would change how they ended, if nobody told it.
    pub fn to_be_told(&self) -> usize {
        self.changed().count()
    }

    /// Lists them beside the images, for the dump and for the restore: those that CRIU need not see, and how others ended.
    /// Returns how many CRIU does not see.
    ///
    /// # Errors
    /// A list cannot be written.
    pub fn list(&self, images: &Path) -> io::Result<usize> {
        if !self.hidden.is_empty() {
            let line = |zombie: &Zombie| {
                let Zombie { pid, inner: [own, parent], status, leads_group, name } = zombie;
                let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{pid} {parent} {own} {status} {} {name}\n", u8::from(*leads_group))
            };
            fs::write(images.join(FILE), self.hidden.iter().map(line).collect::<String>())?;
        }
        let ends: String = self.changed().map(|end| format!("{} {}\n", end.inner, end.stat.exit_code())).collect();
        if !ends.is_empty() {
            fs::write(images.join(ENDS), ends)?;
        }
        Ok(self.hidden.len())
    }
}

/// Those that are listed, by the pid of their parent in the container; their own are sorted. Empty where there is no list.
///
/// # Errors
/// The list cannot be read, or is none.
pub fn listed(images: &Path) -> io::Result<BTreeMap<u32, BTreeSet<u32>>> {
    let text = match fs::File::open(images.join(FILE)) {
        Ok(file) => io::read_to_string(file.take(LONGEST_LIST))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    parse(&text).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Reads a list, which a peer has sent.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<u32, BTreeSet<u32>>, String> {
    let mut parents: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |place: usize| words.get(place).and_then(|word| word.parse::<u32>().ok());
        let (Some(parent), Some(own), 6) = (number(1), number(2), words.len()) else {
            return Err(format!("{line:?} is no zombie"));
        };
        if !parents.entry(parent).or_default().insert(own) {
            return Err(format!("{own} is listed twice among the zombies"));
        }
    }
    Ok(parents)
}

/// Of those that are listed for a parent, which has this pid on this node, how many have not been made. They are made after
/// the children that CRIU makes, all or none.
pub fn missing(parent: u32, listed: &BTreeSet<u32>) -> usize {
    let all = children(parent);
    let is_listed = |pid: &u32| procfs::Status::read(*pid, None).is_ok_and(|status| listed.contains(&status.inner_pid));
    let made = all.iter().rev().take(1 + all.len().saturating_sub(listed.len())).any(is_listed);
    if made { listed.len().saturating_sub(all.len()) } else { listed.len() }
}

/// Reads how zombies ended, by their pids in the container.
pub(crate) fn parse_ends(text: &str) -> Option<BTreeMap<u32, i64>> {
    let end = |line: &str| {
        let (own, code) = line.split_once(' ')?;
        Some((own.parse().ok()?, code.parse().ok()?))
    };
    text.lines().map(end).collect()
}

/// How many of the zombies below these processes did not end as is listed.
///
/// # Errors
/// The list cannot be read, or is none.
pub fn changed(images: &Path, living: impl Iterator<Item = u32>) -> io::Result<usize> {
    let text = match fs::File::open(images.join(ENDS)) {
        Ok(file) => io::read_to_string(file.take(LONGEST_LIST))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let none = || io::Error::new(io::ErrorKind::InvalidData, "the list of how zombies ended is none");
    let mut listed = parse_ends(&text).ok_or_else(none)?;
    for parent in living {
        if listed.is_empty() {
            break;
        }
        for ended in children(parent).into_iter().filter_map(|pid| Ended::read(pid, parent)) {
            if listed.get(&ended.inner) == Some(&ended.stat.exit_code()) {
                listed.remove(&ended.inner);
            }
        }
    }
    Ok(listed.len())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use tranship_sys::process::OpenFiles;

    use super::*;

    #[test]
    fn plain_zombies_are_found_and_those_that_were_waited_for_are_not_listed() {
        let mut all: Vec<_> =
            (0..2 * FEW).map(|n| Command::new("sh").args(["-c", &format!("exit {n}")]).spawn().unwrap()).collect();
        let own = std::process::id();
        // Else CRIU would make leaders for it.
        let leaders = [nix::unistd::getpgid(None), nix::unistd::getsid(None)].map(|pid| pid.unwrap().as_raw() as u32);
        let processes = [own, leaders[0], leaders[1]];
        let ended = |pid: u32| Stat::read(pid).is_some_and(|stat| stat.state == b'Z');
        while !all.iter().all(|child| ended(child.id())) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut zombies = Zombies::default();
        zombies.find(&processes, true);
        let of =
            |zombies: &Zombies, child: &Child| {
                zombies.hidden.iter().find(|zombie| zombie.pid == child.id()).map(|zombie| {
                    (zombie.inner[1], usize::from(zombie.status), zombie.leads_group, zombie.name.clone())
                })
            };
        for (n, child) in all.iter().enumerate() {
            assert_eq!(of(&zombies, child), Some((own, n, false, b"sh".to_vec())));
        }
        all[3].wait().unwrap();
        let process = OpenFiles::of(all[4].id()).unwrap();
        let entry = fs::File::open(format!("/proc/{}/comm", all[5].id())).unwrap();
        zombies.find(&processes, true);
        for (n, child) in all.iter().enumerate() {
            assert_eq!(of(&zombies, child).is_none(), (3..=5).contains(&n), "{n}");
        }
        drop((process, entry));
        zombies.find(&processes, true);
        assert!(of(&zombies, &all[4]).is_some());
        let images = tempfile::tempdir().unwrap();
        let count = zombies.list(images.path()).unwrap();
        assert_eq!(count, zombies.hidden.len());
        let mut listed = listed(images.path()).unwrap().remove(&own).unwrap();
        assert_eq!(listed.len(), count);
        assert_eq!(missing(own, &listed), 0);
        listed = listed.into_iter().map(|pid| pid + 4_000_000).collect();
        assert_eq!(missing(own, &listed), count);
        for child in &mut all {
            child.wait().unwrap();
        }
    }

    #[test]
    fn the_list_of_a_peer_is_checked() {
        assert_eq!(parse("9 1 5 0 0 7368\n8 1 4 0 0 7368\n").unwrap()[&1], BTreeSet::from([4, 5]));
        for wrong in ["9 1 5 0 0", "9 1 5 0 0 7368 1", "9 x 5 0 0 7368", "9 1 5 0 0 7368\n7 1 5 0 0 7368"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ends_that_criu_would_change_are_known() {
        let ended = |exit_code: i64| {
            let stat = Stat { name: Vec::new(), state: b'Z', numbers: [vec![0; 48], vec![exit_code]].concat() };
            Ended { stat, parent: 1, inner: 2, is_traced: false }
        };
        for (code, is_kept) in [(0, true), (127 << 8, true), (128 << 8, false), (9, true), (34, true), (64, false)] {
            assert_eq!(ended(code).is_kept(), is_kept, "{code}");
        }
    }
}
