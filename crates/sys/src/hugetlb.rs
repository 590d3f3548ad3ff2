//! Files of reserved huge pages (hugetlb), which the kernel reads but does not write by write(2).

use std::fs::File;
use std::io::{self, IoSlice};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

/// Makes an unnamed file of huge pages of this size in bytes, a power of two. It needs none before it is written.
///
/// # Errors
/// The machine has no huge pages of this size.
pub fn create(name: &std::ffi::CStr, page: u64, flags: MFdFlags) -> io::Result<File> {
    // `MFD_HUGE_SHIFT` of linux/memfd.h.
    let size = MFdFlags::from_bits_retain(page.trailing_zeros() << 26);
    Ok(File::from(memfd_create(name, flags | MFdFlags::MFD_HUGETLB | size)?))
}

/// Writes bytes to a file that consists of huge pages of this size. All of them must be allocated, and within the file's length.
///
/// # Errors
/// EFAULT if they are not.
pub fn write(file: &File, page: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
    let start = offset / page * page;
    let len = (offset + bytes.len() as u64).next_multiple_of(page) - start;
    let size = usize::try_from(len).ok().and_then(NonZeroUsize::new).ok_or(io::ErrorKind::InvalidInput)?;
    let (protection, flags) =
        (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice replaces no memory that anyone holds.
    let mapped = unsafe { mmap(None, size, protection, flags, file.as_fd(), start.cast_signed())? };
    let mut written = 0;
    let mut done = Ok(());
    while done.is_ok() && written < bytes.len() {
        // By the kernel, which fails where an access would be a SIGBUS.
        let base = mapped.as_ptr() as usize + (offset - start) as usize + written;
        let to = [RemoteIoVec { base, len: bytes.len() - written }];
        match process_vm_writev(Pid::this(), &[IoSlice::new(&bytes[written..])], &to) {
            Ok(0) => done = Err(io::ErrorKind::WriteZero.into()),
            Ok(more) => written += more,
            Err(error) => done = Err(error.into()),
        }
    }
    // SAFETY: exactly the mapping made above, to which there are no references.
    unsafe { munmap(mapped, size.get())? };
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE: u64 = 2 << 20;

    #[test]
    fn to_write_where_there_is_no_page_is_an_error_and_no_signal() {
        let Ok(file) = create(c"huge", HUGE, MFdFlags::MFD_CLOEXEC) else {
            eprintln!("skipped: there are no huge pages of 2 MiB");
            return;
        };
        // Behind the end nobody gets a page.
        let error = write(&file, HUGE, &[7; 4096], 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
