//! Pages that were a file's and were written, in private mappings: the data of programs and libraries, for one.
//!
//! Criu does not restore them lazily, as it does anonymous memory, and they are needed before the tasks run. So they take the
//! way of shared memory: the pages of each process are an object, whose offsets are the addresses. The source finds them in
//! the page table at each look, and sends those whose hash differs; criu is not shown them. The destination keeps them in a
//! file, and writes them into the held tasks through `/proc/PID/mem`, which gives the task copies of its own as its own
//! writes would, whatever the mapping's protection is.
//!
//! A page of zeros is a page like any other here: what is not there is the file's. So at the end the file has, behind the
//! last address, the list of the pages that are there: their number of runs, and the runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use tranship_sys::pagemap::Pagemap;
use tranship_types::{AddressSpaceId, PageRange, SharedKind, SharedObject};
use tranship_wire::USER_ADDRESS_END;

use super::object::Object;
use super::source::{Look, SharedError};
use crate::page_set::PageSet;
use crate::send::CHUNK;
use crate::survey::Space;

/// The written pages of one process's private mappings of files, on the source.
#[derive(Debug)]
pub(super) struct Copies {
    pub object: Object,
    pub space: Space,
}

impl Copies {
    /// Those of a process, under the name `id`.
    pub fn of(space: Space, id: AddressSpaceId) -> io::Result<Self> {
        let described = SharedObject {
            space: id,
            key: space.id.0,
            kind: SharedKind::Pages,
            name: format!("pages of process {}", space.id.0),
            size: USER_ADDRESS_END,
            sealable: false,
        };
        Ok(Self { object: Object::new(described, memory(&space)?), space })
    }

    /// What the process is now: another one may have got its pid, or it has executed another program.
    pub fn renew(&mut self, space: Space) -> io::Result<()> {
        (self.object.file, self.space) = (memory(&space)?, space);
        Ok(())
    }

    /// Finds the pages that there are.
    pub fn look(&mut self, look: Look) -> Result<(), SharedError> {
        let mut there = PageSet::default();
        let found = Pagemap::open(self.space.pid).and_then(|mut pagemap| {
            let mut add = |start, end| there.insert(PageRange { start, end });
            self.space.files.iter().try_for_each(|range| pagemap.copied(range.start, range.end, &mut add))
        });
        match found {
            Err(source) if look == Look::Last => Err(self.object.failed(source)),
            // What a process that is ending had is said to be gone.
            _ => {
                self.object.holds(there, look);
                Ok(())
            }
        }
    }
}

fn memory(space: &Space) -> io::Result<File> {
    File::open(format!("/proc/{}/mem", space.pid))
}

/// Writes the list of pages behind the last address.
pub(super) fn list(file: &File, pages: &PageSet) -> io::Result<()> {
    let runs = pages.all();
    let words = [runs.len() as u64].into_iter().chain(runs.iter().flat_map(|run| [run.start, run.end]));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    file.write_all_at(&bytes, USER_ADDRESS_END)
}

/// Puts all pages of an object into a task that stands still, where they belong. Returns how many bytes.
///
/// # Errors
/// The task has no such mapping; or the kernel allows nobody to write to other tasks' memory.
pub fn place(file: &File, pid: u32) -> io::Result<u64> {
    // One that is gone at the end has no length.
    if file.metadata()?.len() <= USER_ADDRESS_END {
        return Ok(0);
    }
    let word = |at: u64| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).map(|()| u64::from_le_bytes(word))
    };
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem"))?;
    let (mut buffer, mut placed) = (vec![0; CHUNK as usize], 0);
    for run in 0..word(USER_ADDRESS_END)? {
        let row = USER_ADDRESS_END + 8 + run * 16;
        let (mut at, end) = (word(row)?, word(row + 8)?);
        while at < end {
            let pages = &mut buffer[..CHUNK.min(end - at) as usize];
            file.read_exact_at(pages, at)?;
            memory.write_all_at(pages, at)?;
            at += pages.len() as u64;
            placed += pages.len() as u64;
        }
    }
    Ok(placed)
}
