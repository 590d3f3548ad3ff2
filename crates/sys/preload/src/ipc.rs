//! System V objects of an IPC namespace that the containers of a pod share.
//!
//! Each container's images have all objects of the namespace, and criu makes them also where the tasks join a namespace that is there already. The first
//! container of a pod finds none. The others, and one that is restored once more, find what has been made, and what others may use by now. For these the
//! agent takes messages and semaphores out of the images. Segments stay there, because criu attaches none that it does not know; where `TRANSHIP_JOINED_IPC`
//! is set, each that is there already is taken for the one that criu is about to make, and its content stays as it is:
//!
//! ```text
//!   criu      "kernel/shm_next_id" = ID      shmget      shmctl(IPC_SET)      shmat     fill       shmdt
//!   instead   note ID                        ID          nothing              pages of our own     munmap
//! ```

use std::ffi::{c_int, c_void};
use std::io::{self, Write};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use super::next;
use super::shared::{map, real_mmap};

const PAGE: usize = 4096;
/// The name of the file to which criu writes the id that the next segment gets, from `/proc/sys` on.
const NEXT_ID: &[u8] = b"kernel/shm_next_id";
const NONE: i32 = -1;

/// Where what criu writes to that file is mapped.
static NOTED: AtomicUsize = AtomicUsize::new(0);
/// The segment that criu has asked for and that was there.
static FOUND: AtomicI32 = AtomicI32::new(NONE);
static FOUND_LEN: AtomicUsize = AtomicUsize::new(0);
/// The pages that criu fills in its stead.
static STAND_IN: AtomicUsize = AtomicUsize::new(0);

type Shmget = unsafe extern "C" fn(libc::key_t, usize, c_int) -> c_int;
type Shmctl = unsafe extern "C" fn(c_int, c_int, *mut libc::shmid_ds) -> c_int;
type Shmat = unsafe extern "C" fn(c_int, *const c_void, c_int) -> *mut c_void;
type Shmdt = unsafe extern "C" fn(*const c_void) -> c_int;

fn is_joined() -> bool {
    static JOINED: OnceLock<bool> = OnceLock::new();
    *JOINED.get_or_init(|| std::env::var_os("TRANSHIP_JOINED_IPC").is_some())
}

fn real_shmctl() -> Shmctl {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"shmctl") as usize)) }
}

/// What criu gets for the file of this name, if it is the one that takes the next segment's id: one that nobody else reads, so that containers that are
/// restored at the same time do not read each other's.
pub(crate) fn stands_in(name: &[u8]) -> Option<c_int> {
    if !is_joined() || !name.ends_with(NEXT_ID) {
        return None;
    }
    // SAFETY: the name is a C string; the descriptor is new.
    let fd = unsafe { libc::memfd_create(c"tranship-next-id".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a descriptor of our own, which becomes criu's when all goes well.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(PAGE as u64).ok()?;
    let noted = map(&file, PAGE, libc::PROT_READ).ok()?;
    forget(NOTED.swap(noted, Ordering::Relaxed));
    Some(file.into_raw_fd())
}

fn forget(noted: usize) {
    if noted != 0 {
        // SAFETY: a mapping of our own that nothing refers to any more.
        unsafe { libc::munmap(with_exposed_provenance_mut(noted), PAGE) };
    }
}

/// The id that criu has written for the next segment.
fn noted() -> Option<i32> {
    let at = NOTED.swap(0, Ordering::Relaxed);
    if at == 0 {
        return None;
    }
    // SAFETY: a mapping of this length, of a file that nobody writes to any more.
    let text = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(at), PAGE) };
    let end = text.iter().position(|byte| !byte.is_ascii_digit())?;
    let id = std::str::from_utf8(&text[..end]).ok()?.parse().ok();
    forget(at);
    id
}

/// Whether there is a segment of this id and length.
fn is_there(id: i32, len: usize) -> bool {
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut found: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    unsafe { real_shmctl()(id, libc::IPC_STAT, &raw mut found) == 0 && found.shm_segsz == len }
}

/// Has the kernel give the next segment this id.
fn set_next_id(id: i32) -> io::Result<()> {
    let mut file = std::fs::File::options().write(true).open("/proc/sys/kernel/shm_next_id")?;
    writeln!(file, "{id}")
}

/// Stands in for libc's `shmget`.
///
/// # Safety
/// As libc's: none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmget(key: libc::key_t, len: usize, flags: c_int) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Shmget = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"shmget") as usize)) };
    FOUND.store(NONE, Ordering::Relaxed);
    if let Some(id) = is_joined().then(noted).flatten() {
        if is_there(id, len) {
            FOUND_LEN.store(len.next_multiple_of(PAGE), Ordering::Relaxed);
            FOUND.store(id, Ordering::Relaxed);
            return id;
        }
        if let Err(error) = set_next_id(id) {
            super::shared::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
            return -1;
        }
    }
    // SAFETY: handed on as it came.
    unsafe { real(key, len, flags) }
}

/// Stands in for libc's `shmctl`.
///
/// # Safety
/// As libc's: the structure must fit the command.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmctl(id: c_int, command: c_int, structure: *mut libc::shmid_ds) -> c_int {
    if command == libc::IPC_SET && is_found(id) {
        return 0;
    }
    // SAFETY: handed on as it came.
    unsafe { real_shmctl()(id, command, structure) }
}

/// Whether criu has just asked for this segment, which was there.
fn is_found(id: c_int) -> bool {
    id != NONE && FOUND.load(Ordering::Relaxed) == id
}

/// Whether what criu is about to fill is no segment of its own making.
pub(crate) fn is_stand_in() -> bool {
    STAND_IN.load(Ordering::Relaxed) != 0
}

/// Stands in for libc's `shmat`.
///
/// # Safety
/// As libc's: an address that is given must be free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
    static REAL: OnceLock<usize> = OnceLock::new();
    if is_found(id) && address.is_null() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let (len, protection) = (FOUND_LEN.load(Ordering::Relaxed), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let mapped = unsafe { real_mmap()(null_mut(), len, protection, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            STAND_IN.store(mapped.expose_provenance(), Ordering::Relaxed);
        }
        return mapped;
    }
    if address.is_null()
        && let Some(mapped) = crate::segments::map(id, flags)
    {
        return mapped;
    }
    // SAFETY: the symbol is libc's function of this type.
    let real: Shmat = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"shmat") as usize)) };
    // SAFETY: handed on as it came.
    let attached = unsafe { real(id, address, flags) };
    super::shared::attached(attached);
    attached
}

/// Stands in for libc's `shmdt`.
///
/// # Safety
/// As libc's: nothing may use what was attached any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmdt(address: *const c_void) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    let stand_in = STAND_IN.load(Ordering::Relaxed);
    if stand_in != 0 && stand_in == address.addr() {
        STAND_IN.store(0, Ordering::Relaxed);
        // SAFETY: a mapping of our own, of this length.
        return unsafe { libc::munmap(address.cast_mut(), FOUND_LEN.load(Ordering::Relaxed)) };
    }
    if let Some(result) = crate::segments::unmap(address) {
        return result;
    }
    // SAFETY: the symbol is libc's function of this type.
    let real: Shmdt = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"shmdt") as usize)) };
    // SAFETY: handed on as it came.
    unsafe { real(address) }
}
