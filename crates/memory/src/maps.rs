//! Which parts of an address space the memory plane moves: the text of `/proc/PID/maps`, parsed.

use tranship_types::PageRange;

/// One line of `/proc/PID/maps`, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: PageRange,
    /// Whether the process itself may read it.
    pub readable: bool,
    /// Whether the process itself may write to it.
    pub writable: bool,
    /// Whether code may run there.
    pub executable: bool,
    /// Whether writes stay in this address space.
    pub private: bool,
    /// Where in the file behind it the first byte is.
    pub offset: u64,
    /// Device of the file behind it, as `st_dev` has it.
    pub device: u64,
    /// Inode of the file behind it; 0 where there is none.
    pub inode: u64,
    /// The name column: a path, `[heap]`, `[anon:…]` or nothing.
    pub name: String,
}

impl Mapping {
    /// Parses one line.
    pub fn parse(line: &str) -> Option<Self> {
        let mut columns = line.split_ascii_whitespace();
        let (start, end) = columns.next()?.split_once('-')?;
        let permissions = columns.next()?.as_bytes();
        let offset = u64::from_str_radix(columns.next()?, 16).ok()?;
        let (major, minor) = columns.next()?.split_once(':')?;
        let device =
            nix::sys::stat::makedev(u64::from_str_radix(major, 16).ok()?, u64::from_str_radix(minor, 16).ok()?);
        let inode = columns.next()?.parse().ok()?;
        // The name may contain blanks.
        let name = columns.collect::<Vec<_>>().join(" ");
        Some(Self {
            range: PageRange::new(u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?)?,
            readable: *permissions.first()? == b'r',
            writable: *permissions.get(1)? == b'w',
            executable: *permissions.get(2)? == b'x',
            private: *permissions.get(3)? == b'p',
            offset,
            device,
            inode,
            name,
        })
    }

    /// Whether it is private anonymous memory: what CRIU restores lazily, so what can be hidden from its dump and
    /// supplied through userfaultfd. The rest (shared memory, private pages of files, the vdso …) is CRIU's.
    pub fn is_private_anonymous(&self) -> bool {
        self.private
            && self.inode == 0
            && (self.name.is_empty()
                || self.name == "[heap]"
                || self.name.starts_with("[stack")
                || self.name.starts_with("[anon:"))
    }

    /// Whether its pages are a file's until they are written, and then the process's own. Not code, of which criu borrows some
    /// while it dumps; and not devices, of which nobody knows what they do.
    pub fn is_private_file(&self) -> bool {
        let device = self.name.starts_with("/dev/") && !self.name.starts_with("/dev/shm/");
        self.private && !self.executable && self.inode != 0 && self.name.starts_with('/') && !device
    }
}

/// Start addresses of the locked mappings among the text of `/proc/PID/smaps`: CRIU populates them at restore instead
/// of leaving them to userfaultfd.
pub fn locked_starts(smaps: &str) -> Vec<u64> {
    let mut current = None;
    let mut locked = Vec::new();
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_ascii_whitespace().any(|f| matches!(f, "lo" | "pf" | "io" | "ss")) {
                locked.extend(current);
            }
        } else if let Some(mapping) = Mapping::parse(line) {
            current = Some(mapping.range.start);
        }
    }
    locked
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn anonymous_memory_is_told_from_the_rest() {
        let ours = [
            "7f00-8000 rw-p 00000000 00:00 0 ",
            "55d0a8000000-55d0a8021000 rw-p 00000000 00:00 0                          [heap]",
            "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]",
            "7f0000000000-7f0000001000 ---p 00000000 00:00 0                          [anon:a name]",
        ];
        for line in &ours[1..] {
            assert!(Mapping::parse(line).unwrap().is_private_anonymous(), "{line}");
        }
        assert!(Mapping::parse(ours[0]).is_none(), "7f00 is not page-aligned");
        let shared = Mapping::parse("7f0000000000-7f0000001000 rw-s 00003000 00:01 77   /memfd:a b (deleted)").unwrap();
        assert_eq!((shared.offset, shared.device, shared.inode), (0x3000, 1, 77));
        let criu = [
            "7f0000000000-7f0000001000 rw-s 00000000 00:01 77                         /dev/zero (deleted)",
            "7f0000000000-7f0000001000 rw-p 00001000 fe:00 123                        /usr/lib/a b.so",
            "7ffc00000000-7ffc00004000 r--p 00000000 00:00 0                          [vvar]",
            "7ffc00000000-7ffc00004000 r-xp 00000000 00:00 0                          [vdso]",
        ];
        for line in criu {
            assert!(!Mapping::parse(line).unwrap().is_private_anonymous(), "{line}");
        }
        let of_files: Vec<bool> = criu.iter().map(|line| Mapping::parse(line).unwrap().is_private_file()).collect();
        assert_eq!(of_files, [false, true, false, false]);
        let code = Mapping::parse("7f0000000000-7f0000001000 r-xp 00001000 fe:00 123 /usr/lib/a.so").unwrap();
        assert!(!code.is_private_file());
    }

    #[test]
    fn locked_mappings_are_found() {
        let smaps = "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr mr mw me lo ac \n\
                     7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac \n";
        assert_eq!(locked_starts(smaps), vec![0x7f00_0000_0000]);
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in ".{0,120}") {
            let _ = Mapping::parse(&line);
            let _ = locked_starts(&line);
        }
    }
}
