//! Rules about states of terminals that CRIU drops, or with which a dump fails (the preloaded library, terminals.rs).

use std::collections::HashSet;

use rustix::fs::FileType;
use rustix::io::ioctl_fionread;
use tranship_sys::file_settings::has_state_to_read;
use tranship_sys::process::take_descriptor;
use tranship_types::{Blocker, BlockerKind};

use super::Look;
use super::files::{Descriptor, Files};
use super::hidden_files::Known;

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

pub(super) fn check(files: &Files<'_>, look: &mut Look) {
    let all: Vec<_> = files.all.iter().filter_map(|d| Some((d, terminal(d)?))).collect();
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
        if known.of(d).is_stopped {
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

fn has_output(reader: &Descriptor<'_>) -> bool {
    let waiting = take_descriptor(reader.task.pid, reader.fd).ok().and_then(|taken| ioctl_fionread(taken).ok());
    waiting.is_some_and(|bytes| bytes > 0)
}

fn blocker(d: &Descriptor<'_>, what: &str, remedy: &str) -> Blocker {
    d.blocker(BlockerKind::Descriptor, what, remedy)
}
