//! States of tasks that /proc does not show, read by a BPF iterator over tasks (Documentation/bpf/bpf_iterators.rst).
//!
//! Which bit or word of the kernel's structures holds a state differs from kernel to kernel. It is learned from a specimen: a forked
//! process that enters one state after the other, and is looked at before and after each.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::bpf::{Assembler, If, Instruction, R6, R7, R8, R9};
use crate::btf::Btf;
use crate::descriptor;
use crate::mapping_flags::FlagsReader;
use crate::own_process::{self, Task, Worker};
use crate::task_iterator::TaskIterator;

/// Words of a row: flags of the thread, what it has the kernel do at system calls, default flags of mappings, flags of the memory, addresses of
/// the bitmap of I/O ports and of the local descriptor table, protection keys that are allocated, and which of them the kernel has taken for
/// memory that can only be executed, and the words of the credentials that belong to security modules.
const THREAD_FLAGS: usize = 0;
const SYSCALL_WORK: usize = 1;
const DEFAULT_FLAGS: usize = 2;
const MEMORY_FLAGS: usize = 3;
const PORTS: usize = 4;
const DESCRIPTOR_TABLE: usize = 5;
const KEYS: usize = 6;
const EXECUTE_KEY: usize = 7;
const MODULES: usize = 8;
/// As many of these are looked at.
const MODULE_WORDS: usize = 24;
const WORDS: usize = MODULES + MODULE_WORDS;
/// How long the specimen may take for one state, in milliseconds.
const PATIENCE: u16 = 5000;

/// A state that a task is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HiddenState {
    /// The time-stamp counter is forbidden: `PR_SET_TSC`.
    TscForbidden,
    /// Memory that is writable cannot become executable: `PR_SET_MDWE`.
    DenyWriteExecute,
    /// Memory that is mapped from now on is locked: `mlockall(MCL_FUTURE)`.
    LocksFutureMemory,
    /// There is a local descriptor table: `modify_ldt`.
    LocalDescriptors,
    /// The task has entered a Landlock domain.
    LandlockDomain,
    /// A mapping is sealed: `mseal`.
    SealedMemory,
    /// A mapping has a NUMA policy: `mbind`.
    MappingPolicy,
    /// Its own system calls raise a signal: `PR_SET_SYSCALL_USER_DISPATCH`.
    DispatchesSyscalls,
    /// It may use I/O ports: `ioperm`.
    IoPorts,
    /// The instruction CPUID is forbidden: `ARCH_SET_CPUID`.
    CpuidForbidden,
    /// There are protection keys of its own for memory: `pkey_alloc`.
    ProtectionKeys,
}

/// In the order in which the specimen enters them: none of them hinders those that follow, or shows in the same place.
const ALL: [HiddenState; 9] = [
    HiddenState::SealedMemory,
    HiddenState::LocksFutureMemory,
    HiddenState::LocalDescriptors,
    HiddenState::LandlockDomain,
    HiddenState::IoPorts,
    HiddenState::CpuidForbidden,
    HiddenState::DenyWriteExecute,
    HiddenState::TscForbidden,
    // All of its later system calls but one would raise the signal, were the selector not to allow them.
    HiddenState::DispatchesSyscalls,
];

/// Where a state shows: the number of a word in a row, and those of its bits that are set by it.
#[derive(Debug, Clone, Copy)]
struct Sign {
    word: usize,
    bits: u64,
}

type Row = [u64; WORDS];

/// Reads the states of tasks.
#[derive(Debug)]
pub struct HiddenStates {
    tasks: TaskIterator<WORDS>,
    mappings: FlagsReader,
    signs: Vec<(HiddenState, Sign)>,
    /// The bit of sealed mappings.
    sealed: Option<u64>,
}

/// Where the fields lie that are read.
#[derive(Debug)]
struct Offsets {
    seq: i16,
    thread_flags: usize,
    /// Since Linux 5.11, where the architecture has it.
    syscall_work: Option<usize>,
    /// Only x86 has one.
    ports: Option<usize>,
    mm: usize,
    cred: usize,
    default_flags: usize,
    memory_flags: usize,
    /// Only x86 has one.
    descriptor_table: Option<usize>,
    /// Of x86: the map of keys (`u16`) and the one for memory that can only be executed (`s16`).
    keys: Option<[usize; 2]>,
    security: usize,
}

impl Offsets {
    fn of(btf: &Btf) -> io::Result<Self> {
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let [thread, mm, cred] = btf.offsets("task_struct", ["thread_info", "mm", "cred"])?;
        let [flags] = btf.offsets("thread_info", ["flags"])?;
        let [context, default_flags, memory_flags] = btf.offsets("mm_struct", ["context", "def_flags", "flags"])?;
        let syscall_work = btf.offsets("thread_info", ["syscall_work"]).ok().map(|[work]| thread + work);
        let [registers] = btf.offsets("task_struct", ["thread"])?;
        let ports = btf.offsets("thread_struct", ["io_bitmap"]).ok().map(|[bitmap]| registers + bitmap);
        let descriptor_table = btf.offsets("mm_context_t", ["ldt"]).ok().map(|[table]| context + table);
        let keys = btf.offsets("mm_context_t", ["pkey_allocation_map", "execute_only_pkey"]).ok();
        let keys = keys.map(|keys| keys.map(|key| context + key));
        let [security] = btf.offsets("cred", ["security"])?;
        let seq = i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?;
        let thread_flags = thread + flags;
        Ok(Self {
            seq,
            thread_flags,
            syscall_work,
            ports,
            mm,
            cred,
            default_flags,
            memory_flags,
            descriptor_table,
            keys,
            security,
        })
    }
}

/// Writes a row for each task that the iterator comes to; none for those without memory.
fn program(at: &Offsets) -> Vec<Instruction> {
    const ROW: i16 = -8 * WORDS as i16;
    const POINTER: i16 = ROW - 8;
    let word = |number: usize| ROW + 8 * number as i16;
    let mut a = Assembler::default();
    a.copy(R9, 1);
    // The context is {meta, task}; at the end of the iteration there is no task.
    a.argument(R6, R9, 1);
    a.go_if(R6, If::Equal, 0, "end");
    a.read(word(THREAD_FLAGS), 8, (R6, at.thread_flags), "end");
    for (slot, field) in [(SYSCALL_WORK, at.syscall_work), (PORTS, at.ports)] {
        match field {
            Some(field) => a.read(word(slot), 8, (R6, field), "end"),
            None => a.store_number(word(slot), 0),
        }
    }
    a.read(POINTER, 8, (R6, at.mm), "end");
    a.load(R7, POINTER);
    a.go_if(R7, If::Equal, 0, "end");
    a.read(word(DEFAULT_FLAGS), 8, (R7, at.default_flags), "end");
    a.read(word(MEMORY_FLAGS), 8, (R7, at.memory_flags), "end");
    match at.descriptor_table {
        Some(table) => a.read(word(DESCRIPTOR_TABLE), 8, (R7, table), "end"),
        None => a.store_number(word(DESCRIPTOR_TABLE), 0),
    }
    for (number, slot) in [KEYS, EXECUTE_KEY].into_iter().enumerate() {
        a.store_number(word(slot), 0);
        if let Some(keys) = at.keys {
            a.read(word(slot), 2, (R7, keys[number]), "end");
        }
    }
    a.read(POINTER, 8, (R6, at.cred), "end");
    a.load(R8, POINTER);
    a.read(POINTER, 8, (R8, at.security), "end");
    a.load(R8, POINTER);
    a.read_or_zero(word(MODULES), 8 * MODULE_WORDS as i32, (R8, 0));
    a.write(R9, at.seq, (ROW, 8 * WORDS as i32));
    a.place("end");
    a.end();
    a.finish()
}

impl HiddenStates {
    /// Hands the kernel the program and learns from a specimen. Takes some ten milliseconds, needs CAP_BPF and CAP_PERFMON, and a kernel
    /// since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator, or the agent may not load one.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        let tasks = TaskIterator::load(&btf, "bpf_iter_task", &program(&Offsets::of(&btf)?))?;
        let mut states = Self { tasks, mappings: FlagsReader::load()?, signs: Vec::new(), sealed: None };
        states.learn()?;
        Ok(states)
    }

    /// The states that a process or one of its threads is in; none of one that has ended.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn read(&self, pid: u32) -> io::Result<BTreeSet<HiddenState>> {
        let rows = self.tasks.rows(pid)?;
        let is_in = |sign: &Sign| rows.iter().any(|row| row[sign.word] & sign.bits != 0);
        let mut found: BTreeSet<_> =
            self.signs.iter().filter(|(_, sign)| is_in(sign)).map(|(state, _)| *state).collect();
        let mappings = self.mappings.read(pid)?;
        if self.sealed.is_some_and(|bit| mappings.iter().any(|mapping| mapping.flags & bit != 0)) {
            found.insert(HiddenState::SealedMemory);
        }
        if mappings.iter().any(|mapping| mapping.has_policy) {
            found.insert(HiddenState::MappingPolicy);
        }
        if rows.iter().any(|row| own_keys(row) != 0) {
            found.insert(HiddenState::ProtectionKeys);
        }
        Ok(found)
    }

    /// Whether this kernel has the state, and shows it.
    pub fn knows(&self, state: HiddenState) -> bool {
        state == HiddenState::SealedMemory && self.sealed.is_some()
            || self.signs.iter().any(|(known, _)| *known == state)
    }

    fn learn(&mut self) -> io::Result<()> {
        let specimen = Specimen::start()?;
        let look = |states: &Self| -> io::Result<(Row, Vec<u64>)> {
            let row = states.tasks.rows(specimen.pid)?.first().copied().ok_or(io::ErrorKind::NotFound)?;
            Ok((row, states.mappings.read(specimen.pid)?.iter().map(|mapping| mapping.flags).collect()))
        };
        let (mut before, mut flags_before) = look(self)?;
        for state in ALL {
            let entered = specimen.commands.enter(state)?;
            let (after, flags_after) = look(self)?;
            if entered {
                match state {
                    HiddenState::SealedMemory => self.sealed = new_bit(&flags_before, &flags_after),
                    _ => self.signs.extend(sign(state, &before, &after).map(|sign| (state, sign))),
                }
            }
            (before, flags_before) = (after, flags_after);
        }
        specimen.end();
        Ok(())
    }
}

/// The protection keys that the program has asked for: not the one that all memory has at first, nor that which the kernel takes where
/// memory can only be executed.
fn own_keys(row: &Row) -> u64 {
    let execute = match row[EXECUTE_KEY] {
        key @ 1..16 => 1 << key,
        _ => 0,
    };
    row[KEYS] & !1 & !execute
}

/// What has changed where the state can show: one bit, or a pointer that was null.
fn sign(state: HiddenState, before: &Row, after: &Row) -> Option<Sign> {
    let bit = |word: usize| {
        let bits = after[word] & !before[word];
        (bits.count_ones() == 1).then_some(Sign { word, bits })
    };
    let pointer = |word: usize| (before[word] == 0 && after[word] != 0).then_some(Sign { word, bits: u64::MAX });
    match state {
        HiddenState::TscForbidden | HiddenState::CpuidForbidden => bit(THREAD_FLAGS),
        HiddenState::DispatchesSyscalls => bit(SYSCALL_WORK),
        HiddenState::IoPorts => pointer(PORTS),
        HiddenState::LocksFutureMemory => bit(DEFAULT_FLAGS),
        HiddenState::DenyWriteExecute => bit(MEMORY_FLAGS),
        HiddenState::LocalDescriptors => pointer(DESCRIPTOR_TABLE),
        HiddenState::LandlockDomain => (MODULES..WORDS).find_map(pointer),
        // What mappings have is not in the row.
        HiddenState::SealedMemory | HiddenState::MappingPolicy | HiddenState::ProtectionKeys => None,
    }
}

/// The bit that no mapping had, and one has now.
fn new_bit(before: &[u64], after: &[u64]) -> Option<u64> {
    let all = |flags: &[u64]| flags.iter().fold(0, |all, one| all | one);
    let bits = all(after) & !all(before);
    (bits.count_ones() == 1).then_some(bits)
}

/// A forked process that enters states when it is told to, and ends when this is dropped.
struct Specimen {
    pid: u32,
    commands: Commands,
    worker: Worker,
}

struct Commands(OwnedFd);

impl Specimen {
    fn start() -> io::Result<Self> {
        let (worker, socket) = own_process::begin(Task::Specimen)?;
        let mut pid = [0; 4];
        if receive(&socket, &mut pid)? != pid.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { pid: u32::from_ne_bytes(pid), commands: Commands(socket), worker })
    }

    fn end(self) {
        drop(self.commands);
        self.worker.reap();
    }
}

impl Commands {
    /// Whether the specimen could enter it.
    fn enter(&self, state: HiddenState) -> io::Result<bool> {
        descriptor::send(self.0.as_fd(), &[state as u8], &[])?;
        let mut answer = [0];
        match receive(&self.0, &mut answer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(answer[0] == 1),
        }
    }
}

/// What the specimen sends next.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    if poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], PollTimeout::from(PATIENCE))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    descriptor::receive(socket.as_fd(), buffer).map(|(length, _)| length)
}

/// In a process of its own: sends its pid, then enters one state for each byte, until there are no more.
pub(crate) fn specimen(socket: BorrowedFd<'_>) {
    if descriptor::send(socket, &std::process::id().to_ne_bytes(), &[]).is_err() {
        return;
    }
    let mut command = [0u8];
    while matches!(descriptor::receive(socket, &mut command), Ok((1, _))) {
        let Some(state) = ALL.into_iter().find(|state| *state as u8 == command[0]) else { return };
        if descriptor::send(socket, &[u8::from(enter(state))], &[]).is_err() {
            return;
        }
    }
}

/// Enters a state by system calls alone.
fn enter(state: HiddenState) -> bool {
    const PR_SET_MDWE: libc::c_int = 65;
    const PR_MDWE_REFUSE_EXEC_GAIN: libc::c_ulong = 1;
    const SYS_MSEAL: libc::c_long = 462;
    match state {
        HiddenState::IoPorts => port(),
        HiddenState::CpuidForbidden => forbid_cpuid(),
        HiddenState::DispatchesSyscalls => dispatch_syscalls(),
        // Need no specimen.
        HiddenState::MappingPolicy | HiddenState::ProtectionKeys => false,
        // SAFETY: changes what later mappings of this process are like, which makes none.
        HiddenState::LocksFutureMemory => unsafe { libc::mlockall(libc::MCL_FUTURE) == 0 },
        HiddenState::LocalDescriptors => local_descriptor(),
        HiddenState::LandlockDomain => landlock(),
        HiddenState::SealedMemory => {
            let (protection, kind) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping at an address of the kernel's choice, which is sealed, and never used.
            unsafe {
                let page = libc::mmap(std::ptr::null_mut(), 4096, protection, kind, -1, 0);
                page != libc::MAP_FAILED && libc::syscall(SYS_MSEAL, page, 4096usize, 0usize) == 0
            }
        }
        // SAFETY: takes numbers only, and this process maps no code.
        HiddenState::DenyWriteExecute => unsafe { libc::prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) == 0 },
        // SAFETY: takes numbers only, and this process does not look at the clock from now on.
        HiddenState::TscForbidden => unsafe { libc::prctl(libc::PR_SET_TSC, libc::PR_TSC_SIGSEGV, 0, 0, 0) == 0 },
    }
}

/// The port that nothing listens to (of the diagnostics of the machine's start).
#[cfg(target_arch = "x86_64")]
fn port() -> bool {
    // SAFETY: takes numbers only, and this process uses no ports.
    unsafe { libc::ioperm(0x80, 1, 1) == 0 }
}

#[cfg(target_arch = "x86_64")]
fn forbid_cpuid() -> bool {
    const ARCH_SET_CPUID: libc::c_ulong = 0x1012;
    // SAFETY: takes numbers only, and this process does not ask for its processor from now on.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, 0) == 0 }
}

#[cfg(not(target_arch = "x86_64"))]
fn port() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn forbid_cpuid() -> bool {
    false
}

fn dispatch_syscalls() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    const PR_SYS_DISPATCH_ON: libc::c_ulong = 1;
    /// SYSCALL_DISPATCH_FILTER_ALLOW.
    static ALLOW: u8 = 0;
    // SAFETY: the kernel reads the selector, which lives as long as the process, at each system call, and lets it pass.
    unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0, 0, &raw const ALLOW) == 0 }
}

#[cfg(target_arch = "x86_64")]
fn local_descriptor() -> bool {
    // `struct user_desc` of asm/ldt.h: entry 0, base 0, limit 0xfffff, 32 bits, limit in pages, usable.
    let entry: [u32; 4] = [0, 0, 0xfffff, 0x51];
    // SAFETY: the kernel reads the entry, which lives as long as the call. No segment register uses the table.
    unsafe { libc::syscall(libc::SYS_modify_ldt, 1, entry.as_ptr(), size_of_val(&entry)) == 0 }
}

#[cfg(not(target_arch = "x86_64"))]
fn local_descriptor() -> bool {
    false
}

fn landlock() -> bool {
    // `struct landlock_ruleset_attr` of linux/landlock.h, in its first form: handles the execution of files.
    let handled: u64 = 1;
    // SAFETY: the kernel reads the number, which lives as long as the call; the others take numbers only.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let rules = libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0);
        rules >= 0 && libc::syscall(libc::SYS_landlock_restrict_self, rules, 0) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_no_program_has_asked_for_do_not_count() {
        let row = |keys: u64, execute: i16| {
            let mut row = [0; WORDS];
            (row[KEYS], row[EXECUTE_KEY]) = (keys, u64::from(execute.cast_unsigned()));
            row
        };
        // Without keys of the processor; none; one for memory that can only be executed.
        let own = [row(0, 0), row(1, -1), row(0b11, 1), row(0b111, 1), row(0b11, -1)].map(|row| own_keys(&row));
        assert_eq!(own, [0, 0, 0, 0b100, 0b10]);
    }

    #[test]
    fn states_are_seen_in_the_process_that_has_entered_them() {
        let states = match HiddenStates::load() {
            Ok(states) => states,
            Err(error) => {
                println!("skipped: tasks cannot be read by BPF here: {error}");
                return;
            }
        };
        println!("{states:?}");
        assert_eq!(states.read(std::process::id()).unwrap(), BTreeSet::new());
        assert!(states.knows(HiddenState::LocksFutureMemory));
        let specimen = Specimen::start().unwrap();
        let pid = specimen.pid;
        let mut entered = BTreeSet::new();
        for state in ALL {
            if specimen.commands.enter(state).unwrap() && states.knows(state) {
                entered.insert(state);
            }
            assert_eq!(states.read(specimen.pid).unwrap(), entered, "{state:?}");
        }
        specimen.end();
        assert_eq!(states.read(pid).unwrap(), BTreeSet::new());
    }
}
