//! Waits that end at a point in time, and go on with what is left of the time.
//!
//! When a dump interrupts one, the kernel's restart block tells which system call it was and when it ends (`restart_blocks` of the crate
//! `tranship-sys`, which loads the program that reads it). Criu is told that the call begins again; how much of the time is left is
//! recorded beside its images. In the restored thread the same call is made with that time, and interrupted before the thread runs any
//! code of its own: so that the kernel has the same restart block again, and goes on with it.
//!
//! ```text
//!   the thread                                registers                       the kernel
//!     has left rt_sigreturn, is about to call those of the image
//!     SETREGS, PTRACE_SYSCALL                 the time's address is another
//!     enters the system call
//!     INTERRUPT, PTRACE_CONT                                                  sees at once that it is to stop
//!     trap, SETREGS                           those of the image, interrupted has the restart block
//! ```
//!
//! The time is written to memory of criu's that is unmapped afterwards, and that the thread has just returned from.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_long, c_uint};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::interrupted::{ORIG_RAX, R10, R11, RAX, RCX, RDI, RDX, RIP, RSI, RSP, futex_operation, is_restarted};
use super::texts::waits;
use super::trace::{AT_SYSCALL, Registers, real_ptrace, real_wait4, registers, set_registers};

/// Words of a row that the program writes: the registers, the function, and the fields of the restart block.
const FUNCTION: usize = 21;
const SLEEP_CLOCK: usize = FUNCTION + 1;
const SLEEP_END: usize = FUNCTION + 2;
const FUTEX_END: usize = FUNCTION + 3;
const POLL_HAS_END: usize = FUNCTION + 4;
const POLL_SECONDS: usize = FUNCTION + 5;
const POLL_NS: usize = FUNCTION + 6;
const WORDS: usize = FUNCTION + 7;
type Row = [u64; WORDS];

const NS: u64 = 1_000_000_000;
/// Clocks have small numbers, and nothing is mapped at such addresses.
const CLOCKS: u64 = 4096;
/// The bytes of a `syscall` instruction, as the lower half of a word.
const SYSCALL: c_long = 0x050f;

/// An interrupted wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub number: c_long,
    /// When it ends: clock and ns. `None`: its arguments tell when, or it does not end by itself.
    end: Option<(c_int, u64)>,
}

/// What reads restart blocks.
struct Reader {
    program: OwnedFd,
    /// Of sleeps, polls, waits for a futex.
    functions: [u64; 3],
}

fn reader() -> Option<&'static Reader> {
    static READER: OnceLock<Option<Reader>> = OnceLock::new();
    READER.get_or_init(|| Reader::open(&std::env::var("TRANSHIP_RESTART_BLOCKS").ok()?)).as_ref()
}

fn bpf<T>(command: c_int, attribute: &T) -> Option<OwnedFd> {
    // SAFETY: the attribute is of the size that is stated, and what it points to lives as long as the call; each of the commands used
    // here returns a new descriptor.
    unsafe {
        let fd = libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attribute), size_of::<T>());
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as c_int))
    }
}

impl Reader {
    fn open(description: &str) -> Option<Self> {
        const PROG_GET_FD_BY_ID: c_int = 13;
        let mut words = description.split(' ');
        let id: u32 = words.next()?.parse().ok()?;
        let mut function = || u64::from_str_radix(words.next()?, 16).ok();
        let functions = [function()?, function()?, function()?];
        Some(Self { program: bpf(PROG_GET_FD_BY_ID, &[id, 0, 0])?, functions })
    }

    /// The rows of all threads of a process.
    fn rows(&self, process: u32) -> Option<Vec<Row>> {
        const LINK_CREATE: c_int = 28;
        const ITER_CREATE: c_int = 33;
        const TRACE_ITER: u32 = 28;
        /// `union bpf_attr` for BPF_LINK_CREATE.
        #[repr(C)]
        struct Link {
            program: u32,
            target: u32,
            kind: u32,
            flags: u32,
            task: u64,
            task_bytes: u32,
            padding: u32,
        }
        // Thread, process, pidfd, and a word that fills up the structure.
        let task: [u32; 4] = [0, process, 0, 0];
        let link = bpf(
            LINK_CREATE,
            &Link {
                program: self.program.as_raw_fd() as u32,
                target: 0,
                kind: TRACE_ITER,
                flags: 0,
                task: task.as_ptr() as u64,
                task_bytes: size_of_val(&task) as u32,
                padding: 0,
            },
        )?;
        let iterator = bpf(ITER_CREATE, &[link.as_raw_fd() as u32, 0])?;
        let mut bytes = Vec::new();
        std::fs::File::from(iterator).read_to_end(&mut bytes).ok()?;
        let row = |row: &[u8]| {
            std::array::from_fn(|word| u64::from_le_bytes(row[word * 8..word * 8 + 8].try_into().unwrap_or_default()))
        };
        Some(bytes.chunks_exact(WORDS * 8).map(row).collect())
    }

    /// Which wait it is that the registers and the restart block of a row are of.
    fn wait(&self, row: &Row) -> Option<Wait> {
        let [sleep, poll, futex] = self.functions;
        let monotonic = |ns| Some((libc::CLOCK_MONOTONIC, ns));
        let function = row[FUNCTION];
        let wait = if function == sleep {
            let by_clock = row[RDI] < CLOCKS;
            let number = if by_clock { libc::SYS_clock_nanosleep } else { libc::SYS_nanosleep };
            Wait { number, end: Some((row[SLEEP_CLOCK] as c_int, row[SLEEP_END])) }
        } else if function == poll {
            let end = if row[POLL_HAS_END] as c_int == 0 {
                None
            } else {
                monotonic(row[POLL_SECONDS].saturating_mul(NS).saturating_add(row[POLL_NS]))
            };
            Wait { number: libc::SYS_poll, end }
        } else if function == futex {
            // The time of others is a point in time.
            let relative = futex_operation(row[RSI]) == libc::FUTEX_WAIT as u64;
            Wait { number: libc::SYS_futex, end: if relative { monotonic(row[FUTEX_END]) } else { None } }
        } else {
            return None;
        };
        // Else the block is of another call, or the registers are.
        let called = row[ORIG_RAX] as c_long;
        (called == wait.number || called == libc::SYS_restart_syscall).then_some(wait)
    }
}

/// Numbers of a thread: of its process, and of the thread in its innermost namespace. They are looked up once.
fn numbers(thread: c_int) -> Option<(u32, u32)> {
    static KNOWN: Mutex<Option<HashMap<c_int, (u32, u32)>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(numbers) = known.get(&thread) {
        return Some(*numbers);
    }
    let numbers = look_up(thread)?;
    known.insert(thread, numbers);
    Some(numbers)
}

fn look_up(thread: c_int) -> Option<(u32, u32)> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next_back()?.parse().ok()
    };
    Some((value("Tgid:")?, value("NSpid:")?))
}

/// The wait that a stop has interrupted, by the registers of the stopped thread, whose process stands still. `None`: it cannot be told.
pub(crate) fn find(thread: c_int, registers: &Registers) -> Option<Wait> {
    static ROWS: Mutex<Option<HashMap<u32, Vec<Row>>>> = Mutex::new(None);
    let reader = reader()?;
    let process = numbers(thread)?.0;
    // Threads of one process have stacks of their own.
    let is_of = |row: &&Row| [RSP, RIP, RAX, RDI].iter().all(|register| row[*register] == registers[*register]);
    let mut all = ROWS.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let row = match all.get(&process).and_then(|rows| rows.iter().find(is_of)) {
        Some(row) => *row,
        None => {
            let rows = reader.rows(process)?;
            let row = rows.iter().find(is_of).copied();
            all.insert(process, rows);
            row?
        }
    };
    reader.wait(&row)
}

fn now(clock: c_int) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours.
    let known = unsafe { libc::clock_gettime(clock, &raw mut time) } == 0;
    known.then_some((time.tv_sec as u64).saturating_mul(NS).saturating_add(time.tv_nsec as u64))
}

/// Records how much of the time is left, once for each thread. `false`: that cannot be recorded.
pub(crate) fn record(thread: c_int, wait: Wait) -> bool {
    static RECORDED: Mutex<Option<HashSet<c_int>>> = Mutex::new(None);
    let Some((clock, end)) = wait.end else { return true };
    let mut recorded = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
    let recorded = recorded.get_or_insert_default();
    if recorded.contains(&thread) {
        return true;
    }
    let append = || {
        let (_, inner) = numbers(thread)?;
        let left = end.saturating_sub(now(clock)?);
        let path = std::env::var_os("TRANSHIP_WAITS")?;
        let mut file = std::fs::File::options().create(true).append(true).open(path).ok()?;
        writeln!(file, "{thread} {inner} {} {clock} {end} {left}", wait.number).ok()
    };
    let done = append().is_some();
    if done {
        recorded.insert(thread);
    }
    done
}

/// What was recorded, by the numbers that threads have in the container: the system call, and what is left of its time in ns.
fn recorded() -> &'static HashMap<u32, (c_long, u64)> {
    static RECORDED: OnceLock<HashMap<u32, (c_long, u64)>> = OnceLock::new();
    RECORDED.get_or_init(|| {
        let text = std::env::var_os("TRANSHIP_WAITS").and_then(|path| std::fs::read_to_string(path).ok());
        waits(&text.unwrap_or_default())
    })
}

/// Has a restored thread, which stands still just before its system call, wait no longer than was left. Memory at `scratch` is
/// nobody's. Where that cannot be, the call begins again with all of its time.
pub(crate) fn go_on(thread: c_int, scratch: u64) {
    if recorded().is_empty() {
        return;
    }
    let Some(own) = registers(thread) else { return };
    let Some((number, left)) = numbers(thread).and_then(|(_, inner)| recorded().get(&inner)).copied() else { return };
    if own[RAX] != number as u64 || peek(thread, own[RIP]) & 0xffff != SYSCALL {
        return;
    }
    let Some(redirected) = with_time(thread, &own, (number, left), scratch) else { return };
    if !set_registers(thread, &redirected) {
        return;
    }
    real_ptrace(libc::PTRACE_SYSCALL, thread, 0, 0);
    let stop = wait(thread);
    if stop != AT_SYSCALL {
        // A signal is about to come, and is taken on the registers of the thread.
        set_registers(thread, &own);
        if stop & 0xff == 0x7f && stop >> 16 == 0 {
            real_ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
            real_ptrace(libc::PTRACE_CONT, thread, 0, c_long::from(stop >> 8 & 0xff));
            wait(thread);
        }
        return;
    }
    real_ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
    real_ptrace(libc::PTRACE_CONT, thread, 0, 0);
    wait(thread);
    let Some(after) = registers(thread) else { return };
    let mut last = own;
    for register in [RAX, RCX, R11, RIP] {
        last[register] = after[register];
    }
    last[ORIG_RAX] = if is_restarted(after[RAX] as i64) { number as u64 } else { u64::MAX };
    set_registers(thread, &last);
}

/// The registers with which a thread waits so long.
fn with_time(thread: c_int, own: &Registers, (number, left): (c_long, u64), scratch: u64) -> Option<Registers> {
    let mut redirected = *own;
    redirected[ORIG_RAX] = u64::MAX;
    let register = match number {
        libc::SYS_nanosleep => RDI,
        libc::SYS_clock_nanosleep => RDX,
        libc::SYS_futex => R10,
        // Milliseconds, and rather too many than too few.
        libc::SYS_poll => {
            redirected[RDX] = left.div_ceil(1_000_000).min(c_int::MAX as u64);
            return Some(redirected);
        }
        _ => return None,
    };
    let poke = |at: u64, word: u64| real_ptrace(libc::PTRACE_POKEDATA, thread, at as c_long, word as c_long) == 0;
    redirected[register] = scratch;
    (poke(scratch, left / NS) && poke(scratch + 8, left % NS)).then_some(redirected)
}

fn peek(thread: c_int, address: u64) -> c_long {
    // In libc's function, what is read is the result.
    real_ptrace(libc::PTRACE_PEEKTEXT as c_uint, thread, address as c_long, 0)
}

fn wait(thread: c_int) -> c_int {
    let mut status = 0;
    real_wait4(thread, &raw mut status, libc::__WALL, std::ptr::null_mut());
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(number: c_long, function: u64, words: &[(usize, u64)]) -> Row {
        let mut row = [0; WORDS];
        (row[ORIG_RAX], row[FUNCTION]) = (number as u64, function);
        for (word, value) in words {
            row[*word] = *value;
        }
        row
    }

    #[test]
    fn the_restart_block_tells_which_call_it_was() {
        // SAFETY: nothing is read from the descriptor, and it is closed once.
        let program = unsafe { OwnedFd::from_raw_fd(libc::dup(0)) };
        let reader = Reader { program, functions: [10, 20, 30] };
        let again = libc::SYS_restart_syscall;
        let of = |number, function, words: &[(usize, u64)]| reader.wait(&row(number, function, words));
        let sleep = [(RDI, 0x7fff_0000), (SLEEP_CLOCK, 1), (SLEEP_END, 77)];
        let expected = Wait { number: libc::SYS_nanosleep, end: Some((1, 77)) };
        assert_eq!(of(again, 10, &sleep), Some(expected));
        assert_eq!(of(libc::SYS_nanosleep, 10, &sleep), Some(expected));
        assert_eq!(of(libc::SYS_read, 10, &sleep), None, "the block is of an earlier call");
        let sleep = [(RDI, 0), (SLEEP_CLOCK, 0), (SLEEP_END, 77)];
        assert_eq!(of(again, 10, &sleep), Some(Wait { number: libc::SYS_clock_nanosleep, end: Some((0, 77)) }));
        let poll = [(POLL_HAS_END, 1), (POLL_SECONDS, 2), (POLL_NS, 5)];
        assert_eq!(of(again, 20, &poll), Some(Wait { number: libc::SYS_poll, end: Some((1, 2 * NS + 5)) }));
        assert_eq!(of(again, 20, &[]), Some(Wait { number: libc::SYS_poll, end: None }));
        let futex = |operation| of(again, 30, &[(RSI, operation), (FUTEX_END, 9)]);
        assert_eq!(futex(128), Some(Wait { number: libc::SYS_futex, end: Some((1, 9)) }));
        assert_eq!(futex(9 | 128 | 256), Some(Wait { number: libc::SYS_futex, end: None }));
        assert_eq!(of(again, 40, &[]), None);
    }
}
