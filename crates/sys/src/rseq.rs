//! Restartable sequences (rseq(2), kernel/rseq.c): the kernel sends a thread that was kept from running inside of one to the
//! sequence's abort handler. It looks for that at the instruction pointer with which the thread goes on.

use std::io;

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
