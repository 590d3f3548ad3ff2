//! Writes found by soft-dirty bits: [`tranship_sys::soft_dirty`].
//!
//! A page that has got content since the bits were cleared has its own bit set, however that came about: written to by its
//! task or by another one, moved by mremap, swapped in, made by a program that was executed, joined into a huge page. Only a
//! process that was forked has pages without it which nobody has looked at: so at the first look all pages count.

use std::io;

use tranship_sys::pagemap::Pagemap;
use tranship_sys::soft_dirty;
use tranship_types::PageRange;

use super::DirtyTracker;
use crate::survey::Space;

/// The watch over a process, which must stand still while it is looked at.
#[derive(Debug, Default)]
pub(super) struct SoftDirty {
    /// The bits were cleared at a look.
    cleared: bool,
}

impl DirtyTracker for SoftDirty {
    fn look(&mut self, space: &Space, _pids: &[u32], found: &mut dyn FnMut(&PageRange, PageRange)) -> io::Result<()> {
        let mut written = Vec::new();
        self.peek(space, &mut |mapping, run, dirty| {
            if dirty {
                written.push((*mapping, run));
            }
        })?;
        soft_dirty::clear(space.pid)?;
        self.cleared = true;
        written.into_iter().for_each(|(mapping, run)| found(&mapping, run));
        Ok(())
    }

    fn peek(&self, space: &Space, there: &mut dyn FnMut(&PageRange, PageRange, bool)) -> io::Result<()> {
        let pagemap = Pagemap::open(space.pid)?;
        for range in &space.ranges {
            pagemap.soft_dirty(range.start, range.end, |start, end, dirty| {
                there(range, PageRange { start, end }, dirty || !self.cleared);
            })?;
        }
        Ok(())
    }

    fn again(&self, pid: u32, range: PageRange, found: &mut dyn FnMut(PageRange)) -> io::Result<()> {
        Pagemap::open(pid)?.soft_dirty(range.start, range.end, |start, end, dirty| {
            if dirty && self.cleared {
                found(PageRange { start, end });
            }
        })
    }
}
