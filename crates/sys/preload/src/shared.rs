//! Shared memory: hidden from a dump, put in place in a restore.
//!
//! **Dump.** Criu walks shared memory by `lseek(SEEK_DATA)`. For objects of the table the answer is "no more data".
//!
//! **Restore.** `TRANSHIP_SHARED` names a table with a line `KEY file|segment PATH` for each object whose content has been
//! brought already (or will be, in the case of files, before the tasks run); lines of another kind are not for criu. Criu makes
//! an object so:
//!
//! ```text
//!   file      memfd_create, ftruncate, mmap(shared) ┐
//!   segment   shmget, shmat                         ┴▶ open "pagemap-shmem-KEY.img" ──▶ fill ──▶ munmap / shmdt
//! ```
//!
//! When it opens that image, what it made last is what it is about to fill: a file is replaced by ours, under the number
//! of its descriptor and at the address where it is mapped; a segment, which cannot be replaced, gets a copy of the content.
//!
//! Criu does this in the processes that become the tasks. They are in other namespaces already, and have closed what
//! descriptors they had inherited; but they have what was mapped before they were forked, until the very end of the
//! restore. So everything is mapped when criu opens its first image, and opened anew through `/proc/self/map_files` where
//! it is needed. The byte of each object in the file `TRANSHIP_SHARED` + `.used`, also mapped, tells the agent that it was.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicUsize, Ordering};

use super::texts::{key_of, shared_objects};
use super::{next, whole_table};

/// An object of the table, mapped for reading.
struct Object {
    key: u64,
    segment: bool,
    start: usize,
    len: usize,
    /// Its byte in the mapped file that the agent reads.
    used: &'static AtomicU8,
}

/// The shared mapping of a descriptor that was made last, and where a segment was attached last.
static LAST_FD: AtomicI32 = AtomicI32::new(-1);
static LAST_START: AtomicUsize = AtomicUsize::new(0);
static LAST_LEN: AtomicUsize = AtomicUsize::new(0);
static LAST_SEGMENT: AtomicUsize = AtomicUsize::new(0);

type Lseek = unsafe extern "C" fn(c_int, i64, c_int) -> i64;
type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type Openat = unsafe extern "C" fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int;

fn errno() -> c_int {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() }
}

pub(super) fn set_errno(value: c_int) {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = value };
}

/// Whether the descriptor is of shared memory that this dump must see empty.
fn is_hidden(fd: c_int) -> bool {
    let objects = &whole_table().objects;
    if objects.is_empty() {
        return false;
    }
    super::Open::of(fd).is_some_and(|open| objects.contains(&(open.device, open.inode)))
}

macro_rules! lseek {
    ($name:ident, $symbol:literal) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's: none.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, offset: i64, whence: c_int) -> i64 {
            static REAL: OnceLock<usize> = OnceLock::new();
            // SAFETY: the symbol is libc's function of this type.
            let real: Lseek = unsafe { std::mem::transmute(*REAL.get_or_init(|| next($symbol) as usize)) };
            if whence == libc::SEEK_DATA && is_hidden(fd) {
                set_errno(libc::ENXIO);
                return -1;
            }
            // SAFETY: handed on as it came.
            unsafe { real(fd, offset, whence) }
        }
    };
}

lseek!(lseek, c"lseek");
lseek!(lseek64, c"lseek64");

pub(super) fn real_mmap() -> Mmap {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"mmap64") as usize)) }
}

/// From so many bytes on a private mapping may be a reservation of addresses.
const LARGE: usize = 1 << 30;

/// Whether a mapping may be one of those that programs reserve addresses with, without access and without taking memory for them
/// (MariaDB: 8 TiB). To fill it, criu makes it writable first, and then it counts as memory that the kernel may have to find.
fn is_reserved(len: usize, flags: c_int) -> bool {
    let own = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    len >= LARGE && flags & (libc::MAP_TYPE | libc::MAP_ANONYMOUS) == own
}

/// Whether a mapping consists of reserved huge pages (hugetlb). Of those that libc makes for criu none is a task's: it looks at them,
/// fills them, or tries the kernel. The kernel would set aside pages for each, which there need not be.
fn is_of_huge_pages(flags: c_int, fd: c_int) -> bool {
    if flags & libc::MAP_ANONYMOUS != 0 || fd < 0 {
        return flags & libc::MAP_HUGETLB != 0;
    }
    // SAFETY: plain integers; all zeros is a value, and the call fills it.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    unsafe { libc::fstatfs(fd, &raw mut found) == 0 && found.f_type == libc::HUGETLBFS_MAGIC }
}

macro_rules! mmap {
    ($name:ident) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's: whoever replaces a mapping must own it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            address: *mut c_void,
            len: usize,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            let flags = if is_of_huge_pages(flags, fd) { flags | libc::MAP_NORESERVE } else { flags };
            // SAFETY: handed on as it came, but that no memory may be set aside for it.
            let mut mapped = unsafe { real_mmap()(address, len, protection, flags, fd, offset) };
            if mapped == libc::MAP_FAILED && is_reserved(len, flags) && errno() == libc::ENOMEM {
                // SAFETY: handed on as it came, but that no memory is set aside for it.
                mapped = unsafe { real_mmap()(address, len, protection, flags | libc::MAP_NORESERVE, fd, offset) };
            }
            if flags & libc::MAP_TYPE == libc::MAP_SHARED && fd >= 0 && offset == 0 && mapped != libc::MAP_FAILED {
                LAST_FD.store(fd, Ordering::Relaxed);
                LAST_START.store(mapped as usize, Ordering::Relaxed);
                LAST_LEN.store(len, Ordering::Relaxed);
            }
            if mapped != libc::MAP_FAILED {
                crate::joined::prepare(mapped, protection, flags);
                crate::lineage::mapped(mapped as usize, len, protection, flags);
            }
            mapped
        }
    };
}

mmap!(mmap);
mmap!(mmap64);

/// Takes note of where a segment has been attached.
pub(super) fn attached(address: *mut c_void) {
    LAST_SEGMENT.store(address as usize, Ordering::Relaxed);
}

macro_rules! openat {
    ($name:ident) => {
        /// Stands in for libc's function of this name.
        ///
        /// # Safety
        /// As libc's: the path is a C string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(dir: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
            static REAL: OnceLock<usize> = OnceLock::new();
            // SAFETY: the symbol is libc's function of this type; a mode that is not needed is ignored.
            let real: Openat = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"openat64") as usize)) };
            // SAFETY: by contract.
            let path_of = unsafe { CStr::from_ptr(path) };
            if let Some(fd) = crate::mount_points::referred(dir, path_of, flags) {
                return fd;
            }
            let name = path_of.to_bytes();
            if name == b"smaps"
                && let Some(told) = crate::smaps(dir)
            {
                // SAFETY: as above, with a C string of our own.
                let fd = unsafe { real(libc::AT_FDCWD, told.as_ptr(), flags, mode) };
                if fd >= 0 {
                    return fd;
                }
            }
            if name.ends_with(b"/children") && crate::is_dump() {
                // SAFETY: as above.
                let fd = unsafe { real(dir, path, flags, mode) };
                return match if fd < 0 { Ok(None) } else { crate::zombies::without(fd) } {
                    Ok(seen) => seen.unwrap_or(fd),
                    Err(error) => {
                        set_errno(error.raw_os_error().unwrap_or(libc::EIO));
                        -1
                    }
                };
            }
            if let Some(fd) = crate::ipc::stands_in(name) {
                return fd;
            }
            if name.ends_with(b".img")
                && flags & libc::O_ACCMODE == libc::O_RDONLY
                && let Some(objects) = objects()
                && let Some(key) = key_of(name)
                && let Some(object) = objects.iter().rev().find(|o| o.key == key)
            {
                if let Err(error) = object.take_place() {
                    // Criu says which image it could not open, and gives up.
                    set_errno(error.raw_os_error().unwrap_or(libc::EIO));
                    return -1;
                }
                object.used.store(1, Ordering::Relaxed);
            }
            // SAFETY: handed on as it came.
            unsafe { real(dir, path, flags, mode) }
        }
    };
}

openat!(openat);
openat!(openat64);

/// What the table lists, mapped at the first call. `None`: there is no table.
fn objects() -> Option<&'static [Object]> {
    static OBJECTS: OnceLock<Vec<Object>> = OnceLock::new();
    // A table that cannot be used leaves objects empty, which the agent notices.
    let objects = OBJECTS.get_or_init(|| {
        crate::zombies::read();
        crate::ends::read();
        std::env::var_os("TRANSHIP_SHARED").and_then(|path| load(path.as_ref()).ok()).unwrap_or_default()
    });
    (!objects.is_empty()).then_some(objects)
}

fn load(path: &std::path::Path) -> io::Result<Vec<Object>> {
    let text = std::fs::read_to_string(path)?;
    let rows = shared_objects(&text);
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let mut used = path.as_os_str().to_owned();
    used.push(".used");
    let marks = File::options().read(true).write(true).create(true).truncate(true).open(used)?;
    marks.set_len(rows.len() as u64)?;
    let marks = map(&marks, rows.len(), libc::PROT_READ | libc::PROT_WRITE)?;
    rows.into_iter()
        .enumerate()
        .map(|(number, (key, segment, path))| {
            let file = File::open(path)?;
            let len = file.metadata()?.size() as usize;
            // An object without length has no image either.
            let start = if len == 0 { 0 } else { map(&file, len, libc::PROT_READ)? };
            // SAFETY: the mapping has a byte for each row, and is never removed by this library; bytes are only ever
            // accessed as atomics.
            let used = unsafe { &*std::ptr::with_exposed_provenance::<AtomicU8>(marks + number) };
            Ok(Object { key, segment, start, len, used })
        })
        .collect()
}

/// Maps a file, shared, for as long as the process lives.
pub(super) fn map(file: &File, len: usize, protection: c_int) -> io::Result<usize> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let mapped = unsafe { real_mmap()(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.expose_provenance()) }
}

impl Object {
    fn take_place(&self) -> io::Result<()> {
        if self.len == 0 || (self.segment && crate::ipc::is_stand_in()) {
            return Ok(());
        }
        if self.segment { self.fill(LAST_SEGMENT.load(Ordering::Relaxed)) } else { self.replace() }
    }

    /// Puts the file in the place of the one that criu has just made and mapped.
    fn replace(&self) -> io::Result<()> {
        let (fd, start, len) =
            (LAST_FD.load(Ordering::Relaxed), LAST_START.load(Ordering::Relaxed), LAST_LEN.load(Ordering::Relaxed));
        if fd < 0 || len > self.len.next_multiple_of(4096) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let file = self.open(libc::O_RDWR)?;
        // SAFETY: calls on descriptors; the number is that of a descriptor which criu has just opened for this object.
        let replaced = unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFD);
            let cloexec = if flags & libc::FD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 };
            libc::dup3(file.as_raw_fd(), fd, cloexec)
        };
        if replaced < 0 {
            return Err(io::Error::last_os_error());
        }
        let (address, protection) = (std::ptr::with_exposed_provenance_mut(start), libc::PROT_READ | libc::PROT_WRITE);
        let mut flags = libc::MAP_SHARED | libc::MAP_FIXED;
        if is_of_huge_pages(flags, fd) {
            flags |= libc::MAP_NORESERVE;
        }
        // SAFETY: exactly the mapping that criu has just made, of the same length; it holds zeros that nobody has read.
        let mapped = unsafe { real_mmap()(address, len, protection, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Copies the content to where criu has just attached the segment.
    fn fill(&self, start: usize) -> io::Result<()> {
        if start == 0 || start == usize::MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let file = File::from(self.open(libc::O_RDONLY)?);
        let (fd, mut at) = (file.as_raw_fd(), 0i64);
        loop {
            // SAFETY: calls on a descriptor of our own.
            let (data, hole) = unsafe {
                let data = libc::lseek64(fd, at, libc::SEEK_DATA);
                (data, if data < 0 { -1 } else { libc::lseek64(fd, data, libc::SEEK_HOLE) })
            };
            if data < 0 {
                let error = io::Error::last_os_error();
                return if error.raw_os_error() == Some(libc::ENXIO) { Ok(()) } else { Err(error) };
            }
            let (from, len) = (data as usize, (hole - data) as usize);
            let target = std::ptr::with_exposed_provenance_mut::<u8>(start + from);
            // SAFETY: criu has just attached a segment of this object's length at `start`, writable, and does nothing with
            // it meanwhile.
            let target = unsafe { std::slice::from_raw_parts_mut(target, len) };
            file.read_exact_at(target, data as u64)?;
            at = hole;
        }
    }

    /// Opens the mapped file anew.
    fn open(&self, flags: c_int) -> io::Result<OwnedFd> {
        let (start, end) = (self.start, self.start + self.len.next_multiple_of(4096));
        let link = CString::new(format!("/proc/self/map_files/{start:x}-{end:x}"))?;
        // SAFETY: the path is a C string; the descriptor is new and ours.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, link.as_ptr(), flags | libc::O_CLOEXEC) };
        if fd >= 0 {
            // SAFETY: as above.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) });
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ENOENT) {
            return Err(error);
        }
        self.open_without_proc(flags)
    }

    /// The same where the mount namespace has no procfs: by one of our own, mounted nowhere.
    fn open_without_proc(&self, flags: c_int) -> io::Result<OwnedFd> {
        const FSCONFIG_CMD_CREATE: c_int = 6;
        let checked = |fd: i64| {
            // SAFETY: a descriptor that the kernel has just made for us.
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) }) }
        };
        let (start, end) = (self.start, self.start + self.len.next_multiple_of(4096));
        let link = CString::new(format!("self/map_files/{start:x}-{end:x}"))?;
        // SAFETY: the arguments are C strings, null pointers where the calls allow them, and descriptors of our own.
        unsafe {
            let context = checked(libc::syscall(libc::SYS_fsopen, c"proc".as_ptr(), 1))?;
            let null = std::ptr::null::<c_void>();
            if libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_CMD_CREATE, null, null, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            let root = checked(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0))?;
            checked(libc::syscall(libc::SYS_openat, root.as_raw_fd(), link.as_ptr(), flags | libc::O_CLOEXEC))
        }
    }
}
