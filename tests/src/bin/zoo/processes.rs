//! Processes: their tree, their sessions and groups, what they share, how they end, what they may not do.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{Pid, getpgrp, getpid, getppid, getsid, setpgid, setsid};

use crate::kin::{Answer, Kin};
use crate::raw::{self, Region, Sharing};
use crate::species::{Check, pattern, read_proc, status_line};

fn place_in_tree() -> Result<String> {
    Ok(format!("pid {} parent {} group {} session {}", getpid(), getppid(), getpgrp(), getsid(None)?))
}

/// Answers with its own place in the tree and that of all below.
fn with_below(mut below: Vec<Kin>) -> Answer {
    Box::new(move |question| {
        let mut text = place_in_tree()?;
        for kin in &mut below {
            text += ", ";
            text += &kin.ask(question)?;
        }
        Ok(text)
    })
}

/// A session with a leader, a group of two in the background, and a grandchild with a session of its own.
pub fn tree(_: &Path) -> Result<Check> {
    let mut leader = Kin::fork(|| {
        setsid()?;
        let group = Kin::fork(|| {
            setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            let member = Kin::fork(|| Ok(with_below(vec![])))?;
            Ok(with_below(vec![member]))
        })?;
        let other = Kin::fork(|| {
            setsid()?;
            Ok(with_below(vec![]))
        })?;
        Ok(with_below(vec![group, other]))
    })?;
    let right = leader.ask("place")?;
    Ok(Box::new(move || {
        let found = leader.ask("place")?;
        ensure!(found == right, "the tree was [{right}] and is [{found}]");
        Ok(())
    }))
}

/// A child that shares nothing any more: each process changes its own copy of what both had at the fork.
pub fn forked_child(_: &Path) -> Result<Check> {
    const PAGES: usize = 256;
    let region = Arc::new(Region::anonymous(PAGES * raw::PAGE, Sharing::Private)?);
    region.fill(0..PAGES, pattern);
    // A quarter is changed by the child, another by the parent, half stays as it was.
    let own = |region: &Region, quarter: usize| region.fill((quarter..PAGES).step_by(4), |i| !pattern(i));
    let look = |region: &Region, quarter: usize| {
        (0..PAGES).try_for_each(|p| region.verify(p, |i| if p % 4 == quarter { !pattern(i) } else { pattern(i) }))
    };
    let common = Arc::clone(&region);
    let mut kin = Kin::fork(move || {
        own(&common, 1);
        let mut turn = 0u64;
        Ok(Box::new(move |_| {
            look(&common, 1)?;
            turn += 1;
            Ok(turn.to_string())
        }))
    })?;
    own(&region, 3);
    let mut turn = 0u64;
    Ok(Box::new(move || {
        look(&region, 3)?;
        let found = kin.ask("look")?;
        turn += 1;
        ensure!(found == turn.to_string(), "the child's counter is {found} instead of {turn}");
        Ok(())
    }))
}

/// Anonymous memory that two processes share.
pub fn shared_anonymous(_: &Path) -> Result<Check> {
    const PAGES: usize = 256;
    let region = Arc::new(Region::anonymous(PAGES * raw::PAGE, Sharing::Shared)?);
    region.fill((1..PAGES).step_by(2), pattern);
    let look =
        |region: &Region| (1..PAGES).try_for_each(|p| region.verify(p, |i| if p % 2 == 1 { pattern(i) } else { 0 }));
    let common = Arc::clone(&region);
    let mut kin = Kin::fork(move || {
        Ok(Box::new(move |_| {
            look(&common)?;
            Ok(common.words()[0].fetch_add(1, Ordering::SeqCst).to_string())
        }))
    })?;
    let mut turn = 0u64;
    Ok(Box::new(move || {
        look(&region)?;
        turn += 2;
        region.words()[0].store(turn, Ordering::SeqCst);
        let seen = kin.ask("add one")?;
        ensure!(seen == turn.to_string(), "the other process saw {seen} instead of {turn}");
        let now = region.words()[0].load(Ordering::SeqCst);
        ensure!(now == turn + 1, "what the other process wrote does not show: {now}");
        Ok(())
    }))
}

/// Children that have ended, one by itself and one by a signal, and that nobody has waited for.
pub fn zombies(_: &Path) -> Result<Check> {
    let ended = raw::fork(|| 7)?;
    let killed = raw::fork(|| {
        let _ = nix::sys::signal::raise(Signal::SIGKILL);
        1
    })?;
    let look = |pid: Pid, wait: WaitPidFlag| waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | wait);
    for pid in [ended, killed] {
        look(pid, WaitPidFlag::empty())?;
    }
    Ok(Box::new(move || {
        let found = look(ended, WaitPidFlag::WNOHANG)?;
        ensure!(found == WaitStatus::Exited(ended, 7), "the one that ended by itself is {found:?}");
        let found = look(killed, WaitPidFlag::WNOHANG)?;
        ensure!(found == WaitStatus::Signaled(killed, Signal::SIGKILL, false), "the one that was killed is {found:?}");
        Ok(())
    }))
}

/// A child that a signal has stopped. Each time that it is continued it looks at its memory, counts, and stops itself again.
pub fn stopped_child(_: &Path) -> Result<Check> {
    const PAGES: usize = 64;
    let turns = Arc::new(Region::anonymous(raw::PAGE, Sharing::Shared)?);
    let common = Arc::clone(&turns);
    let child = raw::fork(move || {
        let lives = || -> Result<()> {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            let own = Region::anonymous(PAGES * raw::PAGE, Sharing::Private)?;
            own.fill(0..PAGES, pattern);
            loop {
                nix::sys::signal::raise(Signal::SIGSTOP)?;
                (0..PAGES).try_for_each(|page| own.verify(page, pattern))?;
                common.words()[0].fetch_add(1, Ordering::SeqCst);
            }
        };
        i32::from(lives().is_err())
    })?;
    let (mut looks, mut turn) = (0u64, 0u64);
    Ok(Box::new(move || {
        if looks % 10 == 0 {
            // It stops once more.
            let status = waitid(Id::Pid(child), WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED)?;
            ensure!(status == WaitStatus::Stopped(child, Signal::SIGSTOP), "the stopped child is {status:?}");
        }
        // Right after a resume it is about to stop again, before it runs any code of its own; and a tracer may look at it.
        let begun = Instant::now();
        loop {
            let stat = read_proc(&format!("/proc/{child}/stat"))?;
            if stat.contains(") T ") || stat.contains(") t ") {
                break;
            }
            ensure!(begun.elapsed() < Duration::from_secs(2), "the stopped child is not stopped: {stat}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let seen = turns.words()[0].load(Ordering::SeqCst);
        ensure!(seen == turn, "the stopped child has run {seen} times instead of {turn}");
        looks += 1;
        if looks % 10 == 0 {
            turn += 1;
            nix::sys::signal::kill(child, Signal::SIGCONT)?;
        }
        Ok(())
    }))
}

/// A child ends now and then; its parent gets SIGCHLD and the status.
pub fn child_signals(_: &Path) -> Result<Check> {
    raw::count_signal(libc::SIGCHLD)?;
    let mut n = 0u64;
    Ok(Box::new(move || {
        n += 1;
        if n % 10 != 1 {
            return Ok(());
        }
        let before = raw::signal_count(libc::SIGCHLD);
        let pid = raw::fork(|| 42)?;
        let status = waitpid(pid, None)?;
        ensure!(status == WaitStatus::Exited(pid, 42), "the child is {status:?}");
        // The signal is sent before the parent can be woken from its wait, and handled before the wait returns.
        ensure!(raw::signal_count(libc::SIGCHLD) > before, "no SIGCHLD came");
        Ok(())
    }))
}

/// A process with a filter that lets one system call fail.
pub fn seccomp(_: &Path) -> Result<Check> {
    let mut kin = Kin::fork(|| {
        raw::deny_system_call(libc::SYS_sethostname, libc::EXDEV)?;
        Ok(Box::new(|_| {
            let mode = status_line("Seccomp")?;
            ensure!(mode == "2", "the mode of seccomp is {mode}");
            let filters = status_line("Seccomp_filters")?;
            ensure!(filters != "0", "there are {filters} filters");
            ensure!(status_line("NoNewPrivs")? == "1", "new privileges may be had");
            match nix::unistd::sethostname("zoo") {
                Err(nix::Error::EXDEV) => Ok(String::new()),
                other => bail!("the denied system call gives {other:?}"),
            }
        }))
    })?;
    Ok(Box::new(move || {
        kin.ask("look")?;
        Ok(())
    }))
}

/// A process with one capability less than its parent.
pub fn capabilities(_: &Path) -> Result<Check> {
    const CAP_KILL: u32 = 5;
    let sets = || -> Result<String> {
        ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]
            .iter()
            .map(|key| Ok(format!("{key} {} ", status_line(key)?)))
            .collect()
    };
    let whole = sets()?;
    let mut kin = Kin::fork(|| {
        raw::drop_capability(CAP_KILL)?;
        Ok(Box::new(move |_| sets()))
    })?;
    let less = kin.ask("look")?;
    Ok(Box::new(move || {
        let found = sets()?;
        ensure!(found == whole, "the capabilities were {whole} and are {found}");
        let found = kin.ask("look")?;
        ensure!(found.trim() == less.trim(), "the child's capabilities were {less} and are {found}");
        Ok(())
    }))
}
