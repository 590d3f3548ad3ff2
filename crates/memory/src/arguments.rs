//! The pages with the arguments and the environment that a process was started with. The kernel reads them for others, who ask for
//! `/proc/PID/cmdline` and `environ` as `ps` does; unlike the process itself it does not wait for a page that is missing, but tells less. So
//! these pages are in place before the process runs.

use std::io::{self, IoSliceMut};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use tranship_sys::process;

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

/// Has a stopped process get these pages, by reading them as another process may, who waits for what is missing. Returns their bytes:
/// what the process has unmapped has none.
///
/// # Errors
/// The process is gone; or the system's refusal.
pub fn fetch(pid: u32) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK];
    let mut fetched = 0;
    for range in process::strings(pid)? {
        let mut at = range.start;
        while at < range.end {
            let len = CHUNK.min((range.end - at) as usize);
            let remote = RemoteIoVec { base: at as usize, len };
            match process_vm_readv(Pid::from_raw(pid as i32), &mut [IoSliceMut::new(&mut buffer[..len])], &[remote]) {
                Ok(0) | Err(Errno::EFAULT) => break,
                Ok(read) => at += read as u64,
                Err(error) => return Err(error.into()),
            }
        }
        fetched += at - range.start;
    }
    Ok(fetched)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_the_kernel_tells_is_read() {
        let told = |file| std::fs::read(format!("/proc/self/{file}")).unwrap().len() as u64;
        assert_eq!(fetch(std::process::id()).unwrap(), told("cmdline") + told("environ"));
        assert!(fetch(u32::MAX / 2).is_err());
    }
}
