//! What one thread does to its regions, at random, for ever.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::chance::Chance;
use crate::kin::Nursery;
use crate::raw::{HUGE, PAGE};
use crate::region::{Kind, Region};

/// What can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Deed {
    Check,
    CheckAll,
    Write,
    Poke,
    Map,
    Unmap,
    Forget,
    Free,
    Punch,
    Move,
    Resize,
    Cut,
    Protect,
    Pin,
    Fork,
    Exec,
}

const DEEDS: [(Deed, usize); 16] = [
    (Deed::Check, 500),
    (Deed::CheckAll, 5),
    (Deed::Write, 220),
    (Deed::Poke, 150),
    (Deed::Map, 20),
    (Deed::Unmap, 8),
    (Deed::Forget, 30),
    (Deed::Free, 15),
    (Deed::Punch, 15),
    (Deed::Move, 30),
    (Deed::Resize, 30),
    (Deed::Cut, 8),
    (Deed::Protect, 20),
    (Deed::Pin, 5),
    (Deed::Fork, 2),
    (Deed::Exec, 1),
];

impl Deed {
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// How much was done, for whoever wants to know whether it goes on.
#[derive(Debug)]
pub struct Counts {
    checks: [AtomicU64; Kind::ALL.len()],
    deeds: [AtomicU64; DEEDS.len()],
    /// Checks that children made.
    pub of_children: AtomicU64,
}

impl Counts {
    pub const fn new() -> Self {
        Self {
            checks: [const { AtomicU64::new(0) }; Kind::ALL.len()],
            deeds: [const { AtomicU64::new(0) }; DEEDS.len()],
            of_children: AtomicU64::new(0),
        }
    }

    /// Pages checked, in all kinds.
    pub fn checked(&self) -> u64 {
        self.checks.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// All that is counted, by name.
    pub fn rows(&self) -> Vec<(String, u64)> {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let checks = Kind::ALL.iter().zip(&self.checks).map(|(kind, n)| (format!("check.{}", kind.name()), load(n)));
        let deeds = DEEDS.iter().zip(&self.deeds).map(|((deed, _), n)| (format!("deed.{}", deed.name()), load(n)));
        checks.chain(deeds).chain([("check.children".to_owned(), load(&self.of_children))]).collect()
    }
}

/// What is tortured, and how.
#[derive(Debug, Clone)]
pub struct Diet {
    /// The kinds of memory.
    pub kinds: Vec<Kind>,
    /// What is not done.
    pub without: Vec<Deed>,
    /// Pages of all regions of one thread together.
    pub pages: usize,
    /// Where files may be made.
    pub dir: PathBuf,
    /// Rest after each deed.
    pub pace: Duration,
}

/// Pages of the regions that lie in files, on a tmpfs or behind SysV, at most.
const SMALL: usize = 256;
/// Most pages of one region.
const LARGE: usize = 4096;

/// A thread's regions, and what it does to them.
pub struct Torture {
    diet: Diet,
    /// Marks the regions' ids.
    number: u32,
    made: u32,
    chance: Chance,
    pub regions: Vec<Region>,
    nursery: Option<Nursery>,
    counts: &'static Counts,
}

impl Torture {
    /// Nothing is mapped yet. Without a nursery there are no children.
    pub fn new(diet: Diet, number: u32, seed: u64, nursery: Option<Nursery>, counts: &'static Counts) -> Self {
        let chance = Chance::new(seed);
        Self { diet, number, made: 0, chance, regions: Vec::new(), nursery, counts }
    }

    /// Does one thing.
    pub fn step(&mut self) -> Result<()> {
        let deed = self.chance.weighted(&DEEDS);
        if !self.diet.without.contains(&deed) {
            let done = if self.regions.is_empty() { self.map() } else { self.perform(deed) };
            done.with_context(|| format!("{} in thread {}", deed.name(), self.number))?;
            self.counts.deeds[DEEDS.iter().position(|(d, _)| *d == deed).unwrap_or(0)].fetch_add(1, Ordering::Relaxed);
        }
        if let Some(nursery) = &mut self.nursery {
            self.regions.extend(nursery.visit(self.counts)?);
        }
        Ok(())
    }

    /// Pages checked by this process so far.
    pub fn checked(&self) -> u64 {
        self.counts.checked()
    }

    /// Takes all regions away.
    pub fn end(&mut self) -> Result<()> {
        std::mem::take(&mut self.regions).into_iter().try_for_each(Region::discard)
    }

    /// Rests after a step.
    pub fn rest(&self) {
        std::thread::sleep(self.diet.pace);
    }

    fn perform(&mut self, deed: Deed) -> Result<()> {
        match deed {
            Deed::CheckAll => return self.check_all(),
            Deed::Map => return self.map(),
            Deed::Unmap => return self.unmap(),
            Deed::Fork | Deed::Exec => return self.bear(deed),
            _ => {}
        }
        let at = self.chance.below(self.regions.len());
        let region = &mut self.regions[at];
        let chance = &mut self.chance;
        let first = chance.below(region.pages());
        let mut run = |most: usize| chance.between(1, most.min(region.pages() - first));
        match deed {
            Deed::Check => {
                let pages = run(64);
                if let Some(region) = self.accessible(at, first, pages, false)? {
                    region.check(first, pages)?;
                    self.count_checks(at, pages);
                }
            }
            Deed::Write => {
                let pages = run(48);
                if let Some(region) = self.accessible(at, first, pages, true)? {
                    region.write(first, pages);
                }
            }
            Deed::Poke => {
                let count = run(16);
                for _ in 0..count {
                    let page = self.chance.below(self.regions[at].pages());
                    if let Some(region) = self.accessible(at, page, 1, true)? {
                        region.poke(page);
                    }
                }
            }
            Deed::Forget => {
                let pages = run(128);
                region.open()?;
                region.forget(first, pages)?;
            }
            Deed::Free if region.kind.is_copied() => {
                let pages = run(64);
                region.open()?;
                region.free(first, pages)?;
            }
            Deed::Punch if region.kind.is_shared() => {
                let pages = run(64);
                region.open()?;
                region.punch(first, pages)?;
            }
            Deed::Move => {
                region.open()?;
                region.move_away()?;
            }
            Deed::Resize => {
                let most = if region.kind.is_copied() { LARGE } else { SMALL };
                let pages = chance.between(1, (2 * region.pages()).min(most));
                region.open()?;
                region.resize(pages)?;
            }
            Deed::Cut if region.kind.is_copied() && first > 0 && first + 1 < region.pages() => {
                let pages = chance.between(1, region.pages() - first - 1);
                region.open()?;
                let behind = region.cut(first, pages)?;
                self.regions.push(behind);
            }
            Deed::Protect => {
                let (pages, readable) = (run(64), chance.once_in(2));
                region.open()?;
                region.protect(first, pages, readable)?;
            }
            Deed::Pin => {
                let pages = run(16);
                region.open()?;
                region.pin(first, pages);
            }
            _ => {}
        }
        self.regions[at].check_books()
    }

    /// The region, if these pages may be touched. Pages that may not be are left so for a while.
    fn accessible(&mut self, at: usize, first: usize, pages: usize, writing: bool) -> Result<Option<&mut Region>> {
        let region = &mut self.regions[at];
        if region.in_the_way(first, pages, writing) {
            if !self.chance.once_in(32) {
                return Ok(None);
            }
            region.open()?;
        }
        Ok(Some(region))
    }

    fn count_checks(&self, at: usize, pages: usize) {
        self.counts.checks[self.regions[at].kind as usize].fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Checks every page of every region.
    pub fn check_all(&mut self) -> Result<()> {
        for at in 0..self.regions.len() {
            let pages = self.regions[at].pages();
            if self.regions[at].in_the_way(0, pages, false) {
                self.regions[at].open()?;
            }
            self.regions[at].check(0, pages)?;
            self.regions[at].check_books()?;
            self.count_checks(at, pages);
        }
        Ok(())
    }

    fn map(&mut self) -> Result<()> {
        if self.diet.kinds.is_empty() {
            return Ok(());
        }
        let kind = self.diet.kinds[self.chance.below(self.diet.kinds.len())];
        let most = if kind.is_copied() { LARGE.min(self.diet.pages / 4) } else { SMALL };
        let pages = match kind {
            Kind::Huge => HUGE / PAGE * self.chance.between(1, 3),
            _ => self.chance.between(1, most.max(1)),
        };
        let used: usize = self.regions.iter().map(Region::pages).sum();
        if used + pages > self.diet.pages {
            return if self.regions.is_empty() { Ok(()) } else { self.unmap() };
        }
        self.made += 1;
        let id = self.number << 24 | self.made & 0xff_ffff;
        let mut region = Region::new(kind, id, pages, &self.diet.dir)?;
        // Some pages stay as they are.
        let written = self.chance.below(region.pages() + 1);
        if written > 0 {
            region.write(0, written);
        }
        self.regions.push(region);
        Ok(())
    }

    fn unmap(&mut self) -> Result<()> {
        let at = self.chance.below(self.regions.len());
        self.regions.swap_remove(at).discard()
    }

    fn bear(&mut self, deed: Deed) -> Result<()> {
        let Some(mut nursery) = self.nursery.take() else { return Ok(()) };
        let born = match deed {
            Deed::Exec => nursery.execute(&mut self.chance),
            _ => self.fork(&mut nursery),
        };
        self.nursery = Some(nursery);
        born
    }

    fn fork(&mut self, nursery: &mut Nursery) -> Result<()> {
        let shared: Vec<usize> = (0..self.regions.len()).filter(|at| self.regions[*at].kind.is_shared()).collect();
        let lent = if shared.is_empty() {
            None
        } else {
            let mut lent = self.regions.swap_remove(shared[self.chance.below(shared.len())]);
            lent.open()?;
            Some(lent)
        };
        let seed = self.chance.next();
        let copies = |lent: &mut Option<Region>| {
            let mut copies = Self::new(self.diet.clone(), self.number | 0x80, seed, None, self.counts);
            copies.diet.kinds.retain(|kind| kind.is_copied());
            // Another child's pages shall not look like its own, wherever they come from.
            copies.made = (seed as u32 & 0xff) << 16;
            // What the child shares with its parent it must not touch; it has it in its books no more.
            copies.regions = std::mem::take(&mut self.regions);
            copies.regions.retain(|region| region.kind.is_copied());
            (copies, lent.take())
        };
        nursery.fork(&mut self.chance, lent, copies)
    }
}
