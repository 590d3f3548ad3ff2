//! What one process does to its mappings, at random, for ever.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::ftruncate;

use crate::raw::{self, PAGE};
use crate::world::{Kind, PAGES, World};

/// Mappings of one object at a time.
const WINDOWS: usize = 6;
/// Changes of size, one right after the other.
const BURST: usize = 60;
/// linux/mman.h
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

/// What can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Deed {
    Check,
    CheckObject,
    Write,
    Resize,
    Burst,
    Move,
    Copy,
    Map,
    MapOver,
    Unmap,
    Forget,
    Free,
    Remove,
    Advise,
    Guard,
    Protect,
    Break,
    Fork,
    AdviseParent,
    WriteFile,
    Truncate,
    Attach,
}

const DEEDS: [(Deed, usize); 22] = [
    (Deed::Check, 120),
    (Deed::CheckObject, 4),
    (Deed::Write, 160),
    (Deed::Resize, 80),
    (Deed::Burst, 20),
    (Deed::Move, 30),
    (Deed::Copy, 30),
    (Deed::Map, 20),
    (Deed::MapOver, 20),
    (Deed::Unmap, 30),
    (Deed::Forget, 20),
    (Deed::Free, 10),
    (Deed::Remove, 10),
    (Deed::Advise, 20),
    (Deed::Guard, 10),
    (Deed::Protect, 20),
    (Deed::Break, 10),
    (Deed::Fork, 3),
    (Deed::AdviseParent, 1),
    (Deed::WriteFile, 10),
    (Deed::Truncate, 5),
    (Deed::Attach, 30),
];

impl World {
    /// Draws a deed, and does it, if this kind of memory knows it.
    pub fn step(&mut self, without: &[Deed]) -> Result<()> {
        let deed = self.chance.weighted(&DEEDS);
        if without.contains(&deed) {
            return Ok(());
        }
        self.perform(deed).with_context(|| format!("{deed:?}"))
    }

    fn perform(&mut self, deed: Deed) -> Result<()> {
        let segment = self.kind == Kind::Segment;
        match deed {
            Deed::Check => {
                let (number, from, pages) = self.draw(64);
                self.check(number, from, pages)
            }
            Deed::CheckObject => self.check_object(),
            Deed::Write => {
                let (number, from, pages) = self.draw(16);
                (from..from + pages).for_each(|page| self.write(number, page));
                Ok(())
            }
            Deed::Resize if !segment => {
                let number = self.chance.below(self.windows.len());
                let pages = self.chance.between(1, PAGES - self.windows[number].first);
                self.resize(number, pages)
            }
            Deed::Burst if !segment => self.burst(),
            Deed::Move if !segment => self.move_away(),
            Deed::Copy if !segment && !self.kind.is_private() => self.copy(),
            Deed::Map if self.file.is_some() || self.kind == Kind::Private => self.map_more(),
            Deed::MapOver if self.file.is_some() || self.kind == Kind::Private => self.map_over(),
            Deed::Unmap if !segment => self.unmap(),
            Deed::Forget => {
                let (number, from, pages) = self.draw(64);
                self.advise(number, from, pages, "MADV_DONTNEED", libc::MADV_DONTNEED)?;
                if self.kind.is_private() {
                    (from..from + pages).for_each(|page| self.expect_fresh(number, page));
                }
                Ok(())
            }
            Deed::Free if self.kind == Kind::Private => {
                let (number, from, pages) = self.draw(64);
                self.advise(number, from, pages, "MADV_FREE", libc::MADV_FREE)?;
                // Until then nobody knows what is there.
                (from..from + pages).for_each(|page| self.write(number, page));
                Ok(())
            }
            Deed::Remove if !self.kind.is_private() && self.kind != Kind::DiskFile => {
                let (number, from, pages) = self.draw(32);
                self.advise(number, from, pages, "MADV_REMOVE", libc::MADV_REMOVE)?;
                (from..from + pages).for_each(|page| self.expect(number, page, 0));
                Ok(())
            }
            Deed::Advise => {
                let (number, from, pages) = self.draw(PAGES);
                let advices = [
                    ("MADV_PAGEOUT", libc::MADV_PAGEOUT),
                    ("MADV_COLD", libc::MADV_COLD),
                    ("MADV_WILLNEED", libc::MADV_WILLNEED),
                ];
                let (call, advice) = advices[self.chance.below(advices.len())];
                self.advise(number, from, pages, call, advice)?;
                // There may be no huge page to be had for it, or it may be too small for one.
                let _ = raw::advise(self.windows[number].address(from), pages, libc::MADV_COLLAPSE);
                Ok(())
            }
            Deed::Guard if self.kind == Kind::Private => self.guard(),
            Deed::Protect => {
                let (mut number, mut from, mut pages) = self.draw(64);
                // A private mapping that is frozen just now comes back in pieces, which the kernel joins never again.
                if self.kind.is_private() && self.windows.len() < 2 * WINDOWS {
                    (number, from) = (self.split(number, from, pages), 0);
                } else if self.kind.is_private() {
                    (from, pages) = (0, self.windows[number].pages);
                }
                let at = self.windows[number].address(from);
                self.note(format!("protect {at:#x}+{pages}"));
                self.done("mprotect", raw::protect(at, pages, false))?;
                self.check(number, from, pages)?;
                self.done("mprotect", raw::protect(at, pages, true))
            }
            Deed::Break if self.kind == Kind::Private => self.move_break(),
            Deed::Fork => self.fork(),
            Deed::AdviseParent => {
                let (number, from, pages) = self.draw(PAGES);
                let at = self.windows[number].address(from);
                // It may not: that takes CAP_SYS_NICE.
                let child = raw::fork(|| {
                    let _ = raw::advise_parent(at, pages, libc::MADV_PAGEOUT);
                    true
                })?;
                ended_well(child)
            }
            Deed::WriteFile if self.file.is_some() && !self.kind.is_private() => self.write_file(),
            Deed::Truncate if self.kind == Kind::Memfd => self.truncate(),
            Deed::Attach if segment => self.attach(),
            _ => Ok(()),
        }
    }

    fn advise(&mut self, number: usize, from: usize, pages: usize, call: &str, advice: i32) -> Result<()> {
        let at = self.windows[number].address(from);
        self.note(format!("{call} {at:#x}+{pages}"));
        self.done(call, raw::advise(at, pages, advice))
    }

    fn resize(&mut self, number: usize, pages: usize) -> Result<()> {
        let (at, old) = (self.windows[number].at, self.windows[number].pages);
        self.note(format!("mremap {at:#x} {old}->{pages}"));
        let at = self.done("mremap", raw::remap(at, old, pages, 0))?;
        self.resized(number, at, pages);
        Ok(())
    }

    /// A mapping that grows page by page, each of them written.
    fn burst(&mut self) -> Result<()> {
        let number = self.chance.below(self.windows.len());
        let most = PAGES - self.windows[number].first;
        let mut pages = self.chance.between(1, most);
        for _ in 0..self.chance.between(1, BURST) {
            self.resize(number, pages)?;
            self.check(number, pages - 1, 1)?;
            self.write(number, pages - 1);
            pages = if pages == most { 1 } else { pages + 1 };
        }
        Ok(())
    }

    fn move_away(&mut self) -> Result<()> {
        let number = self.chance.below(self.windows.len());
        let (at, old) = (self.windows[number].at, self.windows[number].pages);
        let pages = self.chance.between(1, PAGES - self.windows[number].first);
        let place = self.done("mmap", raw::reserve(pages))?;
        self.note(format!("mremap {at:#x} {old}->{pages} to {place:#x}"));
        let at = self.done("mremap", raw::remap(at, old, pages, place))?;
        self.resized(number, at, pages);
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        let (number, from, _) = self.draw(1);
        let first = self.windows[number].first + from;
        let (at, pages) = (self.windows[number].address(from), self.chance.between(1, PAGES - first));
        self.note(format!("mremap {at:#x} 0->{pages}"));
        let copy = self.done("mremap of no length", raw::remap(at, 0, pages, 0))?;
        self.add(copy, first, pages);
        if self.windows.len() > WINDOWS { self.unmap() } else { Ok(()) }
    }

    fn map_more(&mut self) -> Result<()> {
        let first = self.chance.below(PAGES);
        let pages = self.chance.between(1, PAGES - first);
        let at = self.done("mmap", raw::map(0, pages, self.source(first)))?;
        self.note(format!("mmap {at:#x}+{pages}"));
        self.add(at, first, pages);
        if self.windows.len() > WINDOWS { self.unmap() } else { Ok(()) }
    }

    fn map_over(&mut self) -> Result<()> {
        let (number, from, pages) = self.draw(64);
        if number == 0 && from == 0 || self.windows.len() > 2 * WINDOWS {
            return Ok(());
        }
        let (at, first) = (self.windows[number].address(from), self.chance.between(0, PAGES - pages));
        self.note(format!("mmap over {at:#x}+{pages}"));
        self.done("mmap over it", raw::map(at, pages, self.source(first)))?;
        self.cut(number, from, pages);
        self.add(at, first, pages);
        Ok(())
    }

    /// Unmaps a part of a mapping, or all of it; the object's first page stays mapped.
    fn unmap(&mut self) -> Result<()> {
        let number = self.chance.below(self.windows.len());
        let all = self.windows[number].pages;
        let whole = number > 0 && (self.windows.len() > WINDOWS || self.chance.once_in(3));
        let from = if whole { 0 } else { self.chance.between(1, all) };
        let pages = if whole { all } else { self.chance.between(0, all - from) };
        if pages == 0 {
            return Ok(());
        }
        let at = self.windows[number].address(from);
        self.note(format!("munmap {at:#x}+{pages}"));
        self.done("munmap", raw::unmap(at, pages))?;
        self.cut(number, from, pages);
        Ok(())
    }

    /// Pages that nobody may touch for a moment; what was in them is gone. Their content is given up first: the kernel sends no
    /// userfaultfd event for a guard, so what the pager is just putting in place could still appear after the guard.
    fn guard(&mut self) -> Result<()> {
        let (number, from, pages) = self.draw(16);
        self.advise(number, from, pages, "MADV_DONTNEED", libc::MADV_DONTNEED)?;
        (from..from + pages).for_each(|page| self.expect_fresh(number, page));
        match raw::advise(self.windows[number].address(from), pages, MADV_GUARD_INSTALL) {
            // Linux 6.13
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            installed => self.done("MADV_GUARD_INSTALL", installed)?,
        }
        self.advise(number, from, pages, "MADV_GUARD_REMOVE", MADV_GUARD_REMOVE)?;
        self.check(number, from, pages)
    }

    fn move_break(&mut self) -> Result<()> {
        let pages = self.chance.between(1, 64);
        let at = self.done("brk", raw::move_break(pages.cast_signed()))?.next_multiple_of(PAGE);
        for page in 0..pages - 1 {
            ensure!(raw::read(at + page * PAGE) == [0, 0], "new memory of the heap is not empty");
            raw::write(at + page * PAGE, 1);
        }
        let right = (0..pages - 1).all(|page| raw::read(at + page * PAGE) == [1, 1]);
        ensure!(right, "the heap's pages are not what was written to them");
        self.done("brk", raw::move_break(-pages.cast_signed())).map(drop)
    }

    /// A child writes, resizes its own mappings and ends, soon or after some time.
    fn fork(&mut self) -> Result<()> {
        let (number, from, pages) = self.draw(32);
        let (last, wait) = (self.windows[number].pages, self.chance.below(30) as u64);
        let (at, first) = (self.windows[number].at, self.windows[number].first);
        let values: Vec<u64> = (0..pages).map(|_| self.value()).collect();
        let before: Vec<u64> = (from..from + pages).map(|page| self.expected(number, page)).collect();
        let segment = self.kind == Kind::Segment;
        self.note(format!("fork, {pages} pages at {:#x}", at + from * PAGE));
        let child = raw::fork(|| {
            std::thread::sleep(std::time::Duration::from_millis(wait));
            let mut right = true;
            for (page, (old, new)) in (from..).zip(before.iter().zip(&values)) {
                right &= raw::read(at + page * PAGE) == [*old, *old];
                raw::write(at + page * PAGE, *new);
            }
            let most = PAGES - first;
            // Nobody sees the result of a child's own mappings, but a refusal.
            right && (segment || raw::remap(at, last, most, 0).and_then(|at| raw::remap(at, most, 1, 0)).is_ok())
        })?;
        ended_well(child)?;
        if !self.kind.is_private() {
            for (page, value) in (from..).zip(values) {
                self.expect(number, page, value);
            }
        }
        Ok(())
    }

    fn write_file(&mut self) -> Result<()> {
        let (page, value) = (self.chance.below(PAGES), self.value());
        let bytes = [value.to_ne_bytes(); PAGE / 8].concat();
        let Some(file) = &self.file else { bail!("no file is open") };
        self.done("pwrite", file.write_all_at(&bytes, (page * PAGE) as u64))?;
        self.note(format!("pwrite page {page}"));
        self.expect_in_object(page, value);
        Ok(())
    }

    fn truncate(&mut self) -> Result<()> {
        let pages = self.chance.between(1, PAGES);
        let Some(file) = &self.file else { bail!("no file is open") };
        for length in [pages, PAGES] {
            self.done("ftruncate", ftruncate(file.as_fd(), (length * PAGE) as i64).map_err(Into::into))?;
        }
        self.note(format!("ftruncate to {pages} and back"));
        (pages..PAGES).for_each(|page| self.expect_in_object(page, 0));
        Ok(())
    }

    /// Attaches the segment once more, or detaches it.
    fn attach(&mut self) -> Result<()> {
        if self.windows.len() > 1 && self.chance.once_in(2) {
            let number = self.chance.between(1, self.windows.len() - 1);
            self.done("shmdt", raw::detach(self.windows[number].at))?;
            self.windows.remove(number);
        } else if self.windows.len() < WINDOWS {
            let at = self.done("shmat", raw::attach(self.segment))?;
            self.add(at, 0, PAGES);
        }
        Ok(())
    }
}

fn ended_well(child: nix::unistd::Pid) -> Result<()> {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, 0)) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            ended => bail!("a child found something wrong: {ended:?}"),
        }
    }
}
