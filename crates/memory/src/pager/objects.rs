//! Shared memory that is kept for criu: the pager lives on when the agent dies, so it is who has the files.

use std::fmt::Write;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use nix::sys::stat::fstat;
use tranship_types::{SharedKind, SharedObject};

/// The files, and the table in which criu finds them.
#[derive(Debug, Default)]
pub(super) struct Objects {
    table: PathBuf,
    kept: Vec<(SharedObject, OwnedFd)>,
    /// The table does not name all of them, or not those of this process.
    pub outdated: bool,
}

impl Objects {
    /// None yet; the table will be `table`.
    pub fn new(table: PathBuf) -> Self {
        Self { table, kept: Vec::new(), outdated: false }
    }

    /// Keeps one more, which [`Self::tell`] writes to the table.
    pub fn keep(&mut self, object: SharedObject, file: OwnedFd) {
        self.kept.push((object, file));
        self.outdated = true;
    }

    /// Writes the table anew: this process has the files. What fails is to be tried again.
    pub fn tell(&mut self) -> io::Result<()> {
        if self.kept.is_empty() {
            self.outdated = false;
            return Ok(());
        }
        let mut text = String::new();
        for (object, file) in &self.kept {
            let kind = match object.kind {
                SharedKind::File => "file",
                SharedKind::Segment => "segment",
                SharedKind::Pages => "pages",
            };
            let (key, pid, fd) = (object.key, std::process::id(), file.as_raw_fd());
            writeln!(text, "{key} {kind} /proc/{pid}/fd/{fd}").expect("a string takes anything");
        }
        let nascent = self.table.with_extension("nascent");
        std::fs::write(&nascent, text)?;
        std::fs::rename(nascent, &self.table)?;
        self.outdated = false;
        Ok(())
    }

    /// Bytes of memory that they occupy.
    pub fn resident(&self) -> u64 {
        self.kept.iter().filter_map(|(_, file)| fstat(file).ok()).map(|s| s.st_blocks.cast_unsigned() * 512).sum()
    }
}
