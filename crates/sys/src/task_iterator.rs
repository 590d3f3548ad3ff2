//! BPF iterators over what belongs to one process (Documentation/bpf/bpf_iterators.rst): the kernel runs a program for each thread or
//! mapping, which writes a row of words.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use crate::bpf::{self, Instruction};
use crate::btf::Btf;

/// An iterator whose rows have so many words.
#[derive(Debug)]
pub(crate) struct TaskIterator<const WORDS: usize> {
    program: OwnedFd,
}

impl<const WORDS: usize> TaskIterator<WORDS> {
    /// Hands the kernel the program for an iterator of this name. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1.
    ///
    /// # Errors
    /// The system's; `Unsupported` where the kernel has no such iterator.
    pub fn load(btf: &Btf, name: &str, code: &[Instruction]) -> io::Result<Self> {
        let function = btf.function(name).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { program: bpf::load_iterator(code, function)? })
    }

    /// The number by which another process finds the program.
    ///
    /// # Errors
    /// The system's.
    pub fn id(&self) -> io::Result<u32> {
        bpf::id(&self.program)
    }

    /// All rows for a process; none for one that has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn rows(&self, pid: u32) -> io::Result<Vec<[u64; WORDS]>> {
        let mut bytes = Vec::with_capacity(16 << 10);
        match bpf::iterate(&self.program, pid) {
            Ok(iterator) => File::from(iterator).read_to_end(&mut bytes)?,
            // It has ended.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let row = |row: &[u8]| {
            std::array::from_fn(|word| u64::from_le_bytes(row[word * 8..word * 8 + 8].try_into().expect("8 bytes")))
        };
        Ok(bytes.chunks_exact(WORDS * 8).map(row).collect())
    }
}
