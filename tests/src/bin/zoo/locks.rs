//! File locks that are held, as another process sees them.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};

use crate::kin::Kin;
use crate::species::Check;

fn lock_of(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: start, l_len: length, l_pid: 0 }
}

fn try_flock(path: &Path, kind: FlockArg) -> Result<(), nix::Error> {
    let file = File::open(path).map_err(|e| nix::Error::from_raw(e.raw_os_error().unwrap_or(0)))?;
    Flock::lock(file, kind).map(drop).map_err(|(_, error)| error)
}

/// `flock`: one file locked for itself, another shared.
pub fn flock(place: &Path) -> Result<Check> {
    let (alone, shared) = (place.join("alone"), place.join("shared"));
    let files = [(File::create(&alone)?, FlockArg::LockExclusive), (File::create(&shared)?, FlockArg::LockShared)];
    let mut kin = Kin::fork(|| {
        Ok(Box::new(move |_| {
            let result = try_flock(&alone, FlockArg::LockSharedNonblock);
            ensure!(result == Err(nix::Error::EWOULDBLOCK), "locking the file locked for one gave {result:?}");
            try_flock(&shared, FlockArg::LockSharedNonblock).context("the file locked for many")?;
            let result = try_flock(&shared, FlockArg::LockExclusiveNonblock);
            ensure!(result == Err(nix::Error::EWOULDBLOCK), "locking the file locked for many gave {result:?}");
            Ok(String::new())
        }))
    })?;
    let held = files.map(|(file, kind)| Flock::lock(file, kind).map_err(|(_, error)| error));
    for lock in &held {
        lock.as_ref().map_err(|error| *error)?;
    }
    Ok(Box::new(move || {
        let _held = &held;
        kin.ask("look")?;
        Ok(())
    }))
}

/// What keeps `kind` from being set on ten bytes at `start`: (kind, start, length, pid).
fn obstacle(file: impl AsFd, kind: i32, start: i64, own: bool) -> Result<(i32, i64, i64, i32)> {
    let mut lock = lock_of(kind, start, 10);
    fcntl(file, if own { FcntlArg::F_OFD_GETLK(&mut lock) } else { FcntlArg::F_GETLK(&mut lock) })?;
    Ok((i32::from(lock.l_type), lock.l_start, lock.l_len, lock.l_pid))
}

/// POSIX locks on ranges: one to write, one to read.
pub fn posix(place: &Path) -> Result<Check> {
    let path = place.join("file");
    let file = File::create(&path)?;
    let file = (File::options().read(true).write(true).open(&path)?, file).0;
    let me = std::process::id().cast_signed();
    let mut kin = Kin::fork(|| {
        Ok(Box::new(move |_| {
            let file = File::options().read(true).write(true).open(&path)?;
            let found = obstacle(&file, libc::F_RDLCK, 105, false)?;
            ensure!(found == (libc::F_WRLCK, 100, 50, me), "the lock to write is {found:?}");
            let found = obstacle(&file, libc::F_WRLCK, 205, false)?;
            ensure!(found == (libc::F_RDLCK, 200, 50, me), "the lock to read is {found:?}");
            for (kind, start) in [(libc::F_RDLCK, 205), (libc::F_WRLCK, 0)] {
                let found = obstacle(&file, kind, start, false)?.0;
                ensure!(found == libc::F_UNLCK, "there is a lock at {start} that nobody made");
            }
            Ok(String::new())
        }))
    })?;
    fcntl(&file, FcntlArg::F_SETLK(&lock_of(libc::F_WRLCK, 100, 50)))?;
    fcntl(&file, FcntlArg::F_SETLK(&lock_of(libc::F_RDLCK, 200, 50)))?;
    Ok(Box::new(move || {
        let _held = &file;
        kin.ask("look")?;
        Ok(())
    }))
}

/// A lock that belongs to an open file description.
pub fn open_file_description(place: &Path) -> Result<Check> {
    let path = place.join("file");
    std::fs::write(&path, "x")?;
    let file = File::options().read(true).write(true).open(&path)?;
    fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_of(libc::F_WRLCK, 10, 20)))?;
    Ok(Box::new(move || {
        let _held = &file;
        let other = File::options().read(true).write(true).open(&path)?;
        let found = obstacle(&other, libc::F_WRLCK, 15, true)?;
        ensure!(found == (libc::F_WRLCK, 10, 20, -1), "the lock is {found:?}");
        Ok(())
    }))
}
