//! Open files: positions, files without a name, watches.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{FcntlArg, OFlag};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::species::{Check, pattern_bytes};

/// A position that wanders, shared by two descriptors, and a descriptor that appends.
pub fn position(place: &Path) -> Result<Check> {
    const LENGTH: u64 = 100_000;
    let path = place.join("file");
    let content = pattern_bytes(1, LENGTH as usize);
    std::fs::write(&path, &content)?;
    let mut file = File::open(&path)?;
    let mut twin = file.try_clone()?;
    let mut log = File::options().append(true).create(true).open(place.join("log"))?;
    let mut at = 0u64;
    let mut lines = 0u64;
    Ok(Box::new(move || {
        let found = file.stream_position()?;
        ensure!(found == at, "the position is {found} instead of {at}");
        let mut bytes = [0; 100];
        let reader = if at.is_multiple_of(200) { &mut file } else { &mut twin };
        reader.read_exact(&mut bytes)?;
        ensure!(bytes == content[at as usize..][..100], "wrong bytes at {at}");
        at += 100;
        if at == LENGTH {
            at = file.seek(SeekFrom::Start(0))?;
        }
        let flags = OFlag::from_bits_retain(nix::fcntl::fcntl(&log, FcntlArg::F_GETFL)?);
        ensure!(flags.contains(OFlag::O_APPEND), "the log is no longer appended to");
        if lines.is_multiple_of(1000) {
            log.set_len(0)?;
        }
        log.write_all(b"0123456\n")?;
        lines += 1;
        let (length, right) = (log.metadata()?.len(), ((lines - 1) % 1000 + 1) * 8);
        ensure!(length == right, "the log is {length} bytes long instead of {right}");
        Ok(())
    }))
}

/// A file that was deleted while open, with content and a position.
pub fn deleted(place: &Path) -> Result<Check> {
    let path = place.join("file");
    let content = pattern_bytes(2, 50_000);
    let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    file.write_all(&content)?;
    file.seek(SeekFrom::Start(12_345))?;
    std::fs::remove_file(&path)?;
    let mut version = 0u64;
    file.write_all_at(&version.to_le_bytes(), 0)?;
    Ok(Box::new(move || {
        ensure!(!path.exists(), "the deleted file has its name again");
        ensure!(file.metadata()?.nlink() == 0, "the deleted file has a link");
        ensure!(file.metadata()?.len() == 50_000, "the deleted file is {} bytes long", file.metadata()?.len());
        let at = file.stream_position()?;
        ensure!(at == 12_345, "the position is {at}");
        let mut bytes = vec![0; 50_000];
        file.read_exact_at(&mut bytes, 0)?;
        ensure!(bytes[..8] == version.to_le_bytes(), "the first bytes are not those written last");
        ensure!(bytes[8..] == content[8..], "the content changed");
        version += 1;
        file.write_all_at(&version.to_le_bytes(), 0)?;
        Ok(())
    }))
}

/// A watch on a directory: events still arrive. Those that wait unread during a move are not promised (CRIU drops
/// them), so one may be missed now and then, but not two in a row.
pub fn inotify(place: &Path) -> Result<Check> {
    let watcher = Inotify::init(InitFlags::IN_NONBLOCK)?;
    let watched = watcher.add_watch(place, AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE)?;
    let place = place.to_owned();
    let mut n = 0u64;
    Ok(Box::new(move || {
        for _ in 0..2 {
            n += 1;
            let path = place.join(format!("file-{n}"));
            File::create(&path)?;
            std::fs::remove_file(&path)?;
            let mut seen = AddWatchFlags::empty();
            let deadline = Instant::now() + Duration::from_secs(2);
            while !seen.contains(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE) && Instant::now() < deadline {
                match watcher.read_events() {
                    Ok(events) => {
                        for event in events {
                            ensure!(event.wd == watched, "the watch changed its descriptor");
                            if event.name.as_deref() == path.file_name() {
                                seen |= event.mask;
                            }
                        }
                    }
                    Err(nix::Error::EAGAIN) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            if seen.contains(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE) {
                return Ok(());
            }
        }
        anyhow::bail!("no events for the files that were made and deleted")
    }))
}

/// An event that waits to be read.
pub fn inotify_unread(place: &Path) -> Result<Check> {
    let watcher = Inotify::init(InitFlags::IN_NONBLOCK)?;
    watcher.add_watch(place, AddWatchFlags::IN_CREATE)?;
    let path = place.join("file");
    File::create(&path)?;
    Ok(Box::new(move || {
        let events = watcher.read_events().context("the event that waited is gone")?;
        ensure!(events.iter().any(|e| e.name.as_deref() == path.file_name()), "another event waited");
        std::fs::remove_file(&path)?;
        File::create(&path)?;
        Ok(())
    }))
}
