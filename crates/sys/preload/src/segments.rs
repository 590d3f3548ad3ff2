//! Looking at System V segments without leaving a mark. Criu attaches each segment, which sets its times of attaching
//! and detaching, and the process that used it last (shmctl(2)). A segment that a process has attached is mapped here
//! as the file that it is, of `/proc/PID/map_files`, which leaves none. One that nobody has attached can only be
//! attached.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::is_dump;
use crate::texts::segments;

/// Where segments are mapped, and how many bytes.
static MAPPED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The mappings of segments of this process's IPC namespace. Criu enters it in a process of its own.
fn attached() -> &'static HashMap<c_int, PathBuf> {
    static ATTACHED: OnceLock<HashMap<c_int, PathBuf>> = OnceLock::new();
    ATTACHED.get_or_init(|| {
        let namespace = std::fs::read_link("/proc/self/ns/ipc").ok();
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        let inside = processes.filter(|process| std::fs::read_link(process.join("ns/ipc")).ok() == namespace);
        let found = inside.flat_map(|process| {
            let maps = std::fs::read(process.join("maps")).unwrap_or_default();
            let found: Vec<_> = segments(&String::from_utf8_lossy(&maps)).collect();
            found.into_iter().map(move |(id, name)| (id, process.join("map_files").join(name)))
        });
        found.collect()
    })
}

/// Maps a segment that a dump looks at; `None` where it can only be attached.
pub(crate) fn map(id: c_int, flags: c_int) -> Option<*mut c_void> {
    if !is_dump() || flags != libc::SHM_RDONLY {
        return None;
    }
    let file = File::open(attached().get(&id)?).ok()?;
    let len = usize::try_from(file.metadata().ok()?.len()).ok()?;
    // SAFETY: a new mapping, which is undone by `unmap`.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner).push((at as usize, len));
    Some(at)
}

/// Undoes [`map`]; `None` of what is none of its mappings.
pub(crate) fn unmap(address: *const c_void) -> Option<c_int> {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let which = mapped.iter().position(|(at, _)| *at == address as usize)?;
    let (_, len) = mapped.swap_remove(which);
    // SAFETY: our own mapping, which its only user gives up.
    Some(unsafe { libc::munmap(address.cast_mut(), len) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_found_by_their_numbers() {
        let maps = "007f00-7f10 rw-s 00000000 00:01 7 /SYSV00000000 (deleted)\n7f10-7f20 rw-s 00000000 00:01 8 /x\n";
        assert_eq!(segments(maps).collect::<Vec<_>>(), [(7, "7f00-7f10".to_owned())]);
    }
}
