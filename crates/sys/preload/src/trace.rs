//! Lets the tasks of a restore go together rather than one after the other.
//!
//! At the end of a restore criu traces every thread, to stop it where it has left criu's own code (in `rt_sigreturn`), and for
//! each of them waits three times until it has done what it was told. With hundreds of threads that is most of what a resume
//! takes. Here the threads get their orders as early as possible, and criu hears of each what it expects to hear:
//!
//! ```text
//!  criu, for each thread                           the kernel
//!    SEIZE, INTERRUPT, wait, SETOPTIONS, CONT       SEIZE with these options; a stop of which nothing is made is left out
//!    …all credentials are restored…
//!    INTERRUPT, wait                                the first one interrupts all threads
//!    …they are told to go on…
//!    wait for any: enters rt_sigreturn              each that has come so far goes on at once; its registers are kept
//!    GETREGSET, SYSCALL, wait: has left it          the registers; nothing; the stop, which mostly has come by now
//! ```
//!
//! Whatever else criu asks of a thread whose stop was left out has the thread stopped first.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_long, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::{interrupted, next, stopped, waits};

type Ptrace = unsafe extern "C" fn(c_uint, c_long, c_long, c_long) -> c_long;
type Wait4 = unsafe extern "C" fn(c_int, *mut c_int, c_int, *mut libc::rusage) -> c_int;

/// `NT_PRSTATUS` of linux/elf.h: the general registers.
const GENERAL: c_long = 1;
pub(crate) const PTRACE_EVENT_STOP: c_int = 128;
/// The stop of a thread that was interrupted, as `wait4` tells it.
const INTERRUPTED: c_int = PTRACE_EVENT_STOP << 16 | libc::SIGTRAP << 8 | 0x7f;
/// The stop of a thread at a system call, with PTRACE_O_TRACESYSGOOD.
pub(crate) const AT_SYSCALL: c_int = (libc::SIGTRAP | 0x80) << 8 | 0x7f;

/// `struct user_regs_struct` of a 64-bit task.
pub(crate) type Registers = [u64; 27];
/// Where the number of the system call is in them.
const ORIG_AX: usize = 15;

/// How far criu is with a thread.
#[derive(Debug, Clone, Copy)]
enum State {
    Seized,
    /// Criu takes it for stopped, and it runs.
    LeftOut,
    /// Criu knows that it runs.
    Runs,
    /// It was interrupted together with others; criu has not said so yet.
    Interrupted,
    /// It entered `rt_sigreturn`, and has been let on; criu has not said so yet.
    Returning,
    /// It has been let on, and criu has said so.
    Returned,
    /// All further is between criu and the kernel.
    Criu,
}

#[derive(Default)]
struct Tracer {
    threads: HashMap<c_int, State>,
    /// Stops that criu has not heard of: of any thread, and of those that return.
    stops: VecDeque<(c_int, c_int)>,
    returns: HashMap<c_int, c_int>,
    /// Of those that return: as they were when they entered.
    registers: HashMap<c_int, Registers>,
}

/// The state of the process's one tracer. `None`: this is no restore.
fn tracer() -> Option<MutexGuard<'static, Tracer>> {
    static TRACER: OnceLock<Option<Mutex<Tracer>>> = OnceLock::new();
    let tracer = TRACER.get_or_init(|| std::env::var_os("TRANSHIP_SHARED").map(|_| Mutex::default()));
    Some(tracer.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(crate) fn real_ptrace(request: c_uint, pid: c_int, address: c_long, data: c_long) -> c_long {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function; on the platforms that criu knows, a call with four integers fits its variable
    // arguments.
    let real: Ptrace = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"ptrace") as usize)) };
    // SAFETY: what criu asks is handed on as it came; what is asked here points to structures of this module.
    unsafe { real(request, c_long::from(pid), address, data) }
}

pub(crate) fn real_wait4(pid: c_int, status: *mut c_int, options: c_int, usage: *mut libc::rusage) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Wait4 = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"wait4") as usize)) };
    // SAFETY: as the caller of wait4 vouches, or structures of this module.
    unsafe { real(pid, status, options, usage) }
}

/// The registers of a stopped thread, if it is a 64-bit one.
pub(crate) fn registers(pid: c_int) -> Option<Registers> {
    let mut registers: Registers = [0; 27];
    let mut vector = libc::iovec { iov_base: registers.as_mut_ptr().cast::<c_void>(), iov_len: size_of::<Registers>() };
    let done = real_ptrace(libc::PTRACE_GETREGSET, pid, GENERAL, (&raw mut vector) as c_long);
    (done == 0 && vector.iov_len == size_of::<Registers>()).then_some(registers)
}

/// Gives a stopped thread these registers.
pub(crate) fn set_registers(pid: c_int, registers: &Registers) -> bool {
    let base = registers.as_ptr().cast_mut().cast::<c_void>();
    let vector = libc::iovec { iov_base: base, iov_len: size_of::<Registers>() };
    real_ptrace(libc::PTRACE_SETREGSET, pid, GENERAL, (&raw const vector) as c_long) == 0
}

impl Tracer {
    fn ptrace(&mut self, request: c_uint, pid: c_int, address: c_long, data: c_long) -> c_long {
        let options = c_long::from(libc::PTRACE_O_TRACESYSGOOD);
        let state = self.threads.get(&pid).copied();
        let (next, answer) = match (state, request) {
            (_, libc::PTRACE_SEIZE) if data == 0 => (State::Seized, real_ptrace(request, pid, address, options)),
            (Some(State::Seized), libc::PTRACE_INTERRUPT) => (State::LeftOut, 0),
            (Some(State::LeftOut), libc::PTRACE_SETOPTIONS) if data == options => return 0,
            (Some(State::LeftOut), libc::PTRACE_CONT) if data == 0 => (State::Runs, 0),
            (Some(State::LeftOut), _) => {
                self.stop(pid);
                (State::Criu, real_ptrace(request, pid, address, data))
            }
            (Some(State::Runs), libc::PTRACE_INTERRUPT) => {
                for (thread, state) in &mut self.threads {
                    if matches!(state, State::Runs) && *thread != pid && real_ptrace(request, *thread, 0, 0) == 0 {
                        *state = State::Interrupted;
                    }
                }
                (State::Criu, real_ptrace(request, pid, address, data))
            }
            (Some(State::Interrupted), libc::PTRACE_INTERRUPT) => (State::Criu, 0),
            (Some(State::Returning), libc::PTRACE_GETREGSET) if address == GENERAL => {
                let registers = &self.registers[&pid];
                // SAFETY: for this request the last argument points to an iovec with room for the registers.
                unsafe {
                    let vector = &mut *std::ptr::with_exposed_provenance_mut::<libc::iovec>(data as usize);
                    vector.iov_len = vector.iov_len.min(size_of::<Registers>());
                    registers.as_ptr().cast::<u8>().copy_to(vector.iov_base.cast(), vector.iov_len);
                }
                return 0;
            }
            (Some(State::Returning), libc::PTRACE_SYSCALL) if data == 0 => (State::Returned, 0),
            _ => return real_ptrace(request, pid, address, data),
        };
        if answer == 0 {
            self.threads.insert(pid, next);
        }
        answer
    }

    /// Makes up for a stop that was left out.
    fn stop(&self, pid: c_int) {
        real_ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0);
        // If it has ended instead, what criu asks of it fails.
        real_wait4(pid, std::ptr::null_mut(), libc::__WALL, std::ptr::null_mut());
    }

    /// The next stop of any thread. Those that enter `rt_sigreturn` are let on at once.
    fn wait_any(&mut self, options: c_int, usage: *mut libc::rusage) -> (c_int, c_int) {
        while self.stops.is_empty() {
            let mut more = options;
            loop {
                let mut status = 0;
                let pid = real_wait4(-1, &raw mut status, more, usage);
                if pid <= 0 && more == options {
                    return (pid, status);
                }
                if pid <= 0 {
                    break;
                }
                self.take_in(pid, status);
                // Whatever else has come by now.
                more = options | libc::WNOHANG;
            }
        }
        self.stops.pop_front().expect("the loop has ended")
    }

    fn take_in(&mut self, pid: c_int, status: c_int) {
        let state = self.threads.get(&pid);
        if matches!(state, Some(State::Returning | State::Returned)) {
            self.returns.insert(pid, status);
            return;
        }
        if status == AT_SYSCALL
            && state.is_some()
            && let Some(registers) = registers(pid).filter(|r| r[ORIG_AX] == libc::SYS_rt_sigreturn as u64)
            && real_ptrace(libc::PTRACE_SYSCALL, pid, 0, 0) == 0
        {
            self.threads.insert(pid, State::Returning);
            self.registers.insert(pid, registers);
        }
        self.stops.push_back((pid, status));
    }

    fn wait_one(&mut self, pid: c_int, options: c_int, usage: *mut libc::rusage) -> (c_int, c_int) {
        let returns = match self.threads.get(&pid) {
            Some(State::LeftOut) => return (pid, INTERRUPTED),
            Some(State::Returned) => self.threads.insert(pid, State::Criu).is_some(),
            _ => false,
        };
        let (found, status) = self.returns.remove(&pid).map_or_else(
            || {
                let mut status = 0;
                (real_wait4(pid, &raw mut status, options, usage), status)
            },
            |status| (pid, status),
        );
        if returns && found == pid && status == AT_SYSCALL {
            // What it has returned from is at its stack pointer.
            waits::go_on(pid, self.registers[&pid][interrupted::RSP]);
        }
        (found, status)
    }
}

/// Stands in for libc's `ptrace`.
///
/// # Safety
/// As libc's: the arguments must fit the request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(request: c_uint, pid: c_long, address: c_long, data: c_long) -> c_long {
    match tracer() {
        Some(mut tracer) => tracer.ptrace(request, pid as c_int, address, data),
        None if stopped::put_off(request, pid as c_int) => 0,
        None => {
            let answer = real_ptrace(request, pid as c_int, address, data);
            if answer == 0 && request == libc::PTRACE_GETSIGINFO {
                // SAFETY: for this request the last argument points to a siginfo_t, which the kernel has filled.
                stopped::correct(unsafe { &mut *std::ptr::with_exposed_provenance_mut(data as usize) });
            }
            if answer == 0 && request == libc::PTRACE_GETREGSET && address == GENERAL {
                // SAFETY: for this request the last argument points to an iovec, of which the kernel has said how much it has filled.
                unsafe {
                    let vector = &*std::ptr::with_exposed_provenance::<libc::iovec>(data as usize);
                    if vector.iov_len == size_of::<Registers>() {
                        interrupted::correct(pid as c_int, &mut *vector.iov_base.cast::<Registers>());
                    }
                }
            }
            answer
        }
    }
}

/// Stands in for libc's `wait4`.
///
/// # Safety
/// As libc's: `status` and `usage` are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wait4(pid: c_int, status: *mut c_int, options: c_int, usage: *mut libc::rusage) -> c_int {
    let Some(mut tracer) = tracer().filter(|_| options == libc::__WALL) else {
        stopped::seize();
        return real_wait4(pid, status, options, usage);
    };
    let (found, told) = match pid {
        -1 => tracer.wait_any(options, usage),
        _ => tracer.wait_one(pid, options, usage),
    };
    if found > 0 && !status.is_null() {
        // SAFETY: by contract.
        unsafe { *status = told };
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// The stops of any child are waited for.
    static TURN: Mutex<()> = Mutex::new(());

    fn wait(tracer: &mut Tracer, pid: c_int) -> c_int {
        let (found, status) = tracer.wait_one(pid, libc::__WALL, std::ptr::null_mut());
        assert_eq!(found, pid);
        status
    }

    fn general(tracer: &mut Tracer, pid: c_int) -> Registers {
        let mut registers: Registers = [0; 27];
        let mut vector = libc::iovec { iov_base: registers.as_mut_ptr().cast(), iov_len: size_of::<Registers>() };
        assert_eq!(tracer.ptrace(libc::PTRACE_GETREGSET, pid, GENERAL, (&raw mut vector) as c_long), 0);
        assert_eq!(vector.iov_len, size_of::<Registers>());
        registers
    }

    /// As criu does it with each thread, up to where it is let go.
    #[test]
    fn a_task_is_stopped_where_it_has_left_a_signal_handler() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let program = "trap 'n=1' USR1; n=0; echo ready; while [ $n = 0 ]; do :; done; echo done";
        let mut child = Command::new("sh").args(["-c", program]).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(output.next().unwrap().unwrap(), "ready");
        let (pid, mut tracer) = (child.id() as c_int, Tracer::default());
        let options = c_long::from(libc::PTRACE_O_TRACESYSGOOD);
        assert_eq!(tracer.ptrace(libc::PTRACE_SEIZE, pid, 0, 0), 0);
        assert_eq!(tracer.ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0), 0);
        assert_eq!(wait(&mut tracer, pid), INTERRUPTED);
        assert_eq!(tracer.ptrace(libc::PTRACE_SETOPTIONS, pid, 0, options), 0);
        assert_eq!(tracer.ptrace(libc::PTRACE_CONT, pid, 0, 0), 0);

        assert_eq!(tracer.ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0), 0);
        assert_eq!(wait(&mut tracer, pid), INTERRUPTED);
        // SAFETY: plain integers.
        unsafe { libc::kill(pid, libc::SIGUSR1) };
        let mut go_on = 0;
        loop {
            assert_eq!(tracer.ptrace(libc::PTRACE_SYSCALL, pid, 0, go_on), 0);
            let (found, status) = tracer.wait_any(libc::__WALL, std::ptr::null_mut());
            assert_eq!((found, status & 0xff), (pid, 0x7f), "it stops");
            go_on = if status == AT_SYSCALL { 0 } else { c_long::from(status >> 8 & 0x7f) };
            if status == AT_SYSCALL && general(&mut tracer, pid)[ORIG_AX] == libc::SYS_rt_sigreturn as u64 {
                break;
            }
        }
        assert!(matches!(tracer.threads[&pid], State::Returning), "it has been let on");
        assert_eq!(tracer.ptrace(libc::PTRACE_SYSCALL, pid, 0, 0), 0);
        assert_eq!(wait(&mut tracer, pid), AT_SYSCALL);
        assert_ne!(general(&mut tracer, pid)[ORIG_AX], libc::SYS_rt_sigreturn as u64, "it has returned");
        assert_eq!(tracer.ptrace(libc::PTRACE_DETACH, pid, 0, 0), 0);
        assert_eq!(output.next().unwrap().unwrap(), "done");
        child.wait().unwrap();
    }

    #[test]
    fn what_is_asked_of_a_task_whose_stop_was_left_out_finds_it_stopped() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, mut tracer) = (child.id() as c_int, Tracer::default());
        assert_eq!(tracer.ptrace(libc::PTRACE_SEIZE, pid, 0, 0), 0);
        assert_eq!(tracer.ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0), 0);
        assert_eq!(wait(&mut tracer, pid), INTERRUPTED);
        assert_ne!(general(&mut tracer, pid)[16], 0, "its instruction pointer");
        assert_eq!(tracer.ptrace(libc::PTRACE_CONT, pid, 0, 0), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
