//! The code that the kernel maps into each process (vdso(7)), where a `syscall` instruction is found.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// More than any kernel's: some pages.
const LARGEST: u64 = 64 << 10;
#[cfg(target_arch = "x86_64")]
const SYSCALL: &[u8] = &[0x0f, 0x05];

/// The addresses, if a line of `/proc/PID/maps` is of the vdso. A program chooses the names of files, but not that a mapping has no
/// file; and names that it gives to anonymous memory stand in `[anon:…]`.
pub(crate) fn range(line: &str) -> Option<Range<u64>> {
    let mut columns = line.split_ascii_whitespace();
    let (start, end) = columns.next()?.split_once('-')?;
    let permissions = columns.next()?;
    let (_offset, device, inode) = (columns.next()?, columns.next()?, columns.next()?);
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let is_kernels = device == "00:00" && inode == "0" && columns.eq(["[vdso]"]);
    (is_kernels && permissions.as_bytes().get(2) == Some(&b'x') && range.end.checked_sub(range.start)? <= LARGEST)
        .then_some(range)
}

/// The vdso of a process.
#[derive(Debug, Clone)]
#[cfg(target_arch = "x86_64")]
pub(crate) struct Vdso {
    start: u64,
    code: Vec<u8>,
    /// Where in `code` a `syscall` instruction is.
    syscall: usize,
}

#[cfg(target_arch = "x86_64")]
impl Vdso {
    /// Finds it.
    ///
    /// # Errors
    /// `Unsupported`: there is none, or none that makes system calls.
    pub fn of(process: u32) -> io::Result<Self> {
        let unsupported = |what| io::Error::new(io::ErrorKind::Unsupported, what);
        let mut maps = BufReader::new(File::open(format!("/proc/{process}/maps"))?);
        let mut line = Vec::new();
        // Line by line: a process has as many mappings, with as long names, as it likes.
        let vdso = loop {
            line.clear();
            if maps.read_until(b'\n', &mut line)? == 0 {
                return Err(unsupported("the process has no vdso"));
            }
            if let Some(range) = std::str::from_utf8(&line).ok().and_then(range) {
                break range;
            }
        };
        let code = read(process, vdso.start, (vdso.end - vdso.start) as usize)?;
        let at = code.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL);
        let syscall = at.ok_or_else(|| unsupported("the process's vdso makes no system calls"))?;
        Ok(Self { start: vdso.start, code, syscall })
    }

    /// Whether a process still has it there. One that has executed another program since has it elsewhere.
    pub fn is_in(&self, process: u32) -> bool {
        read(process, self.start, self.code.len()).is_ok_and(|code| code == self.code)
    }

    /// Address of a `syscall` instruction.
    pub fn syscall_instruction(&self) -> u64 {
        self.start + self.syscall as u64
    }
}

fn read(process: u32, address: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    File::open(format!("/proc/{process}/mem"))?.read_exact_at(&mut bytes, address)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_s_own_mapping_counts() {
        let vdso = "7ffd1c5f9000-7ffd1c5fb000 r-xp 00000000 00:00 0                          [vdso]\n";
        assert_eq!(range(vdso), Some(0x7ffd_1c5f_9000..0x7ffd_1c5f_b000));
        for other in [
            "100000000-200000000 r-xp 00000000 00:2a 77                         [vdso]",
            "7ffd1c5f9000-7ffd1c5fb000 r-xp 00000000 00:00 77                         [vdso]",
            "7ffd1c5f9000-7ffd1c5fb000 r-xp 00000000 00:2a 0                          [vdso]",
            "7ffd1c5f9000-7ffd1c5fb000 r-xp 00000000 00:00 0                          /tmp/a [vdso]",
            "7ffd1c5f9000-7ffd1c5fb000 r-xp 00000000 00:00 0                          [anon:x [vdso]",
            "7ffd1c5f9000-7ffd1c5fb000 r--p 00000000 00:00 0                          [vdso]",
            "7ffd00000000-7ffe00000000 r-xp 00000000 00:00 0                          [vdso]",
            "7ffd1c5f9000-7ffd1c5f9000 r-xp",
            "",
        ] {
            assert_eq!(range(other), None, "{other}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn this_process_has_one() {
        let vdso = Vdso::of(std::process::id()).unwrap();
        assert!(vdso.is_in(std::process::id()) && vdso.syscall_instruction() > 0);
        assert!(!Vdso { start: vdso.start + 1, ..vdso }.is_in(std::process::id()));
    }
}
