//! The mappings of one process, and what must be in them.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::chance::Chance;
use crate::raw::{self, PAGE, Source};

/// Pages of an object, and of the largest mapping.
pub const PAGES: usize = 512;
/// Deeds that a complaint tells of.
const HISTORY: usize = 12;

/// Memory of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Private and anonymous.
    Private,
    /// Private copies of a file's pages.
    PrivateFile,
    /// Shared and anonymous.
    Shared,
    /// A memfd that is open.
    Memfd,
    /// A memfd that is open nowhere.
    MemfdClosed,
    /// A file on a tmpfs, mapped shared.
    File,
    /// A file on a disk, mapped shared.
    DiskFile,
    /// A System V segment.
    Segment,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::Private,
        Self::PrivateFile,
        Self::Shared,
        Self::Memfd,
        Self::MemfdClosed,
        Self::File,
        Self::DiskFile,
        Self::Segment,
    ];

    /// As it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::PrivateFile => "private-file",
            Self::Shared => "shared",
            Self::Memfd => "memfd",
            Self::MemfdClosed => "memfd-closed",
            Self::File => "file",
            Self::DiskFile => "disk-file",
            Self::Segment => "segment",
        }
    }

    /// Whether what is written stays in one mapping.
    pub fn is_private(self) -> bool {
        matches!(self, Self::Private | Self::PrivateFile)
    }
}

/// What a file has at first at this page; never the value that anybody writes.
pub fn mark(page: usize) -> u64 {
    1 << 63 | page as u64
}

/// A mapping, or a part of one that is changed by itself.
#[derive(Debug)]
pub struct Window {
    pub at: usize,
    /// The first page's number in the object.
    pub first: usize,
    pub pages: usize,
    /// Of private memory: what must be there.
    book: Vec<u64>,
}

impl Window {
    pub fn address(&self, page: usize) -> usize {
        self.at + page * PAGE
    }
}

/// All of it.
pub struct World {
    pub kind: Kind,
    pub chance: Chance,
    /// The first one begins with the object's first page.
    pub windows: Vec<Window>,
    /// Open file, of the kinds that have one.
    pub file: Option<File>,
    /// Id of the segment.
    pub segment: i32,
    /// Of what is shared: what must be there.
    object: Vec<u64>,
    last: u64,
    history: VecDeque<String>,
}

impl World {
    /// Makes the object, and maps all of it.
    pub fn new(kind: Kind, seed: u64, directory: &Path) -> Result<Self> {
        let mut world = Self {
            kind,
            chance: Chance::new(seed),
            windows: Vec::new(),
            file: None,
            segment: -1,
            object: vec![0; PAGES],
            last: 0,
            history: VecDeque::new(),
        };
        match kind {
            Kind::Private | Kind::Shared => {}
            Kind::Memfd | Kind::MemfdClosed => {
                let file = File::from(memfd_create("mapper", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
                file.set_len((PAGES * PAGE) as u64)?;
                if kind == Kind::MemfdClosed {
                    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK))?;
                }
                world.file = Some(file);
            }
            Kind::PrivateFile | Kind::File | Kind::DiskFile => {
                let path = directory.join(format!("mapper-{}", kind.name()));
                let mut options = File::options();
                let file = options.read(true).write(true).create(true).truncate(true).open(&path);
                let file = file.with_context(|| format!("cannot make {}", path.display()))?;
                for page in 0..PAGES {
                    let words = [mark(page).to_ne_bytes(); PAGE / 8].concat();
                    file.write_all_at(&words, (page * PAGE) as u64)?;
                    world.object[page] = mark(page);
                }
                world.file = Some(file);
            }
            Kind::Segment => {
                let (at, id) = raw::segment(PAGES)?;
                world.segment = id;
                world.add(at, 0, PAGES);
            }
        }
        if kind != Kind::Segment {
            let at = raw::map(0, PAGES, world.source(0))?;
            world.add(at, 0, PAGES);
        }
        if matches!(kind, Kind::Shared | Kind::MemfdClosed) {
            world.file = None;
            // It keeps what this process unmaps.
            raw::fork(|| raw::idle())?;
        }
        Ok(world)
    }

    /// What a mapping from this page on is of.
    pub fn source(&self, first: usize) -> Source {
        let fd = self.file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        Source { shared: !self.kind.is_private(), fd, first: if fd < 0 { 0 } else { first } }
    }

    /// What nobody has written to.
    fn fresh(&self, page: usize) -> u64 {
        if self.kind == Kind::PrivateFile { mark(page) } else { 0 }
    }

    /// There is a new mapping.
    pub fn add(&mut self, at: usize, first: usize, pages: usize) {
        let book = if self.kind.is_private() {
            (first..first + pages).map(|page| self.fresh(page)).collect()
        } else {
            Vec::new()
        };
        self.windows.push(Window { at, first, pages, book });
    }

    /// A mapping is larger or smaller now, and perhaps elsewhere.
    pub fn resized(&mut self, number: usize, at: usize, pages: usize) {
        let first = self.windows[number].first;
        let more: Vec<u64> = (self.windows[number].pages..pages).map(|page| self.fresh(first + page)).collect();
        let window = &mut self.windows[number];
        (window.at, window.pages) = (at, pages);
        if self.kind.is_private() {
            window.book.truncate(pages);
            window.book.extend(more);
        }
    }

    /// Pages of a mapping are gone, so that two are left, or one, or none.
    pub fn cut(&mut self, number: usize, from: usize, pages: usize) {
        let Window { at, first, pages: all, book } = self.windows.remove(number);
        let part = |from: usize, to: usize| Window {
            at: at + from * PAGE,
            first: first + from,
            pages: to - from,
            book: book.get(from..to).map(<[u64]>::to_vec).unwrap_or_default(),
        };
        let left = [part(0, from), part(from + pages, all)].into_iter().filter(|window| window.pages > 0);
        for (more, window) in left.enumerate() {
            self.windows.insert(number + more, window);
        }
    }

    /// A run of pages is a mapping by itself from now on: returns its number.
    pub fn split(&mut self, number: usize, from: usize, pages: usize) -> usize {
        for at in [from + pages, from] {
            let window = &mut self.windows[number];
            if at == 0 || at == window.pages {
                continue;
            }
            let book = if window.book.is_empty() { Vec::new() } else { window.book.split_off(at) };
            let rest = Window { at: window.address(at), first: window.first + at, pages: window.pages - at, book };
            window.pages = at;
            self.windows.insert(number + 1, rest);
        }
        number + usize::from(from > 0)
    }

    /// A run of pages of a mapping.
    pub fn draw(&mut self, most: usize) -> (usize, usize, usize) {
        let number = self.chance.below(self.windows.len());
        let pages = self.windows[number].pages;
        let from = self.chance.below(pages);
        let run = self.chance.between(1, most.min(pages - from));
        (number, from, run)
    }

    /// A value that was never written before.
    pub fn value(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// From now on this must be there.
    pub fn expect(&mut self, number: usize, page: usize, value: u64) {
        let window = &mut self.windows[number];
        match self.kind.is_private() {
            true => window.book[page] = value,
            false => self.object[window.first + page] = value,
        }
    }

    /// What was written is not there any more.
    pub fn expect_fresh(&mut self, number: usize, page: usize) {
        let value = self.fresh(self.windows[number].first + page);
        self.expect(number, page, value);
    }

    /// From now on this must be in the object.
    pub fn expect_in_object(&mut self, page: usize, value: u64) {
        self.object[page] = value;
    }

    pub fn write(&mut self, number: usize, page: usize) {
        let value = self.value();
        raw::write(self.windows[number].address(page), value);
        self.expect(number, page, value);
    }

    /// What must be there.
    pub fn expected(&self, number: usize, page: usize) -> u64 {
        let window = &self.windows[number];
        if self.kind.is_private() { window.book[page] } else { self.object[window.first + page] }
    }

    pub fn check(&self, number: usize, from: usize, pages: usize) -> Result<()> {
        (from..from + pages).try_for_each(|page| {
            let (window, right) = (&self.windows[number], self.expected(number, page));
            let found = raw::read(window.address(page));
            let what = || {
                format!(
                    "page {page} of {} at {:#x} (page {} of the object) is {found:x?} instead of {right:x}; before: {}",
                    window.pages,
                    window.at,
                    window.first + page,
                    self.history.iter().map(String::as_str).collect::<Vec<_>>().join("; "),
                )
            };
            ensure!(found == [right, right], "{}", what());
            Ok(())
        })
    }

    /// Checks the object from the beginning to the end, through a mapping that is there for this alone.
    pub fn check_object(&mut self) -> Result<()> {
        for number in 0..self.windows.len() {
            self.check(number, 0, self.windows[number].pages)?;
        }
        if self.kind.is_private() || self.kind == Kind::Segment {
            return Ok(());
        }
        let at = self.done("mremap of no length", raw::remap(self.windows[0].at, 0, PAGES, 0))?;
        self.add(at, 0, PAGES);
        let right = self.check(self.windows.len() - 1, 0, PAGES);
        self.windows.pop();
        self.done("munmap", raw::unmap(at, PAGES))?;
        right
    }

    /// Remembers a deed, for a complaint.
    pub fn note(&mut self, deed: String) {
        self.history.push_back(deed);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// The result of a system call that has to succeed.
    pub fn done<T>(&self, call: &str, result: io::Result<T>) -> Result<T> {
        match result {
            Ok(done) => Ok(done),
            Err(error) => bail!("{call} failed: {error}; before: {:?}", self.history),
        }
    }
}
