//! Restartable sequences (rseq(2), kernel/rseq.c): the kernel sends a thread that was kept from running inside of one to the
//! sequence's abort handler. It looks for that at the instruction pointer with which the thread goes on.

use std::io;

use crate::bpf::{Assembler, If, R6, R9};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;
use crate::tracee::Tracee;

const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
/// Where the pointer to the present sequence is in `struct rseq`.
const SEQUENCE: u64 = 8;

/// `struct ptrace_rseq_configuration` of linux/ptrace.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Configuration {
    pointer: u64,
    size: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Configuration>() == 24);

/// Where a stopped thread with this instruction pointer is to go on: its abort handler, if it is inside of a sequence. A thread that
/// has run other code since then is not sent there by the kernel any more.
///
/// # Errors
/// The sequence is one for which the kernel kills the thread, or it cannot be read.
pub(crate) fn resumption(tracee: Tracee, pointer: u64) -> io::Result<u64> {
    let mut configuration = Configuration::default();
    // SAFETY: the request takes the structure's size; it consists of numbers.
    if unsafe { tracee.describe(GET_RSEQ_CONFIGURATION, &mut configuration) }.is_err() || configuration.pointer == 0 {
        return Ok(pointer);
    }
    let sequence = tracee.peek(configuration.pointer + SEQUENCE)?;
    if sequence == 0 {
        return Ok(pointer);
    }
    // struct rseq_cs: version and flags, start, length, abort handler.
    let [version_and_flags, start, length, abort] =
        [0, 8, 16, 24].map(|offset| tracee.peek(sequence.wrapping_add(offset)));
    let (start, length, abort) = (start?, length?, abort?);
    if pointer.wrapping_sub(start) >= length {
        return Ok(pointer);
    }
    let signature = tracee.peek(abort.wrapping_sub(4))? as u32;
    if version_and_flags? as u32 != 0 || abort.wrapping_sub(start) < length || signature != configuration.signature {
        return Err(io::Error::other("a restartable sequence of the thread is malformed"));
    }
    Ok(abort)
}

/// Reads where the threads of a process have registered their areas for restartable sequences (`struct rseq`).
#[derive(Debug)]
pub struct Areas(TaskIterator<1>);

impl Areas {
    /// Hands the kernel the program that reads them. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator or no such areas, or this process may not load one.
    pub fn load() -> io::Result<Self> {
        const ROW: i16 = -8;
        let btf = Btf::of_kernel()?;
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let seq = i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?;
        // Newer kernels have a structure there, which begins with the pointer.
        let [area] = btf.offsets("task_struct", ["rseq"])?;
        let mut a = Assembler::default();
        a.copy(R9, 1);
        // The context is {meta, task}; at the end of the iteration there is no task.
        a.argument(R6, R9, 1);
        a.go_if(R6, If::Equal, 0, "end");
        a.read(ROW, 8, (R6, area), "end");
        a.write(R9, seq, (ROW, 8));
        a.place("end");
        a.end();
        TaskIterator::load(&btf, "bpf_iter_task", &a.finish()).map(Self)
    }

    /// The addresses of the areas of all threads of a process that have one, in no order; none of a process that has ended.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn read(&self, pid: u32) -> io::Result<Vec<u64>> {
        Ok(self.0.rows(pid)?.into_iter().map(|[area]| area).filter(|area| *area != 0).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn each_thread_of_libc_has_an_area() {
        let areas = match Areas::load() {
            Ok(areas) => areas,
            Err(error) => {
                println!("skipped: areas for restartable sequences cannot be read by BPF here: {error}");
                return;
            }
        };
        let before = areas.read(std::process::id()).unwrap();
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        let thread = std::thread::spawn(move || {
            let local = 0u8;
            say.send(&raw const local as u64).unwrap();
            held.recv().unwrap_err();
        });
        let stack = said.recv().unwrap();
        let after = areas.read(std::process::id()).unwrap();
        drop(hold);
        thread.join().unwrap();
        // The C library puts it above the thread's stack. Others of this process's threads may come and go.
        let new: Vec<u64> = after.into_iter().filter(|area| !before.contains(area)).collect();
        assert!(new.iter().any(|area| (stack..stack + (16 << 20)).contains(area)), "{new:x?}, the stack at {stack:x}");
    }
}
