//! A program that has memory of kinds that few programs have, named as arguments, and checks all of it. Tells everybody who connects, every
//! 20 ms: `ok TICK`, or `bad TICK: WHAT`.

mod raw;

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use raw::{HUGE, Memory, PAGE};
use tranship_e2e::serve_status;

const PORT: u16 = 7003;
/// Pages of a mapping with guards.
const PAGES: usize = 256;
/// Bytes of memory of an ordinary kind.
const SOME: usize = 24 << 20;

/// Finds what is not as it was; the tick's number comes with it.
type Check = Box<dyn FnMut(u64) -> Result<()>>;

/// The content of a page.
fn word(page: usize, version: u64) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version
}

/// Pages with content, between them guards: the first page, a run in the middle, the last one. One page more becomes a guard and a page again.
fn guards(file: Option<BorrowedFd<'_>>, shared: bool) -> Result<Check> {
    let memory = Memory::map(PAGES * PAGE, file, shared, 0)?;
    let guards: Vec<usize> = [0, PAGES - 1].into_iter().chain(100..140).collect();
    (0..PAGES).for_each(|page| memory.write(page * PAGE, word(page, 0)));
    guards.iter().try_for_each(|page| memory.guard(*page, true))?;
    Ok(Box::new(move |tick| {
        for page in 0..PAGES - 2 {
            match (guards.contains(&page), memory.read_checked(page * PAGE)) {
                (true, None) => {}
                (true, Some(found)) => bail!("guard page {page} can be read: {found:#x}"),
                (false, None) => bail!("page {page} cannot be read"),
                (false, Some(found)) => ensure!(found == word(page, 0), "page {page} has {found:#x}"),
            }
        }
        memory.guard(PAGES - 2, true)?;
        ensure!(memory.read_checked((PAGES - 2) * PAGE).is_none(), "the new guard page can be read");
        memory.guard(PAGES - 2, false)?;
        memory.write((PAGES - 2) * PAGE, tick);
        Ok(())
    }))
}

/// Pages that become guards and pages again, which are zeros then, whether or not they were there before.
fn guards_for_a_moment() -> Result<Check> {
    const BYTES: usize = 24 << 20;
    let memory = Memory::map(BYTES, None, false, 0)?;
    let pages = BYTES / PAGE;
    for page in 0..pages {
        // Nothing that could be compressed.
        (0..PAGE / 8).for_each(|at| memory.write(page * PAGE + at * 8, word(page * PAGE + at, 0x5851_f42d_4c95_7f2d)));
        memory.write(page * PAGE, word(page, 0));
    }
    let mut expected: Vec<u64> = (0..pages).map(|page| word(page, 0)).collect();
    Ok(Box::new(move |tick| {
        let at = |step: u64| (tick.wrapping_mul(step) as usize).wrapping_mul(7919) % pages;
        for page in (0..16).map(|n| at(41 + n)) {
            memory.guard(page, true)?;
            memory.guard(page, false)?;
            let found = (memory.read(page * PAGE), memory.read(page * PAGE + 2048));
            ensure!(found == (0, 0), "page {page} was a guard, and has {found:#x?}");
            expected[page] = if page % 2 == 0 { tick } else { 0 };
            memory.write(page * PAGE, expected[page]);
        }
        for page in (0..8).map(|n| at(191 + n)) {
            let found = memory.read(page * PAGE);
            ensure!(found == expected[page], "page {page} has {found:#x}, not {:#x}", expected[page]);
        }
        Ok(())
    }))
}

/// One mapping of which parts are read-only, until it gets one protection again and another size as a whole.
fn part_protected() -> Result<Check> {
    const PARTS: [std::ops::Range<usize>; 2] = [64..96, 160..192];
    let mut memory = Memory::map(PAGES * PAGE, None, false, 0)?;
    (0..PAGES).for_each(|page| memory.write(page * PAGE, word(page, 0)));
    let mut version = vec![0; PAGES];
    let protect = |memory: &Memory, writable| PARTS.into_iter().try_for_each(|part| memory.protect(part, writable));
    protect(&memory, false)?;
    Ok(Box::new(move |tick| {
        // The last part first: where its pages are missing, they are put in place before those of the others.
        for page in [PAGES - 1, 0, 100] {
            memory.write(page * PAGE, word(page, tick));
            version[page] = tick;
        }
        protect(&memory, true)?;
        memory.resize((PAGES + 1) * PAGE)?;
        memory.resize(PAGES * PAGE)?;
        for (page, version) in version.iter().enumerate() {
            let found = memory.read(page * PAGE);
            ensure!(found == word(page, *version), "page {page} has {found:#x}");
        }
        protect(&memory, false)
    }))
}

/// A file with the content of its pages, which is opened anew each time so that it has no name in the end.
fn file() -> Result<File> {
    let path = "/tmp/guarded";
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len((PAGES * PAGE) as u64)?;
    Ok(file)
}

/// Memory, some of which is rewritten all the time.
fn rewritten(memory: Memory) -> Result<Check> {
    let pages = memory.len() / PAGE;
    (0..pages).for_each(|page| memory.write(page * PAGE, word(page, 0)));
    let mut version = vec![0; pages];
    Ok(Box::new(move |tick| {
        for (page, version) in version.iter().enumerate() {
            let found = memory.read(page * PAGE);
            ensure!(found == word(page, *version), "page {page} of {pages} has {found:#x}");
        }
        for page in (tick as usize % 7..pages).step_by(61) {
            version[page] = tick;
            memory.write(page * PAGE, word(page, tick));
        }
        Ok(())
    }))
}

/// Pages that keep their content, pages that change all the time, and children that check both: they were forked while pages were missing.
fn forks() -> Result<Check> {
    const BYTES: usize = 48 << 20;
    let memory = Memory::map(BYTES, None, false, 0)?;
    let pages = BYTES / PAGE;
    for page in 0..pages {
        // Nothing that could be compressed.
        (0..PAGE / 8).for_each(|at| memory.write(page * PAGE + at * 8, word(page * PAGE + at, 0x5851_f42d_4c95_7f2d)));
        memory.write(page * PAGE, word(page, 0));
    }
    let mut version = vec![0; pages];
    let mut moved = Memory::map(64 * PAGE, None, false, 0)?;
    (0..64).for_each(|page| moved.write(page * PAGE, word(page, 3)));
    Ok(Box::new(move |tick| {
        let at = |step: u64| (tick.wrapping_mul(step) as usize).wrapping_mul(7919) % pages;
        for page in (0..40).map(|n| at(41 + n)) {
            let found = memory.read(page * PAGE);
            ensure!(found == word(page, version[page]), "page {page} has {found:#x}, version {}", version[page]);
        }
        for page in (0..8).map(|n| at(91 + n)) {
            version[page] = tick;
            memory.write(page * PAGE, word(page, tick));
        }
        if tick.is_multiple_of(3) {
            let (memory, version) = (&memory, &version);
            raw::in_child(|| {
                (0..20).map(|n| at(200 + n)).all(|page| memory.read(page * PAGE) == word(page, version[page]))
            })
            .context("in a child")?;
        }
        if tick.is_multiple_of(5) {
            moved.move_away()?;
        }
        let page = tick as usize % 64;
        ensure!(moved.read(page * PAGE) == word(page, 3), "page {page} of what is moved has another content");
        Ok(())
    }))
}

/// A file in huge pages that grows and shrinks, of which huge pages become holes and content again, by fallocate and by madvise; and private memory
/// in huge pages that is thrown away and written again, forked, and moved.
fn huge_grown() -> Result<Check> {
    const MOST: usize = 4;
    let file = File::from(memfd_create(c"grown", MFdFlags::MFD_HUGETLB)?);
    file.set_len((MOST * HUGE) as u64)?;
    let shared = Memory::map(MOST * HUGE, Some(file.as_fd()), true, libc::MAP_HUGETLB)?;
    let private = Memory::map(MOST * HUGE, None, false, libc::MAP_HUGETLB)?;
    let (mut in_file, mut in_private) = ([0u64; MOST], [0u64; MOST]);
    let mut length = MOST;
    Ok(Box::new(move |tick| {
        let at = |huge: usize| huge * HUGE + (huge + 1) * 40 * PAGE;
        for (huge, (shared_word, private_word)) in in_file.iter().zip(&in_private).enumerate() {
            ensure!(huge >= length || shared.read(at(huge)) == *shared_word, "huge page {huge} of the file");
            ensure!(private.read(at(huge)) == *private_word, "private huge page {huge}");
        }
        let huge = tick as usize % MOST;
        match tick / 4 % 5 {
            0 => {
                length = 1 + tick as usize / 20 % MOST;
                file.set_len((length * HUGE) as u64)?;
                in_file[length..].fill(0);
            }
            1 => {
                length = MOST;
                file.set_len((MOST * HUGE) as u64)?;
            }
            2 => {
                let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                // A part of a huge page: nothing but its content changes.
                fallocate(&file, mode, (at(huge) / PAGE * PAGE) as i64, PAGE as i64)?;
                in_file[huge] = 0;
                private.discard(huge * HUGE, HUGE)?;
                in_private[huge] = 0;
            }
            _ => {
                if huge < length {
                    shared.write(at(huge), tick);
                    in_file[huge] = tick;
                }
                private.write(at(huge), tick);
                in_private[huge] = tick;
            }
        }
        Ok(())
    }))
}

/// Private memory in huge pages that is written, read, thrown away, and now and then forked and moved elsewhere.
fn huge_changed() -> Result<Check> {
    const MOST: usize = 6;
    const PARTS: usize = 3;
    let mut memory = Memory::map(MOST * HUGE, None, false, libc::MAP_HUGETLB)?;
    let mut expected = [[0u64; PARTS]; MOST];
    let mut chance = 1u64;
    let at = |huge: usize, part: usize| huge * HUGE + part * 170 * PAGE;
    Ok(Box::new(move |tick| {
        match tick % 300 {
            // A child would need huge pages of its own for what is not there.
            0 => raw::in_child(|| {
                let there = |huge: &usize| expected[*huge].iter().any(|word| *word != 0);
                let right = |huge: usize| (0..PARTS).all(|part| memory.read(at(huge, part)) == expected[huge][part]);
                (0..MOST).filter(there).all(right)
            })?,
            150 => memory.move_away_huge()?,
            _ => {}
        }
        for deed in 0..16 {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (huge, part) = ((chance >> 33) as usize % MOST, (chance >> 44) as usize % PARTS);
            if deed == 0 && tick.is_multiple_of(4) {
                memory.discard(huge * HUGE, HUGE)?;
                expected[huge].fill(0);
            } else if deed % 2 == 0 {
                let found = memory.read(at(huge, part));
                ensure!(found == expected[huge][part], "part {part} of huge page {huge} has {found:#x}");
            } else if huge < MOST / 2 || deed == 1 {
                memory.write(at(huge, part), chance);
                expected[huge][part] = chance;
            }
        }
        Ok(())
    }))
}

fn kind(name: &str) -> Result<Check> {
    // `huge-private:64` has so many huge pages.
    let (name, huge_pages) = name.split_once(':').unwrap_or((name, "8"));
    let huge_bytes = huge_pages.parse::<usize>()? * HUGE;
    match name {
        "guards-for-a-moment" => guards_for_a_moment(),
        "part-protected" => part_protected(),
        "guard-anon" => guards(None, false),
        "guard-shared" => guards(None, true),
        "guard-file" => guards(Some(file()?.as_fd()), false),
        "guard-file-shared" => guards(Some(file()?.as_fd()), true),
        "guard-memfd" => {
            let memory = File::from(memfd_create(c"guarded", MFdFlags::empty())?);
            memory.set_len((PAGES * PAGE) as u64)?;
            guards(Some(memory.as_fd()), true)
        }
        "poisoned" => {
            let memory = Memory::map(4 * PAGE, None, false, 0)?;
            memory.poison(PAGE)?;
            Ok(Box::new(move |_| {
                ensure!(memory.read_checked(PAGE).is_none(), "the poisoned page can be read");
                Ok(())
            }))
        }
        "huge-private" => rewritten(Memory::map(huge_bytes, None, false, libc::MAP_HUGETLB)?),
        "huge-shared" => rewritten(Memory::map(huge_bytes, None, true, libc::MAP_HUGETLB)?),
        "huge-memfd" => {
            let memory = File::from(memfd_create(c"huge", MFdFlags::MFD_HUGETLB)?);
            memory.set_len(huge_bytes as u64)?;
            let mapped = Memory::map(huge_bytes, Some(memory.as_fd()), true, libc::MAP_HUGETLB)?;
            // It stays open.
            std::mem::forget(memory);
            rewritten(mapped)
        }
        "huge-grown" => huge_grown(),
        "huge-changed" => huge_changed(),
        "huge-forked" => {
            let memory = Memory::map(huge_bytes, None, false, libc::MAP_HUGETLB)?;
            let pages = memory.len() / PAGE;
            (0..pages).for_each(|page| memory.write(page * PAGE, word(page, 0)));
            let right = move || (0..pages).all(|page| memory.read(page * PAGE) == word(page, 0));
            let child = raw::watching_child(&right)?;
            Ok(Box::new(move |_| {
                ensure!(right() && raw::lives(child), "huge pages that were forked have another content");
                Ok(())
            }))
        }
        "huge-unreserved" => {
            let memory = Memory::map(64 * HUGE, None, false, libc::MAP_HUGETLB | libc::MAP_NORESERVE)?;
            let at = |huge: usize| huge * HUGE + PAGE;
            [3, 9].into_iter().for_each(|huge| memory.write(at(huge), word(huge, 0)));
            Ok(Box::new(move |tick| {
                ensure!(memory.read(at(3)) == word(3, 0), "huge page 3 has {:#x}", memory.read(at(3)));
                ensure!(memory.read(at(9)) == word(9, tick - 1), "huge page 9 has {:#x}", memory.read(at(9)));
                memory.write(at(9), word(9, tick));
                Ok(())
            }))
        }
        "huge-segment" => rewritten(Memory::segment(huge_bytes, libc::SHM_HUGETLB)?),
        "anonymous" => rewritten(Memory::map(SOME, None, true, 0)?),
        "memfd" => {
            let memory = File::from(memfd_create(c"memory", MFdFlags::empty())?);
            memory.set_len(SOME as u64)?;
            rewritten(Memory::map(SOME, Some(memory.as_fd()), true, 0)?)
        }
        "segment" => rewritten(Memory::segment(SOME, 0)?),
        "tmpfs" => {
            let file = File::options().read(true).write(true).create_new(true).open("/tmp/some")?;
            file.set_len(SOME as u64)?;
            rewritten(Memory::map(SOME, Some(file.as_fd()), true, 0)?)
        }
        "forks" => forks(),
        other => bail!("{other} is no kind of memory"),
    }
}

fn main() -> Result<()> {
    let mut checks = Vec::new();
    for name in std::env::args().skip(1) {
        checks.push((kind(&name).with_context(|| name.clone())?, name));
    }
    let guests = TcpListener::bind(("0.0.0.0", PORT))?;
    serve_status(&guests, 1, |tick| {
        checks.iter_mut().try_for_each(|(check, name)| check(tick).with_context(|| name.clone()))
    })
}
