//! States of tasks that /proc does not show, read by a BPF iterator over tasks (Documentation/bpf/bpf_iterators.rst).
//!
//! Which bit or word of the kernel's structures holds a state differs from kernel to kernel. It is learned from a specimen: a forked
//! process that enters one state after the other, and is looked at before and after each.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe2, read, write};

use crate::bpf::{self, Instruction, op};
use crate::btf::Btf;
use crate::mapping_flags::FlagsReader;

const SEQ_WRITE: i32 = 127;
const PROBE_READ_KERNEL: i32 = 113;
/// Numbers of a row before the words of security modules: thread id, flags of the thread, default flags of mappings, flags of the memory, and the
/// address of the local descriptor table.
const NUMBERS: usize = 5;
/// Words of the credentials that belong to security modules, as many as are looked at.
const MODULES: usize = 24;
const WORDS: usize = NUMBERS + MODULES;
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
}

/// In the order in which the specimen enters them: none of them hinders those that follow, or shows in the same place.
const ALL: [HiddenState; 6] = [
    HiddenState::SealedMemory,
    HiddenState::LocksFutureMemory,
    HiddenState::LocalDescriptors,
    HiddenState::LandlockDomain,
    HiddenState::DenyWriteExecute,
    HiddenState::TscForbidden,
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
    program: OwnedFd,
    mappings: FlagsReader,
    signs: Vec<(HiddenState, Sign)>,
    /// The bit of sealed mappings.
    sealed: Option<u64>,
}

/// Where the fields lie that are read.
#[derive(Debug)]
struct Offsets {
    seq: i16,
    pid: i16,
    thread_flags: i16,
    mm: i16,
    cred: i16,
    def_flags: i16,
    mm_flags: i16,
    /// Only x86 has one.
    ldt: Option<i16>,
    security: i16,
}

impl Offsets {
    fn of(btf: &Btf) -> io::Result<Self> {
        let lacking = || io::Error::from(io::ErrorKind::Unsupported);
        let narrow = |at: usize| i16::try_from(at).map_err(|_| lacking());
        let field = |structure: &str, name: &str| btf.fields(structure).get(name).copied().ok_or_else(lacking);
        let task = btf.fields("task_struct");
        let of_task = |name: &str| task.get(name).copied().ok_or_else(lacking);
        let memory = btf.fields("mm_struct");
        let of_memory = |name: &str| memory.get(name).copied().ok_or_else(lacking);
        let ldt = btf.fields("mm_context_t").get("ldt").copied();
        Ok(Self {
            seq: narrow(field("bpf_iter_meta", "seq")?)?,
            pid: narrow(of_task("pid")?)?,
            thread_flags: narrow(of_task("thread_info")? + field("thread_info", "flags")?)?,
            mm: narrow(of_task("mm")?)?,
            cred: narrow(of_task("cred")?)?,
            def_flags: narrow(of_memory("def_flags")?)?,
            mm_flags: narrow(of_memory("flags")?)?,
            ldt: ldt.map(|at| narrow(of_memory("context")? + at)).transpose()?,
            security: narrow(field("cred", "security")?)?,
        })
    }
}

/// Writes a row for each task that the iterator comes to; none for those without memory.
fn program(at: &Offsets) -> Vec<Instruction> {
    let load = |target, source, offset| op(0x79, target, source, offset, 0);
    let slot = |number: usize| -((WORDS - number) as i16 * 8);
    let store = |number: usize, source| op(0x7b, 10, source, slot(number), 0);
    let unless = |register| op(0x15, register, 0, 0, 0);
    let mut code = vec![
        // The context is {meta, task}; at the end of the iteration there is no task.
        load(9, 1, 0),
        load(6, 1, 8),
        unless(6),
        load(9, 9, at.seq),
        // Its lower 32 bits.
        op(0x61, 2, 6, at.pid, 0),
        store(0, 2),
        load(2, 6, at.thread_flags),
        store(1, 2),
        load(7, 6, at.mm),
        unless(7),
        load(2, 7, at.def_flags),
        store(2, 2),
        load(2, 7, at.mm_flags),
        store(3, 2),
        at.ldt.map_or(op(0xb7, 2, 0, 0, 0), |ldt| load(2, 7, ldt)),
        store(4, 2),
        load(8, 6, at.cred),
        unless(8),
        load(3, 8, at.security),
        op(0xbf, 1, 10, 0, 0),
        op(0x07, 1, 0, 0, slot(NUMBERS).into()),
        op(0xb7, 2, 0, 0, MODULES as i32 * 8),
        op(0x85, 0, 0, 0, PROBE_READ_KERNEL),
        op(0xbf, 1, 9, 0, 0),
        op(0xbf, 2, 10, 0, 0),
        op(0x07, 2, 0, 0, slot(0).into()),
        op(0xb7, 3, 0, 0, WORDS as i32 * 8),
        op(0x85, 0, 0, 0, SEQ_WRITE),
    ];
    let end = code.len();
    for (place, instruction) in code.iter_mut().enumerate() {
        if instruction.code == 0x15 {
            instruction.offset = (end - place - 1) as i16;
        }
    }
    code.extend([op(0xb7, 0, 0, 0, 0), op(0x95, 0, 0, 0, 0)]);
    code
}

impl HiddenStates {
    /// Hands the kernel the program and learns from a specimen. Takes some ten milliseconds, needs CAP_BPF and CAP_PERFMON, and a kernel
    /// since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator, or the agent may not load one.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        let lacking = || io::Error::from(io::ErrorKind::Unsupported);
        let function = btf.function("bpf_iter_task").ok_or_else(lacking)?;
        let program = bpf::load_iterator(&program(&Offsets::of(&btf)?), function)?;
        let mut states = Self { program, mappings: FlagsReader::load()?, signs: Vec::new(), sealed: None };
        states.learn()?;
        Ok(states)
    }

    /// The states that a process or one of its threads is in; none of one that has ended.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn read(&self, pid: u32) -> io::Result<BTreeSet<HiddenState>> {
        let rows = self.rows(pid)?;
        let is_in = |sign: &Sign| rows.iter().any(|row| row[sign.word] & sign.bits != 0);
        let mut found: BTreeSet<_> =
            self.signs.iter().filter(|(_, sign)| is_in(sign)).map(|(state, _)| *state).collect();
        if let Some(bit) = self.sealed
            && self.mappings.read(pid)?.iter().any(|mapping| mapping.flags & bit != 0)
        {
            found.insert(HiddenState::SealedMemory);
        }
        Ok(found)
    }

    /// Whether this kernel has the state, and shows it.
    pub fn knows(&self, state: HiddenState) -> bool {
        state == HiddenState::SealedMemory && self.sealed.is_some()
            || self.signs.iter().any(|(known, _)| *known == state)
    }

    fn rows(&self, pid: u32) -> io::Result<Vec<Row>> {
        let mut bytes = Vec::new();
        File::from(bpf::iterate(&self.program, pid)?).read_to_end(&mut bytes)?;
        let row = |row: &[u8]| {
            std::array::from_fn(|word| u64::from_le_bytes(row[word * 8..word * 8 + 8].try_into().expect("8 bytes")))
        };
        Ok(bytes.chunks_exact(WORDS * 8).map(row).collect())
    }

    fn learn(&mut self) -> io::Result<()> {
        let mut specimen = Specimen::start()?;
        let look = |states: &Self| -> io::Result<(Row, Vec<u64>)> {
            let row = states.rows(specimen.pid)?.first().copied().ok_or(io::ErrorKind::NotFound)?;
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
        drop(specimen.commands);
        specimen.child.end();
        Ok(())
    }
}

/// What has changed where the state can show: one bit, or a pointer that was null.
fn sign(state: HiddenState, before: &Row, after: &Row) -> Option<Sign> {
    let bit = |word: usize| {
        let bits = after[word] & !before[word];
        (bits.count_ones() == 1).then_some(Sign { word, bits })
    };
    let pointer = |word: usize| (before[word] == 0 && after[word] != 0).then_some(Sign { word, bits: u64::MAX });
    match state {
        HiddenState::TscForbidden => bit(1),
        HiddenState::LocksFutureMemory => bit(2),
        HiddenState::DenyWriteExecute => bit(3),
        HiddenState::LocalDescriptors => pointer(4),
        HiddenState::LandlockDomain => (NUMBERS..WORDS).find_map(pointer),
        HiddenState::SealedMemory => None,
    }
}

/// The bit that no mapping had, and one has now.
fn new_bit(before: &[u64], after: &[u64]) -> Option<u64> {
    let all = |flags: &[u64]| flags.iter().fold(0, |all, one| all | one);
    let bits = all(after) & !all(before);
    (bits.count_ones() == 1).then_some(bits)
}

/// A forked process that enters states when it is told to.
struct Specimen {
    pid: u32,
    commands: Commands,
    child: Child,
}

struct Commands {
    to: File,
    from: File,
}

/// Is killed and waited for when it is dropped.
struct Child(Option<Pid>);

impl Child {
    fn end(&mut self) {
        if let Some(pid) = self.0.take() {
            // Neither can fail for a child that was not waited for.
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end();
    }
}

impl Specimen {
    fn start() -> io::Result<Self> {
        let (commands_read, commands_write) = pipe2(OFlag::O_CLOEXEC)?;
        let (answers_read, answers_write) = pipe2(OFlag::O_CLOEXEC)?;
        // SAFETY: the child makes system calls only, until it ends by one: it takes no lock and allocates nothing.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child.as_raw() as u32,
                commands: Commands { to: commands_write.into(), from: answers_read.into() },
                child: Child(Some(child)),
            }),
            ForkResult::Child => {
                drop((commands_write, answers_read));
                obey(&commands_read, &answers_write);
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) }
            }
        }
    }
}

impl Commands {
    /// Whether the specimen could enter it.
    fn enter(&mut self, state: HiddenState) -> io::Result<bool> {
        self.to.write_all(&[state as u8])?;
        if poll(&mut [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)], PollTimeout::from(PATIENCE))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut answer = [0];
        self.from.read_exact(&mut answer)?;
        Ok(answer[0] == 1)
    }
}

/// The specimen's work: one state for each byte, until there are no more.
fn obey(commands: &OwnedFd, answers: &OwnedFd) {
    let mut command = [0u8];
    while read(commands, &mut command) == Ok(1) {
        let Some(state) = ALL.into_iter().find(|state| *state as u8 == command[0]) else { return };
        let answer = [u8::from(enter(state))];
        if write(answers, &answer) != Ok(1) {
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
        let mut specimen = Specimen::start().unwrap();
        let mut entered = BTreeSet::new();
        for state in ALL {
            if specimen.commands.enter(state).unwrap() && states.knows(state) {
                entered.insert(state);
            }
            assert_eq!(states.read(specimen.pid).unwrap(), entered, "{state:?}");
        }
        specimen.child.end();
        assert_eq!(states.read(specimen.pid).unwrap(), BTreeSet::new());
    }
}
