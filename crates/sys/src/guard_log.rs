//! Which memory became guard pages (`MADV_GUARD_INSTALL` of madvise(2)), whoever's it is.
//!
//! A guard page loses its content, and a page that stops being a guard is zeros. userfaultfd does not tell: what is put in
//! place of such a page later would be content from before the guard. So a BPF program at the end of each system call
//! (`sys_exit`) looks whether it is one that made guards. A task that goes on after such a call finds it in the log.
//!
//! Whose address space it is the kernel knows by an address (`mm_struct`), which the userfaultfd over it has, too.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use crate::bpf::{self, Assembler, If, Instruction, R6, R7, R8, R9, RingBuffer, RingReader};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;

/// linux/mman.h.
const MADV_GUARD_INSTALL: i32 = 102;
/// In `thread_info.status`: the call is one of a 32-bit program (arch/x86/include/asm/thread_info.h).
const TS_COMPAT: i32 = 2;
/// Bytes of the ring: some thousand records.
const RING: u32 = 1 << 20;
/// Ranges of one process_madvise(2) that are looked at.
const RANGES: [&str; 8] = ["range 1", "range 2", "range 3", "range 4", "range 5", "range 6", "range 7", "range 8"];

/// Slots of the program's stack.
const SCRATCH: i16 = -8;
/// The record: the address space, start, length.
const MEMORY: i16 = -32;
const START: i16 = -24;
const LENGTH: i16 = -16;
const RECORD: i32 = 24;
/// Of process_madvise: where its ranges are, and how many.
const VECTOR: i16 = -40;
const COUNT: i16 = -48;

/// Memory that was made guard pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guarded {
    /// The kernel's address of the address space ([`GuardLog::memories`]).
    pub memory: u64,
    /// First byte.
    pub start: u64,
    /// End.
    pub end: u64,
}

/// The log of a whole machine. Processes that share descriptors may each read it, one after the other.
#[derive(Debug)]
pub struct GuardLog {
    program: OwnedFd,
    ring: RingBuffer,
    files: TaskIterator<2>,
}

impl GuardLog {
    /// Prepares it.
    ///
    /// # Errors
    /// If the kernel lacks something that this takes (it is of x86-64, and describes its types), or refuses: it takes
    /// CAP_BPF and CAP_PERFMON.
    pub fn new() -> io::Result<Self> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let btf = Btf::of_kernel()?;
        let ring = RingBuffer::new(RING)?;
        let program = bpf::load_for_tracepoints(&calls(&btf, &ring)?)?;
        let files = TaskIterator::load(&btf, "bpf_iter_task_file", &memories(&btf)?)?;
        Ok(Self { program, ring, files })
    }

    /// Has calls logged for as long as what it returns is open.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn begin(&self) -> io::Result<OwnedFd> {
        bpf::attach(&self.program, c"sys_exit")
    }

    /// What reads it in this process.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn reader(&self) -> io::Result<GuardReader> {
        self.ring.reader().map(GuardReader)
    }

    /// Readable when there is something in the log.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// The kernel's address of the address space of each userfaultfd in this process's table, by its number.
    /// (Other numbers have a value without a meaning.)
    ///
    /// # Errors
    /// The system's.
    pub fn memories(&self) -> io::Result<HashMap<RawFd, u64>> {
        let rows = self.files.rows(std::process::id())?;
        Ok(rows.into_iter().map(|[number, memory]| (number as RawFd, memory)).collect())
    }
}

impl Guarded {
    pub(crate) fn parse(record: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(record.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        let (memory, start, length) = (word(0)?, word(1)?, word(2)?);
        Some(Self { memory, start, end: start.checked_add(length)? })
    }
}

/// Reads the log.
#[derive(Debug)]
pub struct GuardReader(RingReader);

impl GuardReader {
    /// What was made guards since the last call; one look at a number where that is nothing.
    pub fn read(&mut self, mut tell: impl FnMut(Guarded)) {
        self.0.read(|record| {
            if let Some(guarded) = Guarded::parse(record) {
                tell(guarded);
            }
        });
    }
}

/// At the end of each call.
fn calls(btf: &Btf, ring: &RingBuffer) -> io::Result<Vec<Instruction>> {
    let registers = btf.offsets("pt_regs", ["orig_ax", "si", "di", "dx", "r10"])?;
    let [number, second, first, third, fourth] = registers;
    let [thread, mm] = btf.offsets("task_struct", ["thread_info", "mm"])?;
    let [status] = btf.offsets("thread_info", ["status"])?;
    let mut code = Assembler::default();
    code.copy(R6, 1);
    code.argument(R8, R6, 0);
    code.argument(R7, R6, 1);
    code.read(SCRATCH, 8, (R8, number), "out");
    code.load(R9, SCRATCH);
    code.go_if(R9, If::Equal, libc::SYS_madvise as i32, "madvise");
    code.go_if(R9, If::Equal, libc::SYS_process_madvise as i32, "process_madvise");
    code.go("out");

    code.place("madvise");
    advice(&mut code, third);
    // Where a part of the range is not mapped, the rest has become guards all the same.
    code.go_if(R7, If::Equal, 0, "done");
    code.go_if(R7, If::NotEqual, -libc::ENOMEM, "out");
    code.place("done");
    task(&mut code, (thread + status, mm));
    code.read(START, 8, (R8, first), "out");
    code.read(LENGTH, 8, (R8, second), "out");
    code.send_to_ring(ring, (MEMORY, RECORD));
    code.go("out");

    code.place("process_madvise");
    advice(&mut code, fourth);
    code.go_if(R7, If::ZeroOrLess, 0, "out");
    task(&mut code, (thread + status, mm));
    code.read(VECTOR, 8, (R8, second), "out");
    code.read(COUNT, 8, (R8, third), "out");
    for (at, next) in RANGES.into_iter().enumerate() {
        code.load(R9, COUNT);
        code.go_if(R9, If::Equal, at as i32, "out");
        code.load(R9, VECTOR);
        code.read_user(START, 8, (R9, at * 16), "out");
        code.read_user(LENGTH, 8, (R9, at * 16 + 8), "out");
        code.send_to_ring(ring, (MEMORY, RECORD));
        code.go(next);
        code.place(next);
    }
    code.place("out");
    code.end();
    Ok(code.finish())
}

/// Goes out if an argument is another advice.
fn advice(code: &mut Assembler, argument: usize) {
    code.read(SCRATCH, 4, (R8, argument), "out");
    code.load(R9, SCRATCH);
    code.go_if(R9, If::NotEqual, MADV_GUARD_INSTALL, "out");
}

/// Puts the address space of the current task into the record. Goes out for calls of 32-bit programs.
fn task(code: &mut Assembler, (status, mm): (usize, usize)) {
    code.current_task(R9);
    code.read(SCRATCH, 4, (R9, status), "out");
    code.read(MEMORY, 8, (R9, mm), "out");
    code.load(R9, SCRATCH);
    code.go_if(R9, If::Bits, TS_COMPAT, "out");
}

/// Writes a row for each descriptor: its number, and the address space of the userfaultfd that it is.
fn memories(btf: &Btf) -> io::Result<Vec<Instruction>> {
    const NUMBER: i16 = -16;
    const OF: i16 = -8;
    let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
    let seq = i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?;
    let [private] = btf.offsets("file", ["private_data"])?;
    let [mm] = btf.offsets("userfaultfd_ctx", ["mm"])?;
    let mut code = Assembler::default();
    code.copy(R6, 1);
    // The context is {meta, task, number, file}; at the end of the iteration there is no file.
    code.argument(R7, R6, 3);
    code.go_if(R7, If::Equal, 0, "end");
    code.argument(R8, R6, 2);
    code.shorten(R8);
    code.store(NUMBER, R8);
    code.read(OF, 8, (R7, private), "end");
    code.load(R9, OF);
    code.read_or_zero(OF, 8, (R9, mm));
    code.write(R6, seq, (NUMBER, 16));
    code.place("end");
    code.end();
    Ok(code.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::userfault::tests::own;

    const PAGE: u64 = 4096;

    fn advise(start: u64, pages: u64, advice: i32) -> bool {
        // SAFETY: scratch pages, to which nobody has a reference.
        unsafe { libc::madvise(start as *mut _, (pages * PAGE) as usize, advice) == 0 }
    }

    /// Needs root, and Linux 6.13.
    #[test]
    fn what_becomes_guards_is_told_with_the_address_space_of_its_userfaultfd() {
        let memory = Scratch::map(16, libc::MAP_PRIVATE).unwrap();
        if !advise(memory.start(), 1, MADV_GUARD_INSTALL) {
            return eprintln!("skipped: this kernel has no guard pages");
        }
        let log = match GuardLog::new() {
            Ok(log) => log,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let mut reader = log.reader().unwrap();
        let logging = log.begin().unwrap();
        let userfault = own();
        let here = log.memories().unwrap()[&userfault.number()];
        let start = memory.start();
        assert!(advise(start + 4 * PAGE, 2, MADV_GUARD_INSTALL));
        assert!(advise(start + 8 * PAGE, 2, libc::MADV_DONTNEED));
        assert!(!advise(start + 1, 2, MADV_GUARD_INSTALL));
        let vector = [[start + 10 * PAGE, PAGE], [start + 12 * PAGE, 2 * PAGE]];
        // SAFETY: the ranges are scratch pages; the vector lives as long as the call.
        let advised = unsafe {
            let pidfd = libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0);
            libc::syscall(libc::SYS_process_madvise, pidfd, vector.as_ptr(), 2, MADV_GUARD_INSTALL, 0)
        };
        drop(logging);
        assert!(advise(start + 15 * PAGE, 1, MADV_GUARD_INSTALL));
        let mut told = Vec::new();
        reader.read(|guarded| {
            if guarded.memory == here {
                told.push(((guarded.start - start) / PAGE, (guarded.end - start) / PAGE));
            }
        });
        let by_vector: &[(u64, u64)] = if advised > 0 { &[(10, 11), (12, 14)] } else { &[] };
        assert_eq!(told, [&[(4, 6)], by_vector].concat());
        reader.read(|_| panic!("told twice"));
    }
}
