//! Which processes the descriptors of others refer to.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use tranship_sys::process::{OpenFiles, signal_owner, text};

use super::procfs::FdInfo;

/// Names of what the kernel signals a process for (`F_SETOWN`) begin so.
const STREAMS: [&str; 7] = ["socket:", "pipe:", "anon_inode:", "/dev/pts/", "/dev/ptmx", "/dev/tty", "/dev/console"];

/// Pids that descriptors refer to.
#[derive(Debug, Default)]
pub(super) struct References {
    /// By pidfds, and as receivers of signals (`F_SETOWN`): as this node numbers them.
    node: HashSet<u32>,
    /// By names of files, which may be in a procfs: as the container numbers them.
    container: HashSet<u32>,
}

impl References {
    /// Whether one does to this process, by its pid on this node and in the container.
    pub(super) fn has(&self, pid: u32, inner: u32) -> bool {
        self.node.contains(&pid) || self.container.contains(&inner)
    }

    fn add_name(&mut self, name: &Path) {
        let numbers = name.components().filter_map(|part| part.as_os_str().to_str()?.parse::<u32>().ok());
        self.container.extend(numbers);
    }

    fn add(&mut self, process: u32, files: Option<&OpenFiles>, number: i32) -> Option<()> {
        let name = fs::read_link(format!("/proc/{process}/fd/{number}")).ok()?;
        self.add_name(&name);
        let kind = name.to_str().unwrap_or_default();
        if kind == "anon_inode:[pidfd]" || kind.starts_with("pidfd:") {
            let info = FdInfo::parse(&text(format!("/proc/{process}/fdinfo/{number}")).ok()?);
            self.node.extend(info.number("Pid").and_then(|pid| u32::try_from(pid).ok()));
        }
        // To close a file of a filesystem with a server asks that; and whoever is signalled for a file has it as a stream.
        if STREAMS.iter().any(|stream| kind.starts_with(stream)) {
            self.node.extend(signal_owner(&files?.take(number).ok()?));
        }
        Some(())
    }
}

/// All of these processes.
pub(super) fn of(processes: impl Iterator<Item = u32>) -> References {
    let mut found = References::default();
    for process in processes {
        for link in ["cwd", "root"] {
            let name = fs::read_link(format!("/proc/{process}/{link}"));
            name.iter().for_each(|name| found.add_name(name));
        }
        let files = OpenFiles::of(process).ok();
        for entry in fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten() {
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            number.and_then(|number| found.add(process, files.as_ref(), number));
        }
    }
    found
}
