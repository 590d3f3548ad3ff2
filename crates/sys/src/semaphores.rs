//! What the kernel undoes of a process's semaphore operations when the process ends (`SEM_UNDO`, semop(2)). /proc does not show it; a BPF
//! iterator over tasks reads it.

use std::collections::HashMap;
use std::io;

use crate::bpf::{Assembler, If, Instruction, R6, R7, R8, R9};
use crate::btf::Btf;
use crate::shared_namespaces;
use crate::task_iterator::TaskIterator;

/// Sets of semaphores that are looked at for each process.
const SETS: usize = 16;
/// Semaphores of a set that are looked at, four in a word.
const SEMAPHORES: usize = 64;
const WORDS: usize = 1 + SEMAPHORES / 4;
/// In the place of a set's id: there are more sets than are looked at.
const MORE: u64 = u64::MAX;

/// Reads what is undone when tasks end.
#[derive(Debug)]
pub struct UndoReader(TaskIterator<WORDS>);

struct Offsets {
    seq: i16,
    /// Of a task: its list.
    list: usize,
    /// Of a list: its first element.
    first: usize,
    /// Of an element, which begins with the pointer to the next one.
    set: usize,
    adjustments: usize,
}

impl Offsets {
    fn of(btf: &Btf) -> io::Result<Self> {
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let [first] = btf.offsets("sem_undo_list", ["list_proc"])?;
        let [next, set, adjustments] = btf.offsets("sem_undo", ["list_proc", "semid", "semadj"])?;
        if next != 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self {
            seq: i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?,
            list: btf.offset_within("task_struct", &["sysvsem", "undo_list"])?,
            first,
            set,
            // In older kernels a pointer, which begins at a multiple of 8, is followed by what it points to.
            adjustments: if adjustments == set + 4 { adjustments } else { adjustments + 8 },
        })
    }
}

/// Writes a row for each set of semaphores in a task's list: its id, and what is added to each semaphore.
fn program(at: &Offsets) -> Vec<Instruction> {
    const ROW: i16 = -8 * WORDS as i16;
    const POINTER: i16 = ROW - 8;
    let row = (ROW, 8 * WORDS as i32);
    let mut a = Assembler::default();
    a.copy(R9, 1);
    // The context is {meta, task}; at the end of the iteration there is no task.
    a.argument(R6, R9, 1);
    a.go_if(R6, If::Equal, 0, "end");
    a.read(POINTER, 8, (R6, at.list), "end");
    a.load(R7, POINTER);
    a.go_if(R7, If::Equal, 0, "end");
    a.read(POINTER, 8, (R7, at.first), "end");
    a.load(R8, POINTER);
    a.add_number(R7, at.first as i32);
    for _ in 0..SETS {
        // The last element refers to the list.
        a.copy(1, R8);
        a.exclusive_or(1, R7);
        a.go_if(1, If::Equal, 0, "end");
        a.read(ROW, 4, (R8, at.set), "end");
        a.read_or_zero(ROW + 8, 2 * SEMAPHORES as i32, (R8, at.adjustments));
        a.write(R9, at.seq, row);
        a.read(POINTER, 8, (R8, 0), "end");
        a.load(R8, POINTER);
    }
    a.copy(1, R8);
    a.exclusive_or(1, R7);
    a.go_if(1, If::Equal, 0, "end");
    a.store_number(ROW, -1);
    a.write(R9, at.seq, row);
    a.place("end");
    a.end();
    a.finish()
}

impl UndoReader {
    /// Hands the kernel the program. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator, or the agent may not load one.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        TaskIterator::load(&btf, "bpf_iter_task", &program(&Offsets::of(&btf)?)).map(Self)
    }

    /// Those of these processes, which share an IPC namespace, of which something is undone when they end. Of sets with more than 64 semaphores it is
    /// assumed. Where there are no semaphores no process is looked at.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn adjusted(&self, pids: &[u32]) -> io::Result<Vec<u32>> {
        // One that has ended has no namespace any more.
        let sizes = pids.iter().find_map(|pid| sizes(*pid).ok()).unwrap_or_default();
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for pid in pids {
            if self.0.rows(*pid)?.iter().any(|row| is_adjusted(row, &sizes)) {
                found.push(*pid);
            }
        }
        Ok(found)
    }
}

fn is_adjusted([set, adjustments @ ..]: &[u64; WORDS], sizes: &HashMap<u32, usize>) -> bool {
    match sizes.get(&(*set as u32)) {
        _ if *set == MORE => true,
        Some(size) => *size > SEMAPHORES || (0..*size).any(|at| adjustments[at / 4] >> (16 * (at % 4)) & 0xffff != 0),
        // The set was removed.
        None => false,
    }
}

/// How many semaphores each set of the process's IPC namespace has, by id.
fn sizes(pid: u32) -> io::Result<HashMap<u32, usize>> {
    Ok(listed(&shared_namespaces::ipc_list(pid, "/proc/sysvipc/sem")?))
}

/// From lines of `key semid perms nsems …`.
pub(crate) fn listed(list: &str) -> HashMap<u32, usize> {
    let set = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        Some((fields.next()?.parse().ok()?, fields.nth(1)?.parse().ok()?))
    };
    list.lines().filter_map(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operate(set: libc::c_int, change: i16) {
        let mut operation = libc::sembuf { sem_num: 1, sem_op: change, sem_flg: libc::SEM_UNDO as i16 };
        // SAFETY: the operation is ours.
        assert_eq!(unsafe { libc::semop(set, &raw mut operation, 1) }, 0);
    }

    #[test]
    fn what_is_undone_is_seen_until_it_was_done_back() {
        let reader = match UndoReader::load() {
            Ok(reader) => reader,
            Err(error) => {
                println!("skipped: tasks cannot be read by BPF here: {error}");
                return;
            }
        };
        let pid = std::process::id();
        let has = || reader.adjusted(&[pid]).unwrap() == [pid];
        // SAFETY: takes numbers only.
        let set = unsafe { libc::semget(libc::IPC_PRIVATE, 3, 0o600) };
        assert!(set >= 0 && !has());
        operate(set, 2);
        assert!(has());
        operate(set, -2);
        assert!(!has());
        operate(set, 1);
        assert!(has());
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::semctl(set, 0, libc::IPC_RMID) }, 0);
        assert!(!has());
    }
}
