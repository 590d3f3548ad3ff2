//! Semaphore operations that the kernel undoes when their process ends (`SEM_UNDO`): CRIU drops them without a word.

use std::io;
use std::sync::OnceLock;

use tranship_sys::semaphores::UndoReader;
use tranship_types::{Blocker, BlockerKind};

use crate::preflight::unread;

/// The reader, if this kernel lets the agent have one. It is made once.
fn reader() -> Option<&'static UndoReader> {
    static READER: OnceLock<Option<UndoReader>> = OnceLock::new();
    READER.get_or_init(|| UndoReader::load().ok()).as_ref()
}

/// Those of a container's processes that have such operations.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn processes(pids: &[u32]) -> io::Result<Vec<u32>> {
    reader().map_or(Ok(Vec::new()), |reader| reader.adjusted(pids))
}

/// What stands in the way because of them; `name` is that of the process.
pub(crate) fn blocker(pid: u32, name: &str) -> Blocker {
    let cause =
        format!("{name} has semaphore operations that are undone when it ends (SEM_UNDO), which CRIU does not carry");
    let remedy = "let the program release its semaphores, and try again";
    Blocker::new(BlockerKind::Process, cause, remedy).at(pid, None).allowable("semaphore-undo")
}

/// The same for all processes of a container that is frozen. Takes one look at a list where there are no semaphores.
pub fn blockers(pids: &[u32]) -> Vec<Blocker> {
    let named = |pid: u32| {
        let name = tranship_sys::process::name(pid).unwrap_or_default();
        blocker(pid, &format!("{name} (pid {pid})"))
    };
    match processes(pids) {
        Ok(found) => found.into_iter().map(named).collect(),
        Err(error) => pids.first().map(|pid| unread(*pid, &format!("process {pid}"), &error)).into_iter().collect(),
    }
}
