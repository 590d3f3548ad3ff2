//! The content of tmpfs mounts, on the source's side.

use tranship_coordinator::Failure;

use super::{SourceRun, failed};
use crate::tmpfs::Left;

impl SourceRun {
    /// Copies what the destination does not have yet of the content of tmpfs mounts, while the container runs. Returns how many
    /// bytes that was.
    pub(super) fn send_files(&mut self) -> Result<u64, Failure> {
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let sent = self.files.as_mut().map_or(0, |files| files.pass(&pids));
        self.report.change(|r| r.progress.moved_bytes += sent);
        Ok(sent)
    }

    /// Takes note of how the last changes were sent.
    pub(super) fn files_left(&mut self, left: Option<Left>) {
        if let Some(left) = left {
            self.wire_bytes += left.wire_bytes;
            self.timeline.note("tmpfs: last changes", left.start_ns, left.end_ns);
            self.report.change(|r| r.ways.push(left.way));
        }
    }
}
