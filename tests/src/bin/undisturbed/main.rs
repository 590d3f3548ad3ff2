//! Processes that each wait in another system call, and note when it returns. Without an argument they wait for what never comes, and write
//! to `/tmp/noticed`. `undisturbed SECONDS` has them wait for so long; then they write to `/tmp/ended` what the call has returned,
//! errno, and after how many milliseconds. Each has signals of all dispositions, and some pending. Listens on TCP port 7004 when
//! all have begun.

#[path = "../../../../crates/sys/tests/injection/calls.rs"]
mod calls;
mod timed;

use std::fs::File;
use std::io::{Error, Write};
use std::net::TcpListener;

use anyhow::{Context, Result};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, kill, sigaction, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, pause};

const PORT: u16 = 7004;

extern "C" fn handle(_: i32) {}

/// SIGTRAP is what a debugger's stops use, and what a program may have a use of its own for.
fn set_signals() -> Result<()> {
    let set = |signal, handler| {
        let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing.
        unsafe { sigaction(signal, &action) }
    };
    set(Signal::SIGTRAP, SigHandler::Handler(handle))?;
    set(Signal::SIGUSR1, SigHandler::Handler(handle))?;
    set(Signal::SIGHUP, SigHandler::SigIgn)?;
    // CRIU takes no process with a pending SIGTRAP.
    let pending = [Signal::SIGSYS, Signal::SIGWINCH];
    let blocked = pending.into_iter().chain([Signal::SIGUSR2]).collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), None)?;
    for signal in pending {
        kill(Pid::this(), signal)?;
    }
    Ok(())
}

fn append(path: &str, line: &str) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(path)?;
    Ok(file.write_all(format!("{line}\n").as_bytes())?)
}

fn wait_in(name: &str, seconds: Option<i64>) -> Result<()> {
    set_signals()?;
    if let Some(seconds) = seconds {
        let timed::Ended { returned, errno, after } = timed::call(name, seconds);
        append("/tmp/ended", &format!("{name} {returned} {errno} {}", after.as_millis()))?;
    } else {
        let returned = calls::call(name);
        append("/tmp/noticed", &format!("{name}: {returned}, {}", Error::last_os_error()))?;
    }
    loop {
        pause();
    }
}

fn main() -> Result<()> {
    let seconds = std::env::args().nth(1).map(|seconds| seconds.parse()).transpose()?;
    let names: &[&str] = if seconds.is_some() { &timed::TIMED } else { &calls::CALLS };
    // Ends with a signal that is not handled here, as the first process of its namespace.
    for name in names {
        // SAFETY: this process has one thread.
        if let ForkResult::Child = unsafe { fork() }? {
            wait_in(name, seconds)?;
        }
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT)).with_context(|| format!("cannot listen on TCP port {PORT}"))?;
    loop {
        drop(listener.accept()?);
    }
}
