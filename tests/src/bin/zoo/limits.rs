//! What a process may do and where it stands.

use std::path::Path;
use std::sync::mpsc;

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, gettid};

use crate::raw;
use crate::species::{Check, read_proc, status_line};

/// Limits that are lower than usual.
pub fn resource_limits(_: &Path) -> Result<Check> {
    let limits = [
        (Resource::RLIMIT_NOFILE, 500, 900),
        (Resource::RLIMIT_CORE, 0, 0),
        (Resource::RLIMIT_STACK, 4 << 20, 6 << 20),
        (Resource::RLIMIT_FSIZE, 1 << 30, 1 << 31),
        (Resource::RLIMIT_MSGQUEUE, 1000, 2000),
    ];
    for (resource, soft, hard) in limits {
        setrlimit(resource, soft, hard).with_context(|| format!("{resource:?}"))?;
    }
    Ok(Box::new(move || {
        for (resource, soft, hard) in limits {
            let found = getrlimit(resource)?;
            ensure!(found == (soft, hard), "{resource:?} is {found:?} instead of {:?}", (soft, hard));
        }
        Ok(())
    }))
}

/// The mask of new files.
pub fn umask(place: &Path) -> Result<Check> {
    // Group and others nothing; the directories of the other animals of this cage stay usable.
    nix::sys::stat::umask(Mode::from_bits_truncate(0o037));
    let path = place.join("file");
    Ok(Box::new(move || {
        let mask = status_line("Umask")?;
        ensure!(mask == "0037", "the mask is {mask}");
        std::fs::File::create(&path)?;
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path)?) & 0o777;
        std::fs::remove_file(&path)?;
        ensure!(mode == 0o640, "a new file has the mode {mode:o}");
        Ok(())
    }))
}

/// The working directory.
pub fn working_directory(place: &Path) -> Result<Check> {
    let place = place.join("here");
    std::fs::create_dir_all(&place)?;
    std::env::set_current_dir(&place)?;
    std::fs::write("note", "here")?;
    Ok(Box::new(move || {
        let found = std::env::current_dir()?;
        ensure!(found == place, "the working directory is {}", found.display());
        let note = std::fs::read_to_string("note")?;
        ensure!(note == "here", "the note in it says {note:?}");
        Ok(())
    }))
}

/// Environment and arguments, as the process and as the kernel know them.
pub fn environment(_: &Path) -> Result<Check> {
    let look = || -> Result<_> {
        Ok((
            std::env::vars_os().collect::<Vec<_>>(),
            std::fs::read("/proc/self/environ")?,
            std::fs::read("/proc/self/cmdline")?,
            std::fs::read_link("/proc/self/exe")?,
        ))
    };
    let before = look()?;
    ensure!(!before.2.is_empty(), "there are no arguments to look at");
    Ok(Box::new(move || {
        ensure!(look()? == before, "environment, arguments or program changed");
        Ok(())
    }))
}

/// Niceness.
pub fn nice(_: &Path) -> Result<Check> {
    raw::set_nice(5)?;
    Ok(Box::new(|| {
        let stat = read_proc("/proc/self/stat")?;
        // The name may contain anything, so fields are counted from its closing parenthesis: state is the third.
        let nice = stat.rsplit(')').next().and_then(|rest| rest.split_ascii_whitespace().nth(19 - 3));
        ensure!(nice == Some("5"), "the niceness is {nice:?}");
        Ok(())
    }))
}

/// Users, groups, name, host name, and how likely the kernel is to kill it.
pub fn identity(_: &Path) -> Result<Check> {
    std::fs::write("/proc/self/oom_score_adj", "500").context("setting oom_score_adj")?;
    std::fs::write("/proc/self/comm", "zoo-animal")?;
    let look = || -> Result<_> {
        Ok((
            ["Uid", "Gid", "Groups", "NoNewPrivs", "Pid", "NSpid", "PPid"]
                .iter()
                .map(|key| status_line(key))
                .collect::<Result<Vec<_>>>()?,
            read_proc("/proc/self/comm")?,
            nix::unistd::gethostname()?,
            read_proc("/proc/self/oom_score_adj")?,
        ))
    };
    let before = look()?;
    Ok(Box::new(move || {
        let now = look()?;
        ensure!(now == before, "it was {before:?} and is {now:?}");
        Ok(())
    }))
}

/// The processors that it may run on: the first one, and one of its threads on the last one only.
pub fn affinity(_: &Path) -> Result<Check> {
    let me = Pid::from_raw(0);
    let all = sched_getaffinity(me)?;
    let there: Vec<usize> = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)).collect();
    let only = |cpu: Option<&usize>| -> Result<CpuSet> {
        let mut set = CpuSet::new();
        set.set(*cpu.context("there is no processor")?)?;
        Ok(set)
    };
    let (first, last) = (only(there.first())?, only(there.last())?);
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = tell.send(sched_setaffinity(me, &last).map(|()| gettid()));
        loop {
            std::thread::park();
        }
    });
    let thread = told.recv()??;
    sched_setaffinity(me, &first)?;
    Ok(Box::new(move || {
        ensure!(sched_getaffinity(me)? == first, "it may run on other processors than the first");
        ensure!(sched_getaffinity(thread)? == last, "its thread may run on other processors than the last");
        Ok(())
    }))
}
