//! Waits that end at a point in time, and that CRIU has interrupted in a thread that goes on: CRIU has given the thread registers with which
//! its system call begins again. Here it makes the call with what is left of the time, and is interrupted at once: so that the kernel has a
//! restart block for it, and the registers are those that the program gave. (The preloaded library does the same with restored threads.)

use std::io;

use nix::time::{ClockId, clock_gettime};

use crate::remote::StoppedThread;
use crate::restart_blocks::Wait;
use crate::tracee::{Registers, Tracee};
use crate::vdso::Vdso;

/// Of include/linux/errno.h, as the kernel leaves them in the register of the result.
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
const ERESTARTSYS: i64 = -512;
/// The bytes of a `syscall` instruction, as the lower half of a word, and how many they are.
const SYSCALL: u64 = 0x050f;
const SYSCALL_BYTES: u64 = 2;
const NS: u64 = 1_000_000_000;

/// The registers of a thread that CRIU has made begin a system call again, just before that: also where it has begun already, and was
/// interrupted again.
fn just_before(tracee: Tracee, number: u64) -> io::Result<Option<Registers>> {
    let mut own = tracee.registers()?;
    if own.orig_rax == number && matches!(own.rax as i64, ERESTARTNOHAND | ERESTART_RESTARTBLOCK) {
        own.rax = number;
        own.rip -= SYSCALL_BYTES;
    } else if own.rax != number {
        return Ok(None);
    }
    own.orig_rax = u64::MAX;
    Ok((tracee.peek(own.rip)? & 0xffff == SYSCALL).then_some(own))
}

/// Lets a thread go, which is in a trap, with what is left of the time. `false`: it is still in the trap, as it was.
pub(crate) fn go_on(process: u32, tracee: Tracee, wait: &Wait) -> io::Result<bool> {
    let number = wait.number as u64;
    let Some(own) = just_before(tracee, number)? else { return Ok(false) };
    let instruction = Vdso::of(process)?.syscall_instruction();
    let now = clock_gettime(ClockId::from_raw(wait.clock)).map_err(io::Error::from)?;
    let left = wait.end_ns.saturating_sub(now.tv_sec() as u64 * NS + now.tv_nsec() as u64);
    let mut stopped = StoppedThread { tracee, own, instruction };
    let (mut page, mut redirected) = (None, own);
    if wait.number == libc::SYS_poll {
        // Milliseconds, and rather too many than too few.
        redirected.rdx = left.div_ceil(1_000_000).min(i32::MAX as u64);
    } else {
        let at = stopped.map_page()?;
        page = Some(at);
        tracee.poke(at, left / NS)?;
        tracee.poke(at + 8, left % NS)?;
        // A signal that came meanwhile has changed them.
        redirected = stopped.own;
        match wait.number {
            libc::SYS_nanosleep => redirected.rdi = at,
            libc::SYS_clock_nanosleep => redirected.rdx = at,
            libc::SYS_futex => redirected.r10 = at,
            _ => {}
        }
    }
    if stopped.own.rip == own.rip && stopped.own.rax == number {
        interrupt(&mut stopped, redirected, number)?;
    }
    if let Some(at) = page {
        stopped.unmap_page(at)?;
    }
    stopped.release();
    Ok(true)
}

/// Has the thread make its system call, be interrupted in it, and be in a trap again.
fn interrupt(stopped: &mut StoppedThread, redirected: Registers, number: u64) -> io::Result<()> {
    let after = stopped.begin_and_interrupt(&redirected, number)?;
    let Some(after) = after else { return Ok(()) };
    let own = &mut stopped.own;
    (own.rax, own.rcx, own.r11, own.rip) = (after.rax, after.rcx, after.r11, after.rip);
    let is_restarted = (ERESTART_RESTARTBLOCK..=ERESTARTSYS).contains(&(after.rax as i64));
    own.orig_rax = if is_restarted { number } else { u64::MAX };
    stopped.tracee.set_registers(&stopped.own)
}
