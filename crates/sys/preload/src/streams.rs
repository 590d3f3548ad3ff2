//! Sockets of the node that are a container's standard streams. CRIU knows the sockets of the
//! container's network namespaces alone. As files that are outside of the container it takes what
//! has an inode and a mount (files-reg.c, `dump_one_reg_file`), as sockets have, too: so it is told
//! that they are regular files.

use std::ffi::c_int;
use std::sync::OnceLock;

use crate::sockets::real;

type Fstat = unsafe extern "C" fn(c_int, *mut libc::stat) -> c_int;

/// The inodes of those sockets, with commas between them.
const VARIABLE: &str = "TRANSHIP_STREAMS";

fn streams() -> &'static [u64] {
    static STREAMS: OnceLock<Vec<u64>> = OnceLock::new();
    let read = || std::env::var(VARIABLE).unwrap_or_default().split(',').filter_map(|one| one.parse().ok()).collect();
    STREAMS.get_or_init(read)
}

fn is_stream(found: &libc::stat) -> bool {
    found.st_mode & libc::S_IFMT == libc::S_IFSOCK && streams().contains(&found.st_ino)
}

/// The path that criu finds for one of those sockets: a regular file must have one.
pub(super) fn name(fd: c_int) -> Option<Vec<u8>> {
    if streams().is_empty() {
        return None;
    }
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let real = real!(c"fstat", Fstat);
    // SAFETY: the structure is ours.
    let known = unsafe { real(fd, &raw mut found) } == 0;
    (known && is_stream(&found)).then(|| format!("/socket:[{}]", found.st_ino).into_bytes())
}

/// Makes a regular file of what was found, if it is one of those sockets.
///
/// # Safety
/// `found` points to what the system has filled.
unsafe fn disguise(found: *mut libc::stat) {
    // SAFETY: by contract.
    let found = unsafe { &mut *found };
    if is_stream(found) {
        found.st_mode = found.st_mode & !libc::S_IFMT | libc::S_IFREG;
    }
}

macro_rules! fstat {
    ($name:ident, $symbol:literal) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's: the structure must be the caller's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, found: *mut libc::stat) -> c_int {
            let real = real!($symbol, Fstat);
            // SAFETY: handed on as it came.
            let done = unsafe { real(fd, found) };
            if done == 0 {
                // SAFETY: the system has filled it.
                unsafe { disguise(found) };
            }
            done
        }
    };
}

fstat!(fstat, c"fstat");
fstat!(fstat64, c"fstat64");
