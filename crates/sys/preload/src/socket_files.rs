//! Files of Unix sockets that were renamed, or have other names. They get their names when criu has bound the sockets, each to the name that it was
//! bound to (`socket_files` of tranship-criu).
//!
//! - In a dump criu asks where the file of a socket is (`unix_resolve_name` of sk-unix.c). It finds a relative name at the end of the file's path
//!   alone, and takes a file one of whose names was removed for one without a name.
//! - In a restore the directory of the name may be gone. It is made, and removed when the file has its other name.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libc::{sockaddr, sockaddr_un, socklen_t};

use crate::sockets::real;
use crate::{Open, is_dump, is_restore, renamed, streams};

type Readlink = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize;

/// `SIOCUNIXFILE` of linux/un.h.
pub(super) const SIOCUNIXFILE: u64 = 0x89e0;
const REMOVED: &[u8] = b" (deleted)";

/// The file that criu has asked for last, and its path for criu where that is another one.
static LAST: Mutex<Option<(Open, Vec<u8>)>> = Mutex::new(None);

/// Criu has got the file of a socket.
pub(super) fn asked(socket: c_int, file: c_int) {
    let path = if is_dump() { path_for_criu(socket, file) } else { None };
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Open::of(file).zip(path);
}

fn path_for_criu(socket: c_int, file: c_int) -> Option<Vec<u8>> {
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut is: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    if unsafe { libc::fstat(file, &raw mut is) } != 0 {
        return None;
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{file}")).ok()?.into_os_string().into_vec();
    let named = link.strip_suffix(REMOVED).filter(|_| is.st_nlink > 0).unwrap_or(&link);
    let path = under_its_name(&name(socket)?, named).unwrap_or_else(|| named.to_vec());
    (path != link).then_some(path)
}

/// The path at whose end criu finds a relative name, where it does not find it in the file's own.
fn under_its_name(name: &[u8], link: &[u8]) -> Option<Vec<u8>> {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    let is_found = name.starts_with(b"/") || link.strip_suffix(name).is_some_and(|rest| rest.ends_with(b"/"));
    if is_found || name.is_empty() || link.ends_with(REMOVED) {
        return None;
    }
    let directory = Path::new(OsStr::from_bytes(link)).parent()?.as_os_str().as_bytes();
    Some([directory.strip_suffix(b"/").unwrap_or(directory), b"/", name].concat())
}

/// The name that a socket is bound to.
fn name(socket: c_int) -> Option<Vec<u8>> {
    // SAFETY: plain integers; all zeros is a value.
    let mut address: sockaddr_un = unsafe { std::mem::zeroed() };
    let mut len = size_of::<sockaddr_un>() as socklen_t;
    // SAFETY: both are ours, and fit.
    if unsafe { libc::getsockname(socket, (&raw mut address).cast(), &raw mut len) } != 0 {
        return None;
    }
    path_in(&address, len)
}

/// The path in an address of Unix.
fn path_in(address: &sockaddr_un, len: socklen_t) -> Option<Vec<u8>> {
    let len = (len as usize).checked_sub(size_of::<libc::sa_family_t>())?.min(address.sun_path.len());
    let path = address.sun_path[..len].iter().take_while(|byte| **byte != 0);
    Some(path.map(|byte| byte.cast_unsigned()).collect()).filter(|path: &Vec<u8>| !path.is_empty())
}

/// Stands in for libc's `readlink`.
///
/// # Safety
/// As libc's: `buffer` must hold `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlink(path: *const c_char, buffer: *mut c_char, size: usize) -> isize {
    let real = real!(c"readlink", Readlink);
    // SAFETY: a C string, by contract.
    let fd = if is_dump() { descriptor(unsafe { CStr::from_ptr(path) }) } else { None };
    let answer = match fd.and_then(answer) {
        Some(answer) => answer,
        None => {
            // SAFETY: handed on as it came.
            let len = unsafe { real(path, buffer, size) };
            // SAFETY: the system has filled so many bytes.
            let link = |len| unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
            let is_gone = usize::try_from(len).is_ok_and(|len| link(len).ends_with(REMOVED));
            match fd.filter(|_| is_gone).and_then(renamed::name) {
                Some(name) => name,
                None => return len,
            }
        }
    };
    let len = answer.len().min(size);
    // SAFETY: the buffer holds that many bytes, by contract.
    unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), buffer.cast(), len) };
    len.cast_signed()
}

/// The descriptor of criu's whose file a path is asked for.
fn descriptor(path: &CStr) -> Option<c_int> {
    path.to_str().ok()?.strip_prefix("/proc/self/fd/")?.parse().ok()
}

fn answer(fd: c_int) -> Option<Vec<u8>> {
    if let Some(name) = streams::name(fd) {
        return Some(name);
    }
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let (open, path) = last.as_ref()?;
    (open.fd == fd && Open::of(fd) == Some(*open)).then(|| path.clone())
}

/// Makes the directories that lack for an address of Unix; false where none was made. Called in the directory in which criu binds the socket.
///
/// # Safety
/// `address` holds `len` bytes.
pub(super) unsafe fn make_directories(address: *const sockaddr, len: socklen_t) -> bool {
    // SAFETY: plain integers; all zeros is a value.
    let mut own: sockaddr_un = unsafe { std::mem::zeroed() };
    let fits = !address.is_null() && len as usize <= size_of::<sockaddr_un>();
    if !is_restore() || !fits {
        return false;
    }
    // SAFETY: it holds that many bytes, which fit.
    unsafe { std::ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut own).cast(), len as usize) };
    let path = (c_int::from(own.sun_family) == libc::AF_UNIX).then(|| path_in(&own, len)).flatten();
    let directory = path.as_deref().and_then(|path| Path::new(OsStr::from_bytes(path)).parent());
    directory.is_some_and(|directory| !directory.exists() && std::fs::create_dir_all(directory).is_ok())
}

#[cfg(test)]
mod tests {
    use super::under_its_name;

    #[test]
    fn criu_finds_relative_names_at_the_end_of_paths() {
        let path = |name: &str, link: &str| {
            under_its_name(name.as_bytes(), link.as_bytes()).map(|path| String::from_utf8(path).unwrap())
        };
        assert_eq!(path("s.tmp", "/a/b/s").as_deref(), Some("/a/b/s.tmp"));
        assert_eq!(path("./x/s", "/s").as_deref(), Some("/x/s"));
        assert_eq!(path("../s", "/a/s").as_deref(), Some("/a/../s"));
        for (name, link) in [("s", "/a/s"), ("./b/s", "/a/b/s"), ("/a/s", "/t"), ("s", "/a/s (deleted)")] {
            assert_eq!(path(name, link), None, "{name} {link}");
        }
    }
}
