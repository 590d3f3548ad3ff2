//! The memory that each thread of a restored process uses first: a page on its stack, and its area for restartable sequences
//! (`struct rseq`), which the kernel reads and writes when criu registers it again.

use std::io;

use crate::bpf::{Assembler, If, R6, R8, R9};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;

/// Reads where it is.
#[derive(Debug)]
pub struct ThreadMemory(TaskIterator<2>);

impl ThreadMemory {
    /// Hands the kernel the program that reads it. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator or no such areas, or this process may not load one.
    pub fn load() -> io::Result<Self> {
        const AREA: i16 = -16;
        const STACK: i16 = -8;
        let btf = Btf::of_kernel()?;
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let seq = i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?;
        // Newer kernels have a structure there, which begins with the pointer.
        let [area] = btf.offsets("task_struct", ["rseq"])?;
        let [stack] = btf.offsets("pt_regs", ["sp"])?;
        let mut a = Assembler::default();
        a.copy(R9, 1);
        // The context is {meta, task}; at the end of the iteration there is no task.
        a.argument(R6, R9, 1);
        a.go_if(R6, If::Equal, 0, "end");
        a.read(AREA, 8, (R6, area), "end");
        a.task_registers(R8, R6);
        a.read(STACK, 8, (R8, stack), "end");
        a.write(R9, seq, (AREA, 16));
        a.place("end");
        a.end();
        TaskIterator::load(&btf, "bpf_iter_task", &a.finish()).map(Self)
    }

    /// Addresses for all threads of a process, in no order: each one's stack pointer, and its area, where it has one. None of a
    /// process that has ended. The stack pointer of a thread that runs is the one with which it last entered the kernel.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn read(&self, pid: u32) -> io::Result<Vec<u64>> {
        Ok(self.0.rows(pid)?.into_iter().flatten().filter(|address| *address != 0).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn each_thread_of_libc_has_a_stack_and_an_area() {
        let memory = match ThreadMemory::load() {
            Ok(memory) => memory,
            Err(error) => {
                println!("skipped: the memory of threads cannot be read by BPF here: {error}");
                return;
            }
        };
        let (hold, held) = channel::<()>();
        let (say, said) = channel();
        let thread = std::thread::spawn(move || {
            let local = 0u8;
            // SAFETY: no arguments.
            let area = unsafe { libc::pthread_self() };
            say.send((&raw const local as u64, area)).unwrap();
            held.recv().unwrap_err();
        });
        let (local, thread_block) = said.recv().unwrap();
        // The thread waits below its local variable. The C library puts the area beside the thread's own block.
        let is_stack = |address: &u64| (local - (64 << 10)..local + (64 << 10)).contains(address);
        let is_area = |address: &u64| address.abs_diff(thread_block) < 64 << 10;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let found = memory.read(std::process::id()).unwrap();
            if found.iter().any(is_stack) && found.iter().any(is_area) {
                break;
            }
            assert!(Instant::now() < deadline, "{found:x?}, the stack at {local:x}, the block at {thread_block:x}");
        }
        drop(hold);
        thread.join().unwrap();
    }
}
