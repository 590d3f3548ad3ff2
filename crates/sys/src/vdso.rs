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
fn range(line: &str) -> Option<Range<u64>> {
    let mut columns = line.split_ascii_whitespace();
    let (start, end) = columns.next()?.split_once('-')?;
    let permissions = columns.next()?;
    let (_offset, device, inode) = (columns.next()?, columns.next()?, columns.next()?);
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let is_kernels = device == "00:00" && inode == "0" && columns.eq(["[vdso]"]);
    (is_kernels && permissions.as_bytes().get(2) == Some(&b'x') && range.end.checked_sub(range.start)? <= LARGEST)
        .then_some(range)
}

/// Address of a `syscall` instruction in a process's vdso.
///
/// # Errors
/// `Unsupported`: there is none.
#[cfg(target_arch = "x86_64")]
pub(crate) fn syscall_instruction(process: u32) -> io::Result<u64> {
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
    let mut code = vec![0; (vdso.end - vdso.start) as usize];
    File::open(format!("/proc/{process}/mem"))?.read_exact_at(&mut code, vdso.start)?;
    let at = code.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL);
    Ok(vdso.start + at.ok_or_else(|| unsupported("the process's vdso makes no system calls"))? as u64)
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
        assert!(syscall_instruction(std::process::id()).unwrap() > 0);
    }
}
