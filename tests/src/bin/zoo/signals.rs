//! Signals: pending, blocked, handled, ignored, and read from a descriptor.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::raw;
use crate::species::{Check, status_line};

fn status_set(key: &str) -> Result<u64> {
    Ok(u64::from_str_radix(&status_line(key)?, 16)?)
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Blocked signals that wait: one for the process, one for the thread, and a queue of a real-time signal with values.
pub fn pending(_: &Path) -> Result<Check> {
    let real_time = libc::SIGRTMIN() + 1;
    let all = [libc::SIGUSR1, libc::SIGUSR2, real_time];
    raw::block(&all)?;
    let send = move || -> Result<()> {
        nix::sys::signal::kill(nix::unistd::getpid(), Signal::SIGUSR1)?;
        raise(Signal::SIGUSR2)?;
        (1..=3).try_for_each(|value| raw::queue_signal(real_time, value))
    };
    send()?;
    let mut n = 0u64;
    Ok(Box::new(move || {
        let (thread, process) = (status_set("SigPnd")?, status_set("ShdPnd")?);
        ensure!(thread & bit(libc::SIGUSR2) != 0, "the thread's signal no longer waits: {thread:#x}");
        ensure!(
            process & bit(libc::SIGUSR1) != 0 && process & bit(real_time) != 0,
            "the process's signals no longer wait: {process:#x}"
        );
        let blocked = status_set("SigBlk")?;
        ensure!(all.iter().all(|s| blocked & bit(*s) != 0), "the signals are no longer blocked: {blocked:#x}");
        n += 1;
        if n.is_multiple_of(10) {
            for value in 1..=3 {
                let taken = raw::take_signal(&[real_time])?;
                ensure!(taken == Some((real_time, value)), "signal {value} of the queue is {taken:?}");
            }
            for signal in [libc::SIGUSR1, libc::SIGUSR2] {
                ensure!(raw::take_signal(&[signal])?.is_some(), "signal {signal} was announced but not there");
            }
            let more = raw::take_signal(&all)?;
            ensure!(more.is_none(), "there was one signal more: {more:?}");
            send()?;
        }
        Ok(())
    }))
}

/// A handler that runs, and the sets of handled and ignored signals.
pub fn dispositions(_: &Path) -> Result<Check> {
    raw::count_signal(libc::SIGURG)?;
    let sets = (status_set("SigCgt")?, status_set("SigIgn")?);
    let mut sent = 0u64;
    Ok(Box::new(move || {
        let now = (status_set("SigCgt")?, status_set("SigIgn")?);
        ensure!(now == sets, "handled and ignored signals were {sets:x?} and are {now:x?}");
        raise(Signal::SIGURG)?;
        sent += 1;
        let handled = raw::signal_count(libc::SIGURG);
        ensure!(handled == sent, "{sent} signals were sent, {handled} handled");
        Ok(())
    }))
}

/// A signalfd with a signal waiting in it.
pub fn signalfd(_: &Path) -> Result<Check> {
    raw::block(&[libc::SIGIO])?;
    let set: SigSet = [Signal::SIGIO].into_iter().collect();
    let fd = SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK)?;
    raise(Signal::SIGIO)?;
    Ok(Box::new(move || {
        let signal = fd.read_signal()?.context("no signal waits in the descriptor")?;
        ensure!(signal.ssi_signo == Signal::SIGIO as u32, "signal {} came out", signal.ssi_signo);
        ensure!(signal.ssi_pid == std::process::id(), "the signal is from {}", signal.ssi_pid);
        ensure!(fd.read_signal()?.is_none(), "a second signal came out");
        raise(Signal::SIGIO)?;
        Ok(())
    }))
}
