//! Rules about states of terminals that CRIU drops, or with which a dump fails (the preloaded library, terminals.rs).

use std::collections::{HashMap, HashSet};

use rustix::fs::FileType;
use rustix::io::ioctl_fionread;
use tranship_sys::file_settings::{has_state_to_read, is_hung_up};
use tranship_sys::kcmp::same_file;
use tranship_sys::process::{children, take_descriptor};
use tranship_types::{Blocker, BlockerKind};

use super::Look;
use super::container::{Container, Task};
use super::files::{Descriptor, Files};
use super::hidden_files::Known;
use super::procfs;
use crate::file_settings::closed_terminal;

/// Of the slaves of pseudo-terminals.
const SLAVES: u32 = 136;

/// Which pseudo-terminal it is, and whether this is its master.
fn terminal(d: &Descriptor<'_>) -> Option<(i64, bool)> {
    if d.kind.kind != FileType::CharacterDevice {
        return None;
    }
    match d.info.number("tty-index") {
        Some(index) => Some((index, true)),
        None => (d.kind.stands_for.0 == SLAVES).then_some((d.kind.stands_for.1.into(), false)),
    }
}

pub(super) fn check(container: &Container, files: &Files<'_>, look: &mut Look) {
    let all: Vec<_> = files.all.iter().filter_map(|d| Some((d, terminal(d)?))).collect();
    by_dev_tty(container, files, &all, look);
    of_sessions(container, &all, look);
    of_instances(container, &all, look);
    let (mut known, mut named) = (Known::default(), HashSet::new());
    for (d, of @ (index, is_master)) in &all {
        if !named.insert(*of) {
            continue;
        }
        let identity = d.kind.inode << 32 | index.unsigned_abs() << 1 | u64::from(*is_master);
        if *is_master && take_descriptor(d.task.pid, d.fd).is_ok_and(|d| has_state_to_read(d).unwrap_or(false)) {
            let what = "has a change of its terminal's state to read (TIOCPKT), which CRIU does not support";
            look.wait(identity, blocker(d, what, "let the program read it, and try again"));
        }
        if *is_master && is_left(d) && has_output(d) {
            look.wait(identity, closed_terminal(d.task.pid, d.fd));
        }
        if known.of(d, look).is_stopped {
            let what = format!(
                "is the terminal {}, whose output is stopped (TCOOFF, or ^S), which CRIU does not carry",
                d.link
            );
            let found = blocker(d, &what, "let the output go on (TCOON, or ^Q), and try again");
            let other = all.iter().find(|(_, other)| *other == (*index, !is_master));
            look.wait(
                identity,
                match other.is_some_and(|(other, _)| has_output(other)) {
                    // The dump fails.
                    true => found,
                    false => found.allowable("stopped-terminals"),
                },
            );
        }
    }
}

/// A terminal's descriptor, with its number and whether it is the master.
type Open<'a> = (&'a Descriptor<'a>, (i64, bool));

/// Rules for descriptors that were opened by `/dev/tty`, the name of a session's own terminal. CRIU (tty.c, `tty_verify_ctty`) looks for the
/// first descriptor of that terminal, in the order in which it dumps processes. A slave counts in processes of the session alone; and the
/// session must be in the foreground.
fn by_dev_tty(container: &Container, files: &Files<'_>, terminals: &[Open<'_>], look: &mut Look) {
    const DEV_TTY: (u32, u32) = (5, 0);
    let opened: Vec<_> =
        files.all.iter().filter(|d| d.kind.kind == FileType::CharacterDevice && d.kind.stands_for == DEV_TTY).collect();
    if opened.is_empty() {
        return;
    }
    let order = container.dump_order();
    let place = |task: &Task| order.iter().position(|pid| *pid == task.pid);
    for d in &opened {
        let Some(own) = Controlling::of(d.task.pid) else { continue };
        // Of each end CRIU looks at the first descriptor alone.
        let first_of = |end: bool| {
            let of_end = terminals.iter().filter(|(_, of)| *of == (own.index, end)).map(|(other, _)| other.task);
            of_end.min_by_key(|task| place(task))
        };
        let slave = first_of(false).filter(|task| Controlling::of(task.pid).is_some_and(|its| its == own));
        let first = slave.into_iter().chain(first_of(true)).min_by_key(|task| place(task));
        // What was inherited is dumped with the process that comes first.
        let holders = opened.iter().filter(|o| same_file((o.task.pid, o.fd), (d.task.pid, d.fd)));
        let Some(holder) = holders.map(|o| o.task).min_by_key(|task| place(task)) else { continue };
        let (what, remedy) = match first {
            _ if own.index < 0 => {
                ("was opened as /dev/tty, and is not its terminal any more".to_owned(), "let the program close it")
            }
            _ if own.foreground != own.session => (
                "was opened as /dev/tty, while another process group of its session is in the foreground".to_owned(),
                "end the foreground job of that terminal, or let the program close it",
            ),
            Some(first) if first.pid != holder.pid => (
                format!("was opened as /dev/tty, and {} has the same terminal open", first.name()),
                "let the program close it, or open its terminal by the name that tty(1) tells",
            ),
            Some(_) => continue,
            None => (
                "was opened as /dev/tty, and no process of the container has that terminal open besides".to_owned(),
                "let the program open its terminal by the name that tty(1) tells",
            ),
        };
        look.wait(
            u64::from(d.task.pid) << 32 | u64::from(d.fd.unsigned_abs()),
            blocker(d, &format!("{what}, which CRIU does not support"), remedy),
        );
    }
}

/// Rules for the terminals of sessions. CRIU gives a terminal to the session that it belongs to as long as its leader is the first of its
/// processes that it comes to (tty.c, `dump_verify_tty_sids`), and the group in the foreground has a process (`tty_set_prgp`).
fn of_sessions(container: &Container, terminals: &[Open<'_>], look: &mut Look) {
    let open: HashSet<i64> = terminals.iter().map(|(_, (index, _))| *index).collect();
    if open.is_empty() {
        return;
    }
    let all = || container.tasks.values().chain(container.zombies.values()).chain(container.entered.values());
    let groups: HashSet<u32> = all().map(|task| task.status.group).collect();
    for leader in container.tasks.values().filter(|task| task.status.session == task.pid && !task.ended()) {
        let Some(own) = Controlling::of(leader.pid).filter(|own| open.contains(&own.index)) else { continue };
        let of_session = |task: &Task| task.status.session == leader.pid;
        let is_orphan = |task: &Task| {
            of_session(task)
                && task.pid != leader.pid
                && container.tasks.get(&task.status.ppid).is_none_or(|parent| !of_session(parent))
        };
        if container.tasks.values().any(is_orphan)
            && let Some(first) = first_of(container, of_session).filter(|first| first.pid != leader.pid)
        {
            let what = format!(
                "leads a session with a terminal of which {}, an orphan, comes first, which CRIU does not support",
                first.name()
            );
            let remedy = "end one of the two, or let the orphan leave the session (setsid)";
            look.wait(leader.pid.into(), leader.blocker(&what, remedy));
        }
        let foreground = u32::try_from(own.foreground).ok().filter(|group| *group > 0);
        if let Some(group) = foreground.filter(|group| !groups.contains(group) && !is_group(*group)) {
            let what = format!(
                "has a terminal with a group ({group}) in the foreground that has ended, which CRIU cannot restore"
            );
            let found = leader.blocker(&what, "let it take the foreground (tcsetpgrp)");
            look.wait(u64::from(leader.pid) << 32 | u64::from(group), found);
        }
    }
}

/// The first process of that kind in the order in which the kernel lists children, which is CRIU's: those that were inherited come last.
fn first_of(container: &Container, is: impl Fn(&Task) -> bool) -> Option<&Task> {
    let mut next = vec![container.init];
    // A process may move while this looks.
    for _ in 0..2 * container.tasks.len() {
        let pid = next.pop()?;
        if let Some(task) = container.tasks.get(&pid).filter(|task| is(task)) {
            return Some(task);
        }
        let mut own: Vec<u32> = children(pid).into_iter().filter(|child| container.tasks.contains_key(child)).collect();
        own.reverse();
        next.extend(own);
    }
    None
}

/// Whether a process of that group is there now.
fn is_group(group: u32) -> bool {
    let of = |pid: u32| Some(procfs::Status::read(pid, None).ok()?.group);
    procfs::numbers("/proc").unwrap_or_default().into_iter().any(|pid| of(pid) == Some(group))
}

/// CRIU tells terminals apart by their numbers, which each instance of devpts counts for itself.
fn of_instances(container: &Container, terminals: &[Open<'_>], look: &mut Look) {
    let device = |d: &Descriptor<'_>| format!("{}:{}", d.kind.device.0, d.kind.device.1);
    // A master may have been opened by another file than one of devpts.
    let instances: HashSet<&str> =
        container.all_mounts.iter().filter(|m| m.fstype == "devpts").map(|m| m.device.as_str()).collect();
    let main = container.mounts.iter().find(|m| m.point == "/dev/pts").map(|m| m.device.as_str());
    let (own, others): (Vec<_>, Vec<_>) = terminals.iter().partition(|(d, _)| Some(device(d).as_str()) == main);
    let (mut known, mut named): (HashMap<i64, String>, HashSet<i64>) = Default::default();
    for (d, (index, _)) in own.into_iter().chain(others) {
        let of = device(d);
        if !instances.contains(of.as_str()) {
            continue;
        }
        if *known.entry(index).or_insert_with(|| of.clone()) != of && named.insert(index) {
            let what =
                format!("is the terminal {}, of another instance of devpts than one with the same number", d.link);
            look.block(blocker(d, &what, "close one of the two"));
        }
    }
}

/// Whether the other side of a master was open, and is closed.
fn is_left(master: &Descriptor<'_>) -> bool {
    let taken = take_descriptor(master.task.pid, master.fd);
    taken.is_ok_and(|taken| is_hung_up(taken).unwrap_or(false))
}

/// The terminal of a process's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Controlling {
    session: i32,
    /// The number of the pseudo-terminal; negative if there is none, or it is another kind of terminal.
    index: i64,
    /// The process group in the foreground.
    foreground: i32,
}

impl Controlling {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&procfs::text(format!("/proc/{pid}/stat")).ok()?)
    }

    /// From the sixth to the eighth field of /proc/PID/stat.
    pub(super) fn parse(stat: &str) -> Option<Self> {
        let mut fields = stat.rsplit(')').next()?.split_ascii_whitespace().skip(6 - 3);
        let mut number = || fields.next()?.parse::<i32>().ok();
        let (session, device, foreground) = (number()?, number()?.cast_unsigned(), number()?);
        // As `new_encode_dev` of the kernel's kdev_t.h has it.
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
        let index = if major == SLAVES { i64::from(minor) } else { -1 };
        Some(Self { session, index, foreground })
    }
}

fn has_output(reader: &Descriptor<'_>) -> bool {
    let waiting = take_descriptor(reader.task.pid, reader.fd).ok().and_then(|taken| ioctl_fionread(taken).ok());
    waiting.is_some_and(|bytes| bytes > 0)
}

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    d.blocker(BlockerKind::Descriptor, what, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_terminal_of_a_session_is_read_from_stat() {
        let stat = "21 (a) b) S 20 21 21 34821 22 4194304 92 0";
        let expected = Controlling { session: 21, index: 5, foreground: 22 };
        assert_eq!(Controlling::parse(stat), Some(expected));
        // Minor 300 of a kernel that has one major number for all.
        let stat = "21 (a) S 20 21 21 1083436 22 0";
        assert_eq!(Controlling::parse(stat).map(|own| own.index), Some(300));
        assert_eq!(Controlling::parse("21 (a) S 20 21 21 0 -1 0").map(|own| own.index), Some(-1));
    }
}
