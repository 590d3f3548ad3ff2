//! How zombies ended that criu makes: it keeps seven bits of an exit status, and takes the last signal for SIGABRT.
//!
//! The agent lists those of which criu would change that, in the file that `TRANSHIP_ENDS` names. The process that is to be
//! such a zombie ends as is listed there when it calls exit or sends itself a signal.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{next, texts};

type Exit = unsafe extern "C" fn(c_int) -> !;
type Kill = unsafe extern "C" fn(libc::pid_t, c_int) -> c_int;

/// Those that are listed, by their pids in the container.
fn listed() -> &'static HashMap<u32, i32> {
    static LISTED: OnceLock<HashMap<u32, i32>> = OnceLock::new();
    LISTED.get_or_init(|| {
        let Some(path) = std::env::var_os("TRANSHIP_ENDS") else { return HashMap::new() };
        texts::ends(&std::fs::read_to_string(path).unwrap_or_default())
    })
}

/// Has the list read, where the file can be found.
pub(crate) fn read() {
    listed();
}

/// Whether this process is one that criu makes, and not criu itself.
static IS_TASK: AtomicBool = AtomicBool::new(false);

/// This process has just been made.
pub(crate) fn begins() {
    IS_TASK.store(true, Ordering::Relaxed);
}

/// Whether this process is one that criu makes.
pub(crate) fn is_task() -> bool {
    IS_TASK.load(Ordering::Relaxed)
}

/// How this process is to end, if that is listed.
fn own() -> Option<i32> {
    // SAFETY: no arguments.
    let own = unsafe { libc::getpid() };
    listed().get(&(own as u32)).copied().filter(|_| is_task())
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As libc's: no other thread ends the process meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn exit(status: c_int) -> ! {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Exit = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"exit") as usize)) };
    // So criu calls it for a zombie; it has other numbers for what fails.
    let is_zombies = |code: &i32| code & 0x7f == 0 && status == code >> 8 & 0x7f;
    // SAFETY: handed on.
    unsafe { real(own().filter(is_zombies).map_or(status, |code| code >> 8 & 0xff)) }
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As libc's: none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kill(pid: libc::pid_t, signal: c_int) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: the symbol is libc's function of this type.
    let real: Kill = unsafe { std::mem::transmute(*REAL.get_or_init(|| next(c"kill") as usize)) };
    // SAFETY: no arguments.
    let is_own = pid == unsafe { libc::getpid() } && signal == libc::SIGABRT;
    let wanted = own().map(|code| code & 0x7f).filter(|wanted| is_own && *wanted != 0);
    // SAFETY: handed on.
    unsafe { real(pid, wanted.unwrap_or(signal)) }
}
