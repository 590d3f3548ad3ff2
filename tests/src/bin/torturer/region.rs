//! One mapping, and the model of what must be in it.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::chance::{Chance, mix};
use crate::page::{self, Stamp};
use crate::raw::{Area, HUGE, PAGE, mapping_of};

/// What kind of memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Private anonymous memory in pages of 4 KiB
    Anonymous,
    /// Private anonymous memory where the kernel may use huge pages
    Huge,
    /// Anonymous memory that children share
    SharedAnonymous,
    /// A memfd, mapped shared
    Memfd,
    /// A SysV segment
    Sysv,
    /// A private mapping of a file, of which pages are changed
    PrivateFile,
    /// A shared mapping of a file on a tmpfs
    SharedFile,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Anonymous,
        Self::Huge,
        Self::SharedAnonymous,
        Self::Memfd,
        Self::Sysv,
        Self::PrivateFile,
        Self::SharedFile,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Huge => "huge",
            Self::SharedAnonymous => "shared-anonymous",
            Self::Memfd => "memfd",
            Self::Sysv => "sysv",
            Self::PrivateFile => "private-file",
            Self::SharedFile => "shared-file",
        }
    }

    /// Whether a forked child has a copy of its own, of which nothing lies in a file.
    pub fn is_copied(self) -> bool {
        matches!(self, Self::Anonymous | Self::Huge)
    }

    /// Whether forked children see what their parent writes.
    pub fn is_shared(self) -> bool {
        !self.is_copied() && self != Self::PrivateFile
    }
}

/// What must be in one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Cell {
    /// 0: zeros.
    version: u32,
    pokes: u32,
    /// The kernel was told that it may throw the page away (MADV_FREE): until it is written, it may also be zeros.
    loose: bool,
}

/// Pages that may not be written, or not even read.
#[derive(Debug, Clone, Copy)]
struct Guard {
    first: usize,
    pages: usize,
    readable: bool,
}

/// What is behind a mapping and must go with it.
#[derive(Debug)]
enum Backing {
    Nothing,
    File(File, Option<PathBuf>),
    Segment(i32),
}

/// What was done to a region, for whoever looks for the cause of a mismatch.
#[derive(Debug, Clone, Copy)]
struct Deed {
    what: &'static str,
    first: usize,
    pages: usize,
}

/// A file's content before anybody writes to its private mapping.
const FILE_VERSION: u32 = 1;
const REMEMBERED: usize = 10;

/// A mapping and what must be in it. Dropping it leaves the memory as it is; [`Region::discard`] takes it away.
#[derive(Debug)]
pub struct Region {
    pub kind: Kind,
    id: u32,
    /// The number of its first page: not 0 behind a cut.
    first: usize,
    area: Area,
    cells: Vec<Cell>,
    /// Of the cells: they are memory that moves, too.
    sum: u64,
    versions: u32,
    backing: Backing,
    guard: Option<Guard>,
    pinned: bool,
    /// It is one piece of a region that was cut.
    cut: bool,
    deeds: [Deed; REMEMBERED],
    done: usize,
}

impl Region {
    /// A new region of zeros, or of a file's content. `dir` is for files.
    pub fn new(kind: Kind, id: u32, pages: usize, dir: &Path) -> Result<Self> {
        let (mut cells, mut versions) = (vec![Cell::default(); pages], 0);
        let (area, backing) = match kind {
            Kind::Anonymous => (Area::private(pages)?, Backing::Nothing),
            Kind::Huge => (Area::huge(pages.next_multiple_of(HUGE / PAGE))?, Backing::Nothing),
            Kind::SharedAnonymous => (Area::shared(pages)?, Backing::Nothing),
            Kind::Memfd => {
                let file = File::from(memfd_create("torture", MFdFlags::MFD_CLOEXEC)?);
                file.set_len((pages * PAGE) as u64)?;
                (Area::of_file(file.as_fd(), pages, true)?, Backing::File(file, None))
            }
            Kind::Sysv => {
                let (area, segment) = Area::of_segment(pages)?;
                (area, Backing::Segment(segment))
            }
            Kind::PrivateFile | Kind::SharedFile => {
                let path = dir.join(format!("torture-{}-{id:x}", std::process::id()));
                let mut options = File::options();
                let file = options.read(true).write(true).create(true).truncate(true).open(&path);
                let file = file.with_context(|| format!("cannot make {}", path.display()))?;
                file.set_len((pages * PAGE) as u64)?;
                if kind == Kind::PrivateFile {
                    for page in 0..pages {
                        let stamp = Stamp { region: id, page: page as u32, version: FILE_VERSION };
                        file.write_all_at(&stamp.bytes(), (page * PAGE) as u64)?;
                    }
                    versions = FILE_VERSION;
                    cells.fill(Cell { version: FILE_VERSION, ..Cell::default() });
                }
                (Area::of_file(file.as_fd(), pages, kind == Kind::SharedFile)?, Backing::File(file, Some(path)))
            }
        };
        cells.resize(area.pages(), Cell::default());
        let nothing = Deed { what: "", first: 0, pages: 0 };
        let mut region = Self {
            kind,
            id,
            first: 0,
            area,
            cells,
            sum: 0,
            versions,
            backing,
            guard: None,
            pinned: false,
            cut: false,
            deeds: [nothing; REMEMBERED],
            done: 0,
        };
        region.sum = region.summed();
        Ok(region)
    }

    pub fn pages(&self) -> usize {
        self.cells.len()
    }

    fn note(&mut self, what: &'static str, first: usize, pages: usize) {
        self.deeds[self.done % REMEMBERED] = Deed { what, first, pages };
        self.done += 1;
    }

    fn weight(&self, index: usize, cell: Cell) -> u64 {
        let page = (self.first + index) as u64;
        mix(mix(page << 33 | u64::from(cell.loose)) ^ (u64::from(cell.version) << 32 | u64::from(cell.pokes)))
    }

    fn set(&mut self, index: usize, cell: Cell) {
        self.sum ^= self.weight(index, self.cells[index]) ^ self.weight(index, cell);
        self.cells[index] = cell;
    }

    fn summed(&self) -> u64 {
        self.cells.iter().enumerate().fold(0, |sum, (index, cell)| sum ^ self.weight(index, *cell))
    }

    fn stamp(&self, index: usize) -> Stamp {
        Stamp { region: self.id, page: (self.first + index) as u32, version: self.cells[index].version }
    }

    /// Whether the bookkeeping is in order, and as long as the mapping.
    pub fn check_books(&self) -> Result<()> {
        ensure!(
            self.summed() == self.sum && self.area.pages() == self.cells.len(),
            "the bookkeeping of {self} has changed by itself"
        );
        Ok(())
    }

    /// Whether these pages are what they must be.
    pub fn check(&mut self, first: usize, pages: usize) -> Result<()> {
        for index in first..first + pages {
            let (cell, words) = (self.cells[index], self.area.words(index));
            let right = match cell.version {
                0 => page::is_zero(words),
                _ => self.stamp(index).compare(u64::from(cell.pokes), words).is_none(),
            };
            if right {
                continue;
            }
            if cell.loose && page::is_zero(words) {
                self.set(index, Cell::default());
                continue;
            }
            bail!(self.mismatch(index));
        }
        Ok(())
    }

    fn mismatch(&self, index: usize) -> String {
        let (cell, words, address) = (self.cells[index], self.area.words(index), self.area.address(index));
        let found = page::describe(words);
        let expected = match cell.version {
            0 => "zeros".to_owned(),
            _ => format!("{} with {} pokes", self.stamp(index), cell.pokes),
        };
        let wrong = |index: &usize| {
            let (cell, words) = (self.cells[*index], self.area.words(*index));
            let readable = self.guard.is_none_or(|g| g.readable || !(g.first..g.first + g.pages).contains(index));
            readable
                && !(cell.loose && page::is_zero(words))
                && match cell.version {
                    0 => !page::is_zero(words),
                    _ => self.stamp(*index).compare(u64::from(cell.pokes), words).is_some(),
                }
        };
        let wrong: Vec<usize> = (0..self.pages()).filter(wrong).collect();
        let around = (wrong.first().copied().unwrap_or(index), wrong.last().copied().unwrap_or(index));
        let deeds = (0..REMEMBERED).map(|n| self.deeds[(self.done + n) % REMEMBERED]).filter(|d| !d.what.is_empty());
        let deeds: Vec<_> = deeds.map(|d| format!("{} {}+{}", d.what, d.first, d.pages)).collect();
        let books = self.check_books().err().map_or("in order".to_owned(), |error| error.to_string());
        format!(
            "{self}: page {index} at {address:#x} must be {expected}{} and is {found}; {} pages are wrong, from {} to {}; \
             bookkeeping: {books}; last deeds: {}; mapping: {}",
            if cell.loose { " or zeros" } else { "" },
            wrong.len(),
            around.0,
            around.1,
            deeds.join(", "),
            mapping_of(address)
        )
    }

    /// Whether a run touches pages that may not be written (or read); they are made accessible now and then.
    pub fn in_the_way(&self, first: usize, pages: usize, writing: bool) -> bool {
        self.guard.is_some_and(|g| (writing || !g.readable) && first < g.first + g.pages && g.first < first + pages)
    }

    /// Makes all pages accessible, and those that were kept in memory free to go.
    pub fn open(&mut self) -> Result<()> {
        if let Some(Guard { first, pages, .. }) = self.guard.take() {
            self.note("accessible", first, pages);
            self.area.protect(first, pages, libc::PROT_READ | libc::PROT_WRITE)?;
        }
        if std::mem::take(&mut self.pinned) {
            self.note("unlock", 0, self.pages());
            self.area.lock(0, self.pages(), false);
        }
        Ok(())
    }

    /// Writes new versions.
    pub fn write(&mut self, first: usize, pages: usize) {
        self.renew(first, pages, true);
    }

    fn renew(&mut self, first: usize, pages: usize, touch: bool) {
        self.versions += 1;
        self.note("write", first, pages);
        for index in first..first + pages {
            self.set(index, Cell { version: self.versions, pokes: 0, loose: false });
            if touch {
                self.stamp(index).write(self.area.words(index));
            }
        }
    }

    /// Changes one word of a page. What is zeros, or might be, is written as a whole.
    pub fn poke(&mut self, index: usize) {
        self.prod(index, true);
    }

    fn prod(&mut self, index: usize, touch: bool) {
        let cell = self.cells[index];
        if cell.version == 0 || cell.loose {
            return self.renew(index, 1, touch);
        }
        let cell = Cell { pokes: cell.pokes + 1, ..cell };
        self.set(index, cell);
        if touch {
            page::poke(self.area.words(index), u64::from(cell.pokes));
        }
    }

    /// What somebody else does to shared memory and this process repeats in its books (`touch` is false): the same for the
    /// same random numbers.
    pub fn scribble(&mut self, chance: &mut Chance, touch: bool) {
        let first = chance.below(self.pages());
        if chance.once_in(3) {
            let pages = chance.between(1, 8.min(self.pages() - first));
            self.renew(first, pages, touch);
        } else {
            self.prod(first, touch);
        }
    }

    /// MADV_DONTNEED: private pages are zeros (or the file's) afterwards, shared ones stay.
    pub fn forget(&mut self, first: usize, pages: usize) -> Result<()> {
        self.note("dontneed", first, pages);
        self.area.advise(first, pages, libc::MADV_DONTNEED)?;
        let version = if self.kind == Kind::PrivateFile { FILE_VERSION } else { 0 };
        if !self.kind.is_shared() {
            (first..first + pages).for_each(|index| self.set(index, Cell { version, ..Cell::default() }));
        }
        Ok(())
    }

    /// MADV_FREE.
    pub fn free(&mut self, first: usize, pages: usize) -> Result<()> {
        self.note("free", first, pages);
        self.area.advise(first, pages, libc::MADV_FREE)?;
        for index in first..first + pages {
            let cell = self.cells[index];
            self.set(index, Cell { loose: cell.version != 0, ..cell });
        }
        Ok(())
    }

    /// MADV_REMOVE: a hole in what is shared.
    pub fn punch(&mut self, first: usize, pages: usize) -> Result<()> {
        self.note("remove", first, pages);
        self.area.advise(first, pages, libc::MADV_REMOVE)?;
        (first..first + pages).for_each(|index| self.set(index, Cell::default()));
        Ok(())
    }

    /// Moves it to another address.
    pub fn move_away(&mut self) -> Result<()> {
        self.note("move", 0, self.pages());
        match self.backing {
            Backing::Segment(segment) => self.area.attach_again(segment),
            _ => self.area.move_away().map(drop),
        }
    }

    /// Makes it longer or shorter; new pages are zeros. `false`: this kind cannot, or not now.
    pub fn resize(&mut self, pages: usize) -> Result<bool> {
        let (old, grows) = (self.pages(), pages > self.pages());
        let can_grow = !self.cut && matches!(self.kind, Kind::Anonymous | Kind::Huge | Kind::Memfd | Kind::SharedFile);
        if matches!(self.backing, Backing::Segment(_)) || (grows && !can_grow) {
            return Ok(false);
        }
        self.note("resize", old, pages);
        let extent = |backing: &Backing| match backing {
            Backing::File(file, _) => file.set_len((pages * PAGE) as u64),
            _ => Ok(()),
        };
        if grows {
            extent(&self.backing)?;
        }
        if !self.area.resize(pages)? {
            return Ok(false);
        }
        if !grows {
            extent(&self.backing)?;
        }
        self.cells.resize(pages, Cell::default());
        self.sum = self.summed();
        Ok(true)
    }

    /// Unmaps pages in the middle; what is behind them is a region of its own.
    pub fn cut(&mut self, first: usize, pages: usize) -> Result<Self> {
        self.note("cut", first, pages);
        let mut hole = self.area.split(first);
        let rest = hole.split(pages);
        hole.unmap()?;
        let behind = Self {
            first: self.first + first + pages,
            area: rest,
            cells: self.cells.split_off(first + pages),
            cut: true,
            backing: Backing::Nothing,
            guard: None,
            ..*self
        };
        self.cells.truncate(first);
        (self.cut, self.sum) = (true, self.summed());
        Ok(Self { sum: behind.summed(), ..behind })
    }

    /// Makes pages read-only or inaccessible.
    pub fn protect(&mut self, first: usize, pages: usize, readable: bool) -> Result<()> {
        self.note(if readable { "read-only" } else { "inaccessible" }, first, pages);
        self.area.protect(first, pages, if readable { libc::PROT_READ } else { libc::PROT_NONE })?;
        self.guard = Some(Guard { first, pages, readable });
        Ok(())
    }

    /// Keeps pages in memory.
    pub fn pin(&mut self, first: usize, pages: usize) {
        self.note("lock", first, pages);
        self.area.lock(first, pages, true);
        self.pinned = true;
    }

    /// Takes the region away.
    pub fn discard(mut self) -> Result<()> {
        self.open()?;
        match self.backing {
            Backing::Segment(segment) => self.area.end_segment(segment),
            Backing::File(_, path) => {
                self.area.unmap()?;
                path.map_or(Ok(()), |path| std::fs::remove_file(path).context("cannot remove a file"))
            }
            Backing::Nothing => self.area.unmap(),
        }
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} region {:#x} of {} pages", self.kind.name(), self.id, self.pages())?;
        if self.first > 0 { write!(f, " (from page {} on)", self.first) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
