//! Memory of every kind.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::raw::{PAGE, PAGE_WORDS, Region, Sharing};
use crate::sharing;
use crate::species::{Check, Watch, pattern, pattern_bytes, status_line};

fn expect_permissions(region: &Region, right: &str) -> Result<()> {
    let (found, _) = region.kernel_view()?;
    ensure!(found == right, "the mapping is {found} instead of {right}");
    Ok(())
}

/// Many small allocations on the heap that grows by `brk`.
pub fn heap(_: &Path) -> Result<Check> {
    let mut blocks: Vec<Vec<u8>> = (0..400).map(|i| pattern_bytes(i << 32, 64 + 13 * i as usize)).collect();
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let range = maps.lines().find(|l| l.ends_with("[heap]")).and_then(|l| l.split(' ').next()?.split_once('-'));
    let (start, end) = range.context("this process has no heap by brk")?;
    let heap = usize::from_str_radix(start, 16)?..usize::from_str_radix(end, 16)?;
    ensure!(blocks.iter().any(|b| heap.contains(&(b.as_ptr() as usize))), "no block lies on the heap");
    let mut n = 0;
    Ok(Box::new(move || {
        for (i, block) in blocks.iter().enumerate() {
            ensure!(*block == pattern_bytes((i as u64) << 32, 64 + 13 * i), "block {i} changed");
        }
        // Freed and allocated anew, so that the allocator's own data is used too.
        n = (n + 1) % blocks.len();
        blocks[n] = pattern_bytes((n as u64) << 32, 64 + 13 * n);
        Ok(())
    }))
}

/// Pages with content that may not even be read.
pub fn inaccessible(_: &Path) -> Result<Check> {
    let region = Region::anonymous(16 * PAGE, Sharing::Private)?;
    region.fill(0..16, |i| pattern(i ^ 0xaaaa));
    region.protect(libc::PROT_NONE)?;
    Ok(Box::new(move || {
        expect_permissions(&region, "---p")?;
        region.protect(libc::PROT_READ)?;
        let verified = (0..16).try_for_each(|page| region.verify(page, |i| pattern(i ^ 0xaaaa)));
        region.protect(libc::PROT_NONE)?;
        verified
    }))
}

/// Pages with content that may only be read.
pub fn read_only(_: &Path) -> Result<Check> {
    let region = Region::anonymous(16 * PAGE, Sharing::Private)?;
    region.fill(0..16, |i| pattern(i ^ 0xbbbb));
    region.protect(libc::PROT_READ)?;
    Ok(Box::new(move || {
        expect_permissions(&region, "r--p")?;
        (0..16).try_for_each(|page| region.verify(page, |i| pattern(i ^ 0xbbbb)))
    }))
}

/// Pages that may not leave memory.
pub fn locked(_: &Path) -> Result<Check> {
    let region = Region::anonymous(4 * PAGE, Sharing::Private)?;
    region.fill(0..4, |i| pattern(i ^ 0xcccc));
    region.lock()?;
    Ok(Box::new(move || {
        let (_, flags) = region.kernel_view()?;
        ensure!(flags.split(' ').any(|f| f == "lo"), "the mapping is no longer locked: {flags}");
        let locked = status_line("VmLck")?;
        ensure!(locked == "16 kB", "{locked} are locked");
        (0..4).try_for_each(|page| region.verify(page, |i| pattern(i ^ 0xcccc)))
    }))
}

/// A gigabyte of which one page in a thousand was ever touched.
pub fn sparse(_: &Path) -> Result<Check> {
    const STRIDE: usize = 1009;
    let region = Region::anonymous(1 << 30, Sharing::Private)?;
    region.fill((0..region.pages()).step_by(STRIDE), |i| pattern(i ^ 0xdddd));
    let mut n = 0u64;
    Ok(Box::new(move || {
        (0..region.pages()).step_by(STRIDE).try_for_each(|page| region.verify(page, |i| pattern(i ^ 0xdddd)))?;
        for _ in 0..16 {
            n += 1;
            let page = pattern(n) as usize % region.pages();
            if !page.is_multiple_of(STRIDE) {
                region.verify(page, |_| 0).context("a page that nobody wrote")?;
            }
        }
        Ok(())
    }))
}

/// Far more addresses than the machine has memory, reserved as databases do, of which one page after the other is put to use.
pub fn reserved(_: &Path) -> Result<Check> {
    let region = Region::reserved(8 << 40)?;
    let mut used = 0;
    Ok(Box::new(move || {
        (0..used).try_for_each(|page| region.verify(page, |i| pattern(i ^ 0x1234)))?;
        if used < 256 {
            region.commit(used..used + 1)?;
            region.fill(used..used + 1, |i| pattern(i ^ 0x1234));
            used += 1;
        }
        Ok(())
    }))
}

/// A memory file: content, position, seals, and a shared mapping of it.
pub fn memfd(_: &Path) -> Result<Check> {
    const PAGES: usize = 64;
    let mut file = File::from(memfd_create("zoo", MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len((PAGES * PAGE) as u64)?;
    let region = Region::of_file(file.as_fd(), PAGES * PAGE, Sharing::Shared)?;
    region.fill((0..PAGES - 1).step_by(3), |i| pattern(i ^ 0xeeee));
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    file.seek(SeekFrom::Start(777))?;
    let mut version = 0u64;
    Ok(Box::new(move || {
        let found = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        ensure!(found == seals, "the seals are {found:?}");
        let at = file.stream_position()?;
        ensure!(at == 777, "the position is {at}");
        ensure!(file.metadata()?.len() == (PAGES * PAGE) as u64, "the length changed");
        for page in 0..PAGES - 1 {
            region.verify(page, |i| if page % 3 == 0 { pattern(i ^ 0xeeee) } else { 0 })?;
        }
        through_both(&file, &region, PAGES - 1, &mut version)
    }))
}

/// A memory file that nobody maps: pages are written and cut off by descriptor.
pub fn memfd_written(_: &Path) -> Result<Check> {
    const PAGES: u64 = 1024;
    let page = PAGE as u64;
    let file = File::from(memfd_create("zoo-written", MFdFlags::empty())?);
    let mut seeds = vec![0u64; PAGES as usize];
    file.set_len(PAGES * page)?;
    let mut n = 0u64;
    Ok(Box::new(move || {
        for _ in 0..16 {
            n += 1;
            let at = pattern(n) % PAGES;
            let mut found = vec![0; PAGE];
            file.read_exact_at(&mut found, at * page)?;
            let seed = seeds[at as usize];
            let right = if seed == 0 { vec![0; PAGE] } else { pattern_bytes(seed << 20, PAGE) };
            ensure!(found == right, "page {at} is not as version {seed} was");
            seeds[at as usize] = n;
            file.write_all_at(&pattern_bytes(n << 20, PAGE), at * page)?;
        }
        if n.is_multiple_of(320) {
            let left = pattern(n) % PAGES;
            file.set_len(left * page)?;
            file.set_len(PAGES * page)?;
            seeds[left as usize..].fill(0);
        }
        Ok(())
    }))
}

/// Writes through the mapping and reads from the file, then the other way round; first looks for what was written last.
fn through_both(file: &File, region: &Region, page: usize, version: &mut u64) -> Result<()> {
    let word = &region.words()[page * PAGE_WORDS];
    let offset = (page * PAGE) as u64;
    let found = word.load(Ordering::SeqCst);
    ensure!(found == *version, "version {found} instead of {version}");
    word.store(*version + 1, Ordering::SeqCst);
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset)?;
    ensure!(u64::from_le_bytes(bytes) == *version + 1, "what was written to the mapping is not in the file");
    *version += 2;
    file.write_all_at(&version.to_le_bytes(), offset)?;
    ensure!(word.load(Ordering::SeqCst) == *version, "what was written to the file is not in the mapping");
    Ok(())
}

/// A private mapping of a file, half of its pages changed.
pub fn file_private(place: &Path) -> Result<Check> {
    const PAGES: usize = 16;
    let path = place.join("file");
    let content = pattern_bytes(0, PAGES * PAGE);
    std::fs::write(&path, &content)?;
    let region = Region::of_file(File::open(&path)?.as_fd(), PAGES * PAGE, Sharing::Private)?;
    region.fill((0..PAGES).step_by(2), |i| !pattern(i));
    let mut n = 0;
    Ok(Box::new(move || {
        for page in 0..PAGES {
            region.verify(page, |i| if page % 2 == 0 { !pattern(i) } else { pattern(i) })?;
        }
        n += 1;
        if n % 20 == 0 {
            ensure!(std::fs::read(&path)? == content, "the file changed under its private mapping");
        }
        Ok(())
    }))
}

/// A private mapping of a file, of which nearly all pages are written, and go on being written; one of them is zeros over the
/// file's content.
pub fn file_rewritten(place: &Path) -> Result<Check> {
    const OF_THE_FILE: usize = 16;
    const ZEROS: usize = 3;
    let (path, size) = (place.join("rewritten"), sharing::size(4)?);
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    file.set_len(size as u64)?;
    file.write_all_at(&pattern_bytes(0, OF_THE_FILE * PAGE), 0)?;
    let region = Region::of_file(file.as_fd(), size, Sharing::Private)?;
    let word = |i: u64, version: u64| !pattern(i ^ version << 40);
    region.fill([ZEROS], |_| 0);
    region.fill(OF_THE_FILE..region.pages(), |i| word(i, 0));
    let mut versions = vec![0u64; region.pages()];
    let (mut n, mut sweep) = (0, OF_THE_FILE);
    Ok(Box::new(move || {
        for page in 0..OF_THE_FILE {
            region.verify(page, |i| if page == ZEROS { 0 } else { pattern(i) })?;
        }
        for _ in 0..8 {
            n += 1;
            let page = OF_THE_FILE + pattern(n) as usize % (region.pages() - OF_THE_FILE);
            region.verify(page, |i| word(i, versions[page]))?;
            versions[page] += 1;
            region.fill([page], |i| word(i, versions[page]));
        }
        for _ in 0..64 {
            region.verify(sweep, |i| word(i, versions[sweep]))?;
            sweep = if sweep + 1 < region.pages() { sweep + 1 } else { OF_THE_FILE };
        }
        Ok(())
    }))
}

/// A shared mapping of a file.
pub fn file_shared(place: &Path) -> Result<Check> {
    const PAGES: usize = 16;
    let path = place.join("file");
    std::fs::write(&path, pattern_bytes(0, PAGES * PAGE))?;
    let file = File::options().read(true).write(true).open(&path)?;
    let region = Region::of_file(file.as_fd(), PAGES * PAGE, Sharing::Shared)?;
    let mut version = 0u64;
    file.write_all_at(&version.to_le_bytes(), ((PAGES - 1) * PAGE) as u64)?;
    Ok(Box::new(move || {
        (0..PAGES - 1).try_for_each(|page| region.verify(page, pattern))?;
        through_both(&file, &region, PAGES - 1, &mut version)
    }))
}

/// Shared and private mappings of a file that is open no more and has no name.
pub fn deleted_file(place: &Path) -> Result<Check> {
    const PAGES: usize = 8;
    let path = place.join("file");
    let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    file.write_all(&pattern_bytes(0, PAGES * PAGE))?;
    let shared = Region::of_file(file.as_fd(), PAGES * PAGE, Sharing::Shared)?;
    let private = Region::of_file(file.as_fd(), PAGES * PAGE, Sharing::Private)?;
    private.fill([1], |i| !pattern(i));
    drop(file);
    std::fs::remove_file(&path)?;
    let mut version = pattern(0);
    Ok(Box::new(move || {
        (1..PAGES).try_for_each(|page| shared.verify(page, pattern)).context("shared")?;
        private.verify(1, |i| !pattern(i)).context("private, changed")?;
        (2..PAGES).try_for_each(|page| private.verify(page, pattern)).context("private")?;
        let (one, other) = (shared.words()[0].load(Ordering::SeqCst), private.words()[0].load(Ordering::SeqCst));
        ensure!(one == version && other == version, "the first word is {one:#x}, {other:#x} instead of {version:#x}");
        version = pattern(version);
        shared.words()[0].store(version, Ordering::SeqCst);
        Ok(())
    }))
}

/// 64 MiB that a thread rewrites all the time, page by page, each time with another version; before it writes a page it
/// checks that the page is as it left it.
pub fn rewritten(_: &Path) -> Result<Check> {
    const BATCH: usize = 64;
    let region = Region::anonymous(64 << 20, Sharing::Private)?;
    let written = Arc::new(AtomicU64::new(0));
    let complaint = Arc::new(Mutex::new(None));
    let (progress, report) = (Arc::clone(&written), Arc::clone(&complaint));
    thread::Builder::new().name("rewriter".into()).spawn(move || {
        let mut versions = vec![0u64; region.pages()];
        let word = |i: u64, version: u64| if version == 0 { 0 } else { pattern(i ^ version << 40) };
        loop {
            for (page, version) in versions.iter_mut().enumerate() {
                if let Err(error) = region.verify(page, |i| word(i, *version)) {
                    *report.lock().expect("the checker does not panic") = Some(error);
                }
                *version += 1;
                region.fill([page], |i| word(i, *version));
                progress.fetch_add(1, Ordering::Relaxed);
                if page % BATCH == 0 {
                    // About 128 MB a second: busy, but other animals get their turn on a small machine.
                    thread::sleep(Duration::from_millis(2));
                }
            }
        }
    })?;
    let mut watch = Watch::new("the number of pages rewritten");
    Ok(Box::new(move || {
        if let Some(error) = complaint.lock().expect("the rewriter does not panic").take() {
            bail!("{error:#}");
        }
        watch.look(written.load(Ordering::Relaxed))
    }))
}
