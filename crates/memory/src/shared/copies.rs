//! Pages that were a file's and were written, in private mappings: the data of programs and libraries, for one.
//!
//! Criu does not restore them lazily, as it does anonymous memory, and they are needed before the tasks run. So they take the
//! way of shared memory: the pages of each process are an object, whose offsets are the addresses. The source finds them in
//! the page table at each look, and sends those whose hash differs; criu is not shown them. Of huge pages it compares only what may
//! have been written since the last look ([`watch`](super::watch)). The destination keeps them in a
//! file, and writes them into the held tasks through `/proc/PID/mem`, which gives the task copies of its own as its own
//! writes would, whatever the mapping's protection is.
//!
//! A page of zeros is a page like any other here: what is not there is the file's. So at the end the file has, behind the
//! last address, the list of the pages that are there: their number of runs, and the runs.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;
use tranship_sys::pagemap::{Copied, Pagemap};
use tranship_sys::threads;
use tranship_types::{AddressSpaceId, PageRange, SharedKind, SharedObject};
use tranship_wire::USER_ADDRESS_END;

use super::object::Object;
use super::source::{Look, SharedError};
use super::watch::{Doubt, View, Watches};
use crate::maps::Mapping;
use crate::page_set::PageSet;
use crate::survey::Space;

/// Bytes that are put in place at a time.
const PIECE: u64 = 256 << 10;
/// So many pieces are too few for another thread.
const FEW: usize = 32;

/// The written pages of one process's private mappings of files, on the source.
#[derive(Debug)]
pub(super) struct Copies {
    pub object: Object,
    pub space: Space,
    /// Addresses in reserved huge pages that have been watched since the last look.
    looked: PageSet,
    /// Addresses whose content was thrown away at any time, perhaps later than that was reported.
    dropped: PageSet,
}

/// What is known of a process's writes to its private memory in reserved huge pages.
pub(super) struct Watching<'a> {
    pub watches: &'a Watches,
    /// The processes that may have the same memory.
    pub pids: &'a [u32],
    /// What the process did since the last look.
    pub doubt: Option<&'a Doubt>,
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
            huge_page: 0,
        };
        let (looked, dropped) = Default::default();
        Ok(Self { object: Object::new(described, 0, memory(&space)?), space, looked, dropped })
    }

    /// What the process is now: another one may have got its pid, or it has executed another program.
    pub fn renew(&mut self, space: Space) -> io::Result<()> {
        (self.object.file, self.space) = (memory(&space)?, space);
        Ok(())
    }

    /// The mappings that can be watched.
    pub fn views(&self) -> impl Iterator<Item = View> {
        let (pid, huge, private) = (self.space.pid, true, true);
        let view = move |mapping: &Mapping| View {
            pid,
            inode: mapping.inode,
            range: mapping.range,
            offset: mapping.offset,
            huge,
            private,
        };
        self.space.huge.iter().map(view)
    }

    /// Finds the pages that there are, and which of them may have changed. `watching`: `None` where writes cannot be watched.
    pub fn look(&mut self, watching: Option<&Watching<'_>>, look: Look) -> Result<(), SharedError> {
        let brought = self.object.brought();
        let mut pages = Pages::default();
        let found = Pagemap::open(self.space.pid).and_then(|mut pagemap| {
            let huge = |range: &&PageRange| !self.space.huge.iter().any(|mapping| mapping.range == **range);
            let mut add = |start, end| pages.add(PageRange { start, end }, true);
            self.space.files.iter().filter(huge).try_for_each(|r| pagemap.copied(r.start, r.end, &mut add))?;
            self.look_at_huge(&mut pagemap, watching, &brought, look, &mut pages)
        });
        match found {
            Err(source) if look == Look::Last => Err(self.object.failed(source)),
            // What a process that is ending had is said to be gone.
            _ => {
                self.object.holds(&pages.there, pages.changed, brought, look);
                Ok(())
            }
        }
    }

    /// The same of those in reserved huge pages. What is found as written is protected again before it is read.
    fn look_at_huge(
        &mut self,
        pagemap: &mut Pagemap,
        watching: Option<&Watching<'_>>,
        brought: &PageSet,
        look: Look,
        pages: &mut Pages,
    ) -> io::Result<()> {
        let views: Vec<View> = self.views().collect();
        let Some(Watching { watches, pids, doubt }) = watching.filter(|_| !views.is_empty()) else {
            let mut add = |start, end| pages.add(PageRange { start, end }, true);
            return views.iter().try_for_each(|view| pagemap.copied(view.range.start, view.range.end, &mut add));
        };
        let pid = self.space.pid;
        let is_certain = doubt.is_none_or(|doubt| doubt.dropped().is_some());
        for run in doubt.and_then(Doubt::dropped).into_iter().flat_map(PageSet::all) {
            self.dropped.insert(run);
        }
        if look == Look::Round {
            let new: Vec<View> = views.iter().filter(|view| !watches.is_watched(view)).copied().collect();
            if !new.is_empty() {
                watches.register(pid, pids, &new);
            }
        }
        let looked = std::mem::take(&mut self.looked);
        for view in &views {
            let PageRange { start, end } = view.range;
            if !watches.is_watched(view) {
                pagemap.copied(start, end, |start, end| pages.add(PageRange { start, end }, true))?;
                continue;
            }
            let is_known = is_certain && looked.within(view.range) == [view.range];
            if !is_known && look == Look::Round {
                watches.arm(pid, &[view.range]);
            }
            let mut written = Vec::new();
            pagemap.copied_huge(start, end, |start, end, copied| {
                let run = PageRange { start, end };
                match copied {
                    Copied::Written => {
                        written.push(run);
                        pages.add(run, true);
                    }
                    Copied::Unwritten => pages.add(run, !is_known),
                    // What is not there, and what was thrown away, has such a mark.
                    Copied::MarkOrUnwritten if self.dropped.within(run).is_empty() => {
                        brought.within(run).into_iter().for_each(|run| pages.add(run, !is_known));
                    }
                    Copied::MarkOrUnwritten => {}
                }
            })?;
            // Zeros that were only read since.
            self.dropped.within(view.range).into_iter().for_each(|run| pages.doubt(run));
            if look == Look::Round {
                watches.arm(pid, &written);
                self.looked.insert(view.range);
            }
        }
        Ok(())
    }
}

/// What a look has found.
#[derive(Debug, Default)]
struct Pages {
    there: PageSet,
    /// Of these.
    changed: PageSet,
}

impl Pages {
    fn add(&mut self, run: PageRange, changed: bool) {
        self.there.insert(run);
        if changed {
            self.changed.insert(run);
        }
    }

    /// Those of a run may have changed.
    fn doubt(&mut self, run: PageRange) {
        self.there.within(run).into_iter().for_each(|run| self.changed.insert(run));
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
    let mut pieces = Vec::new();
    for run in 0..word(USER_ADDRESS_END)? {
        let row = USER_ADDRESS_END + 8 + run * 16;
        let run = PageRange { start: word(row)?, end: word(row + 8)? };
        pieces.extend(run.cut(PIECE));
    }
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(pieces.len().div_ceil(FEW));
    // Parts of neighbours, so that no two work on the same huge page but at their ends.
    threads::in_parts("place", &pieces, workers, |pieces| {
        let mut buffer = vec![0; pieces.iter().map(PageRange::len).max().unwrap_or(0) as usize];
        pieces.iter().try_for_each(|piece| {
            let pages = &mut buffer[..piece.len() as usize];
            file.read_exact_at(pages, piece.start)?;
            let there = [RemoteIoVec { base: piece.start as usize, len: pages.len() }];
            // One copy less, where the task itself may write.
            match process_vm_writev(Pid::from_raw(pid.cast_signed()), &[IoSlice::new(pages)], &there) {
                Ok(written) if written == pages.len() => Ok(()),
                _ => memory.write_all_at(pages, piece.start),
            }
        })
    })?;
    Ok(pieces.iter().map(PageRange::len).sum())
}
