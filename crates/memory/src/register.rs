//! Registers mappings of a running process with its userfaultfd, each as a whole.
//!
//! UFFDIO_REGISTER takes a range of addresses and splits a mapping that is only partly inside. mremap(2) fails with EFAULT on a
//! range that two mappings cover, so a split that the watch has made breaks a program that did nothing wrong. The list of
//! mappings is old as soon as it has been read. So it is read, and the ranges in it are registered, while no thread that has the
//! address space can run (about 0.3 ms, and 25 µs for each further thread); docs/decisions/watched-mappings-stay-whole.md has the details.

use std::io;

use tranship_sys::process::{self, has_memory_of};
use tranship_sys::standstill;
use tranship_sys::writes::WriteWatch;

use crate::maps::Mapping;
use crate::tracker::STANDSTILL;

/// Registers the mappings of a process that are `wanted`, and returns those that are registered now; none if the process cannot
/// be stopped in time: what is not registered counts as written. `pids`: the processes that may have the same memory.
///
/// # Errors
/// ESRCH: the process has ended, or executed another program.
pub(crate) fn whole_mappings(
    watch: &WriteWatch,
    pid: u32,
    pids: &[u32],
    wanted: impl Fn(&Mapping) -> bool + Send,
) -> io::Result<Vec<Mapping>> {
    let others = pids.iter().copied().filter(|other| *other != pid && has_memory_of(*other, pid));
    let together: Vec<u32> = others.chain([pid]).collect();
    standstill::during(&together, STANDSTILL, move |stopped| {
        if let Err(error) = stopped {
            tracing::debug!(pid, %error, "its new mappings are not watched");
            return Ok(Vec::new());
        }
        let mut registered = Vec::new();
        for line in process::mappings(pid)? {
            let mapping = Mapping::parse(&line?).filter(|mapping| wanted(mapping));
            if let Some(mapping) = mapping
                && watch.watch(mapping.range.start, mapping.range.end)?
            {
                registered.push(mapping);
            }
        }
        Ok(registered)
    })
}
