//! What is to be moved: the address spaces of a container and the ranges in them that are ours.

use std::io;

use tranship_sys::process;
use tranship_types::{AddressSpaceId, PageRange};

use crate::hugetlb;
use crate::maps::{self, Mapping};

/// One address space of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// What both nodes call it.
    pub id: AddressSpaceId,
    /// Pid of its process on this node.
    pub pid: u32,
    /// The private anonymous mappings that are ours, in order.
    pub ranges: Vec<PageRange>,
    /// Those of `ranges` in which code may run. CRIU borrows executable memory for a moment while it dumps, so these
    /// must be read before it begins.
    pub executable: Vec<PageRange>,
    /// The private mappings of files, and those in reserved huge pages, of which pages may have been written
    /// ([`crate::shared::copies`]).
    pub files: Vec<PageRange>,
    /// Those of `files` that are in reserved huge pages.
    pub huge: Vec<Mapping>,
}

impl Space {
    /// Those of `ranges` that lie beside another one: perhaps parts of one mapping, which have other protections at the
    /// moment.
    pub fn adjoining(&self) -> Vec<PageRange> {
        let touches = |(at, range): &(usize, &PageRange)| {
            let before = at.checked_sub(1).and_then(|before| self.ranges.get(before));
            let after = self.ranges.get(at + 1);
            before.is_some_and(|before| before.end == range.start)
                || after.is_some_and(|after| range.end == after.start)
        };
        self.ranges.iter().enumerate().filter(touches).map(|(_, range)| *range).collect()
    }
}

/// A process that cannot be looked at.
#[derive(Debug, thiserror::Error)]
#[error("the memory map of process {pid} cannot be read: {source}")]
pub struct SurveyError {
    /// Pid on this node.
    pub pid: u32,
    /// Why.
    pub source: io::Error,
}

pub(crate) fn status(pid: u32) -> Result<String, SurveyError> {
    process::text(format!("/proc/{pid}/status")).map_err(|source| SurveyError { pid, source })
}

/// A field of `/proc/PID/status`.
pub(crate) fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or_default().trim()
}

/// What both nodes call a process's memory. The innermost pid is the one in the container's own namespace: CRIU carries no
/// nested pid namespaces.
fn id_in(status: &str, pid: u32) -> Result<AddressSpaceId, SurveyError> {
    let inner = field(status, "NSpid").split_ascii_whitespace().last().and_then(|p| p.parse().ok());
    let inner = inner.ok_or_else(|| SurveyError { pid, source: io::Error::other("its status names no pid") })?;
    Ok(AddressSpaceId(inner))
}

/// What both nodes call the memory of a process with this pid on this node.
pub fn id_of(pid: u32) -> Result<AddressSpaceId, SurveyError> {
    id_in(&status(pid)?, pid)
}

/// Surveys the processes of a container, given by their pids on this node. Zombies have no memory and are left out; so are those that still have their
/// parent's, as one has that was vforked.
pub fn survey(pids: &[u32]) -> Result<Vec<Space>, SurveyError> {
    let mut spaces = Vec::with_capacity(pids.len());
    for &pid in pids {
        let failed = |source| SurveyError { pid, source };
        let status = status(pid)?;
        if field(&status, "PPid").parse().is_ok_and(|parent| process::has_memory_of(pid, parent)) {
            continue;
        }
        let mut maps = process::mappings(pid).map_err(failed)?.peekable();
        if maps.peek().is_none() {
            continue;
        }
        let id = id_in(&status, pid)?;
        // smaps walks every page; it is worth reading only where something is locked.
        let locked = if field(&status, "VmLck").starts_with("0 ") {
            Vec::new()
        } else {
            maps::locked_starts(&process::text(format!("/proc/{pid}/smaps")).map_err(failed)?)
        };
        let (ranges, executable, files, huge) = Default::default();
        let mut space = Space { id, pid, ranges, executable, files, huge };
        for line in maps {
            let mapping = Mapping::parse(&line.map_err(failed)?);
            let Some(mapping) = mapping.filter(|mapping| !locked.contains(&mapping.range.start)) else { continue };
            if mapping.is_private_anonymous() {
                if mapping.executable {
                    space.executable.push(mapping.range);
                }
                space.ranges.push(mapping.range);
            } else if mapping.is_private_file() {
                let huge = hugetlb::devices().contains_key(&mapping.device);
                // Nobody can write to huge pages in the place of a process that may not.
                if huge && !mapping.writable {
                    continue;
                }
                space.files.push(mapping.range);
                space.huge.extend(huge.then_some(mapping));
            }
        }
        spaces.push(space);
    }
    Ok(spaces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_heap_and_a_stack_that_are_ours() {
        let spaces = survey(&[std::process::id()]).unwrap();
        let local = 1u8;
        let address = &raw const local as u64;
        assert!(spaces[0].ranges.iter().any(|r| r.contains(address)), "the stack");
    }

    #[test]
    fn mappings_that_lie_beside_another_one_are_found() {
        let range = |start: u64, end: u64| PageRange { start: start * 4096, end: end * 4096 };
        let (id, executable, files, huge) = (AddressSpaceId(1), Vec::new(), Vec::new(), Vec::new());
        let ranges = vec![range(1, 2), range(3, 4), range(4, 6), range(6, 7), range(8, 9)];
        let space = Space { id, pid: 1, ranges, executable, files, huge };
        assert_eq!(space.adjoining(), [range(3, 4), range(4, 6), range(6, 7)]);
    }

    #[test]
    fn a_process_that_is_gone_is_named() {
        let error = survey(&[4_000_000]).unwrap_err();
        assert!(error.to_string().contains("4000000"), "{error}");
    }
}
