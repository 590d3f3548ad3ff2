//! Reads what no file in /proc and no system call shows of open files.

use std::collections::HashMap;
use std::sync::OnceLock;

use tranship_sys::hidden_files::{HiddenFile, HiddenFiles};

use super::Look;
use super::files::Descriptor;

/// The files of the processes that were asked for.
#[derive(Default)]
pub(super) struct Known(HashMap<u32, HashMap<i32, HiddenFile>>);

impl Known {
    /// What is hidden of a descriptor: nothing where this kernel does not let the agent read it.
    pub(super) fn of(&mut self, d: &Descriptor<'_>, look: &mut Look) -> HiddenFile {
        static READER: OnceLock<Option<HiddenFiles>> = OnceLock::new();
        let Some(reader) = READER.get_or_init(|| HiddenFiles::load().ok()) else { return HiddenFile::default() };
        let files = self.0.entry(d.task.pid).or_insert_with(|| {
            let all = reader.read(d.task.pid).unwrap_or_else(|error| {
                look.block_unread(d.task, &error);
                Vec::new()
            });
            all.into_iter().map(|file| (file.descriptor, file)).collect()
        });
        files.get(&d.fd).copied().unwrap_or_default()
    }
}
