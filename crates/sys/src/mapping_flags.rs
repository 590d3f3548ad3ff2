//! The flags of a task's mappings (`vm_flags`), and whether they have a NUMA policy, without a look at their pages.
//!
//! `/proc/PID/smaps` tells them too, but counts each mapping's pages for that: 10 ms for a GiB, more on a busy machine. A BPF
//! iterator over mappings (Documentation/bpf/bpf_iterators.rst) tells them in a fraction of a microsecond each.

use std::io;

use crate::bpf::{Instruction, SEQ_WRITE, op};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;

/// One mapping of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingFlags {
    /// Its first address.
    pub start: u64,
    /// The address behind its last one.
    pub end: u64,
    /// The kernel's `vm_flags`, whose bits have no fixed meaning from one kernel to the next.
    pub flags: u64,
    /// Whether it has a NUMA policy of its own (mbind(2)).
    pub has_policy: bool,
}

/// Reads the flags of tasks' mappings.
#[derive(Debug)]
pub struct FlagsReader(TaskIterator<4>);

/// Writes `{vm_start, vm_end, vm_flags, vm_policy}` of each mapping that the iterator comes to; 0 for a field that this kernel has not.
fn program(vma: [Option<i16>; 4], seq: i16) -> Vec<Instruction> {
    let load = |target, source, offset| op(0x79, target, source, offset, 0);
    let mut code = vec![
        // The context is {meta, task, vma}; at the end of the iteration there is no mapping.
        load(6, 1, 16),
        op(0x15, 6, 0, 14, 0),
    ];
    for (field, slot) in vma.into_iter().zip([-32, -24, -16, -8]) {
        code.extend([field.map_or(op(0xb7, 2, 0, 0, 0), |field| load(2, 6, field)), op(0x7b, 10, 2, slot, 0)]);
    }
    code.extend([
        load(1, 1, 0),
        load(1, 1, seq),
        op(0xbf, 2, 10, 0, 0),
        op(0x07, 2, 0, 0, -32),
        op(0xb7, 3, 0, 0, 32),
        op(0x85, 0, 0, 0, SEQ_WRITE),
        op(0xb7, 0, 0, 0, 0),
        op(0x95, 0, 0, 0, 0),
    ]);
    code
}

impl FlagsReader {
    /// Hands the kernel the program. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        let lacking = |_| io::Error::from(io::ErrorKind::Unsupported);
        let vma = btf
            .offsets("vm_area_struct", ["vm_start", "vm_end", "vm_flags"])
            .or_else(|_| btf.offsets("vm_area_struct", ["vm_start", "vm_end", "__vm_flags"]))?;
        let [start, end, flags] = vma.map(i16::try_from);
        // Only where there is CONFIG_NUMA.
        let policy = btf.offsets("vm_area_struct", ["vm_policy"]).ok().and_then(|[at]| i16::try_from(at).ok());
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let vma = [Some(start.map_err(lacking)?), Some(end.map_err(lacking)?), Some(flags.map_err(lacking)?), policy];
        let code = program(vma, i16::try_from(seq).map_err(lacking)?);
        TaskIterator::load(&btf, "bpf_iter_task_vma", &code).map(Self)
    }

    /// The flags of all mappings of a process, in order of addresses; none of one that has ended.
    pub fn read(&self, pid: u32) -> io::Result<Vec<MappingFlags>> {
        let mapping =
            |[start, end, flags, policy]: [u64; 4]| MappingFlags { start, end, flags, has_policy: policy != 0 };
        Ok(self.0.rows(pid)?.into_iter().map(mapping).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mapping_is_told_and_a_change_of_its_flags_is_seen() {
        let reader = match FlagsReader::load() {
            Ok(reader) => reader,
            Err(error) => {
                println!("skipped: mappings' flags cannot be read by BPF here: {error}");
                return;
            }
        };
        let len = 16 << 12;
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice; nobody else knows of it.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, kind, -1, 0) };
        let of =
            |all: &[MappingFlags]| all.iter().find(|m| (m.start..m.end).contains(&(memory as u64))).copied().unwrap();
        let before = of(&reader.read(std::process::id()).unwrap());
        // SAFETY: exactly that mapping.
        assert_eq!(unsafe { libc::madvise(memory, len, libc::MADV_DONTFORK) }, 0);
        let after = of(&reader.read(std::process::id()).unwrap());
        assert_ne!(before.flags, after.flags);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let told = reader.read(std::process::id()).unwrap();
        let listed = maps.lines().filter(|line| !line.ends_with("[vsyscall]")).count();
        assert!(told.len().abs_diff(listed) <= 2, "{} {listed}", told.len());
    }

    #[test]
    fn a_process_that_is_not_there_has_none() {
        if let Ok(reader) = FlagsReader::load() {
            assert!(reader.read(4_000_000).map_or(true, |rows| rows.is_empty()));
        }
    }
}
