//! Mappings without a file: criu looks for each mapping in `/proc/PID/map_files`, and the kernel takes its time to say that it
//! is not there. Where the agent has told of the task's mappings, these are known.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::shared::set_errno;
use super::texts::without_file;
use super::{Open, next, smaps_of};

type Fstatat = unsafe extern "C" fn(c_int, *const c_char, *mut libc::stat, c_int) -> c_int;

/// The same for the directory behind a descriptor; empty if that is none of a task's, or nothing was told of the task.
fn names_in(directory: c_int) -> HashSet<String> {
    let read = || {
        let path = std::fs::read_link(format!("/proc/self/fd/{directory}")).ok()?;
        let (_, pid) = path.to_str()?.strip_suffix("/map_files")?.rsplit_once('/')?;
        let text = smaps_of(pid.parse().ok()?)?;
        let text = std::fs::read(text.to_str().ok()?).ok()?;
        Some(without_file(&String::from_utf8_lossy(&text)))
    };
    read().unwrap_or_default()
}

/// Whether it is known that there is no such mapping of a file. Criu goes from task to task.
fn is_without_file(directory: c_int, name: &CStr) -> bool {
    static LAST: Mutex<Option<(Open, HashSet<String>)>> = Mutex::new(None);
    let (Ok(name), Some(open)) = (name.to_str(), Open::of(directory)) else { return false };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((known, names)) if *known == open => names.contains(name),
        _ => last.insert((open, names_in(directory))).1.contains(name),
    }
}

macro_rules! fstatat {
    ($name:ident, $symbol:literal) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            directory: c_int,
            path: *const c_char,
            stat: *mut libc::stat,
            flags: c_int,
        ) -> c_int {
            static REAL: OnceLock<usize> = OnceLock::new();
            // SAFETY: the symbol is libc's function of this type.
            let real: Fstatat = unsafe { std::mem::transmute(*REAL.get_or_init(|| next($symbol) as usize)) };
            // SAFETY: a path is a C string, by contract.
            if flags == libc::AT_SYMLINK_NOFOLLOW && is_without_file(directory, unsafe { CStr::from_ptr(path) }) {
                set_errno(libc::ENOENT);
                return -1;
            }
            // SAFETY: handed on as it came.
            unsafe { real(directory, path, stat, flags) }
        }
    };
}

fstatat!(fstatat, c"fstatat");
fstatat!(fstatat64, c"fstatat64");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_to_be_without_a_file_is_not_in_map_files() {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let names = without_file(&text);
        assert!(names.len() > 3, "{names:?}");
        for name in &names {
            assert!(std::fs::symlink_metadata(format!("/proc/self/map_files/{name}")).is_err(), "{name}");
        }
        let all = std::fs::read_dir("/proc/self/map_files").unwrap().count();
        assert!(all > 3, "there are mappings of files");
    }
}
