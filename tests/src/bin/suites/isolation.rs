//! Namespaces of its own for a command, so that several labs can be up on one machine.
//!
//! ```text
//!   suites isolate         makes the scratch directory; removes it and the cgroups at the end
//!     └─ suites enter      enters new cgroups, then executes unshare(1)
//!          └─ suites init  process 1: mounts, the loopback interface, the deadline; reaps orphans
//!               └─ the command
//! ```
//!
//! There is no network inside but the loopback interface. `/run`, `/tmp`, `/var/tmp`, `/dev/shm`, `/etc/tranship` and the
//! directories of Tranship and of the engines in `/var/lib` are the command's own.

use std::env;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};

use crate::Isolate;
use crate::cgroups::{self, Hierarchy, enable_controllers};

/// Set, to anything, for the command.
pub const MARK: &str = "TRANSHIP_ISOLATED";
/// The beginning of the line that says how many seconds of CPU time the command has used.
pub const USED: &str = "seconds of CPU time: ";
/// The exit code of a command that was ended at its deadline, as timeout(1) has it.
const TIMED_OUT: u8 = 124;
/// Get a tmpfs each. Those that are missing are made on the host, and stay there, empty: an isolated lab that removed them
/// would unmount what other labs have mounted there.
const OWN_DIRECTORIES: [&str; 4] = ["/etc/tranship", "/var/lib/tranship", "/var/lib/containers", "/var/lib/cni"];
/// File systems below /sys that have one instance, and are hidden by a new sysfs.
const BELOW_SYS: [&str; 4] = ["bpf", "debugfs", "tracefs", "securityfs"];
const NOTHING: Option<&str> = None;

/// Runs a command in namespaces of its own to its end, and returns its exit code.
pub fn isolate(mut what: Isolate) -> Result<ExitCode> {
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    ensure!(what.name.chars().all(valid), "a name is made of letters, digits, '-' and '_', not {:?}", what.name);
    ensure!(nix::unistd::geteuid().is_root(), "namespaces need root");
    // Whoever started this may be killed; the command must not outlive that.
    set_pdeathsig(Signal::SIGTERM).context("cannot ask for a signal at the parent's death")?;
    for directory in OWN_DIRECTORIES {
        fs::create_dir_all(directory).with_context(|| format!("cannot make {directory}"))?;
    }
    let since = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    what.name = format!("{}-{since:x}", what.name);
    let scratch = env::temp_dir().join(format!("suite-{}", what.name));
    for part in ["tmp", "var-tmp"] {
        let directory = scratch.join(part);
        fs::create_dir_all(&directory)
            .and_then(|()| fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)))
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    what.scratch = Some(scratch.clone());
    let status = next("enter", &what)?.status().context("cannot start it");
    // What is mounted there is mounted in the namespaces alone.
    fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    if let Some(used) = cgroups::cpu_time(&what.name) {
        eprintln!("{USED}{:.1}", used.as_secs_f64());
    }
    cgroups::remove(&what.name)?;
    Ok(ExitCode::from(status?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

/// The command that goes on with the next step.
fn next(step: &str, what: &Isolate) -> Result<Command> {
    let mut command = Command::new(crate::own_program().context("cannot find this program")?);
    command.arg(step).args(arguments(what));
    Ok(command)
}

fn arguments(what: &Isolate) -> Vec<std::ffi::OsString> {
    let mut all: Vec<std::ffi::OsString> = Vec::new();
    if what.cgroup2 {
        all.push("--cgroup2".into());
    }
    if let Some(limit) = what.limit {
        all.extend(["--limit".into(), limit.to_string().into()]);
    }
    if let Some(scratch) = &what.scratch {
        all.extend(["--scratch".into(), scratch.into()]);
    }
    all.extend([what.name.as_str().into(), "--".into()]);
    all.extend(what.command.iter().cloned());
    all
}

/// Enters new cgroups and executes unshare(1).
pub fn enter(what: &Isolate) -> Result<ExitCode> {
    set_pdeathsig(Signal::SIGKILL).context("cannot ask for a signal at the parent's death")?;
    cgroups::enter(&what.name)?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--uts", "--ipc", "--mount-proc", "--kill-child"]);
    command.arg("--").arg(crate::own_program()?).arg("init").args(arguments(what));
    Err(command.exec()).context("cannot execute unshare; is util-linux installed?")
}

/// Process 1 of the namespaces.
pub fn init(what: &Isolate) -> Result<ExitCode> {
    ensure!(std::process::id() == 1, "`init` is for `suites isolate`");
    cgroups::enter_namespace(&what.name)?;
    private_view(what)?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("cannot run ip")?;
    ensure!(up.success(), "cannot set the loopback interface up");
    let (program, arguments) = what.command.split_first().context("no command")?;
    let mut command = Command::new(program);
    command.args(arguments).env(MARK, "1").env_remove("TMPDIR").stdin(Stdio::null());
    let child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let child = i32::try_from(child.id()).context("a pid")?;
    if let Some(limit) = what.limit {
        std::thread::spawn(move || end_at(Duration::from_secs(limit)));
    }
    loop {
        match waitpid(None, None).context("cannot wait for the command")? {
            WaitStatus::Exited(pid, code) if pid.as_raw() == child => {
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
            WaitStatus::Signaled(pid, signal, _) if pid.as_raw() == child => {
                eprintln!("suites: {} was ended by {signal}", program.display());
                return Ok(ExitCode::from(u8::try_from(128 + signal as i32).unwrap_or(1)));
            }
            // An orphan.
            _ => {}
        }
    }
}

/// Ends process 1, and with it all others of the namespaces, after this time; shows first which ones run.
fn end_at(limit: Duration) {
    std::thread::sleep(limit);
    eprintln!("suites: not ended within {} s; the processes:", limit.as_secs());
    let _ = Command::new("sh").args(["-c", "ps -eo pid,ppid,stat,wchan:24,etimes,args >&2"]).status();
    std::process::exit(i32::from(TIMED_OUT));
}

/// Gives this mount namespace, which is private already, directories and file systems of its own.
fn private_view(what: &Isolate) -> Result<()> {
    let hierarchies = cgroups::hierarchies()?;
    let below_sys = below_sys()?;
    let top = Path::new("/sys/fs/cgroup");
    let links = links(top);
    let scratch = what.scratch.as_deref().context("no scratch directory")?;
    let here = env::current_dir().context("cannot find the working directory")?;
    let kept = keep(&needed(what)?, scratch)?;
    // Mounts that are only hidden would still be found in mountinfo.
    for hidden in ["/sys", "/run"] {
        detach_below(Path::new(hidden))?;
    }
    fresh("/sys", "sysfs", "")?;
    for (point, kind) in below_sys {
        // Without it, what needs it says so.
        let _ = mount(Some(kind.as_str()), &point, Some(kind.as_str()), MsFlags::empty(), NOTHING);
    }
    if what.cgroup2 || hierarchies.iter().all(|h| h.v1.is_none()) {
        fresh("/sys/fs/cgroup", "cgroup2", "")?;
        share_controllers(top)?;
    } else {
        fresh("/sys/fs/cgroup", "tmpfs", "mode=755")?;
        for Hierarchy { point, v1 } in hierarchies {
            fs::create_dir_all(&point).with_context(|| format!("cannot make {}", point.display()))?;
            match &v1 {
                Some(options) => fresh(&point, "cgroup", options)?,
                None => fresh(&point, "cgroup2", "")?,
            }
            if v1.is_none() {
                share_controllers(&point)?;
            }
        }
        for (name, target) in links {
            symlink(&target, top.join(&name)).with_context(|| format!("cannot make the link {}", name.display()))?;
        }
    }
    // Opened before one of them hides the scratch directory.
    let open = |own: &str| fs::File::open(scratch.join(own)).context("cannot open the scratch directory");
    for (target, own) in [("/tmp", open("tmp")?), ("/var/tmp", open("var-tmp")?)] {
        bind(own.as_fd(), Path::new(target))?;
    }
    fresh("/run", "tmpfs", "mode=755")?;
    fresh("/dev/shm", "tmpfs", "mode=1777")?;
    for (directory, mode) in [("/run/netns", 0o755), ("/run/lock", 0o1777)] {
        fs::create_dir(directory)
            .and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot make {directory}"))?;
    }
    OWN_DIRECTORIES.iter().try_for_each(|directory| fresh(directory, "tmpfs", "mode=755"))?;
    for (path, kept) in kept {
        make_place(&path, kept.metadata()?.is_dir())?;
        bind(kept.as_fd(), &path)?;
    }
    // What has this name now, not what it had before.
    env::set_current_dir(&here).with_context(|| format!("cannot enter {}", here.display()))
}

/// What the command needs wherever it is: the working copy, and its own program.
fn needed(what: &Isolate) -> Result<Vec<PathBuf>> {
    let mut needed = tranship_lab::working_copies()?;
    let program = Path::new(&what.command[0]).canonicalize().unwrap_or_default();
    if program.is_file() && !needed.iter().any(|copy| program.starts_with(copy)) {
        needed.push(program);
    }
    Ok(needed)
}

/// Keeps those of the paths that will be hidden: mounts each a second time, below the scratch directory, and opens it
/// there.
fn keep(paths: &[PathBuf], scratch: &Path) -> Result<Vec<(PathBuf, fs::File)>> {
    let hidden = ["/run", "/tmp", "/var/tmp", "/dev/shm"].iter().chain(&OWN_DIRECTORIES);
    let is_hidden = |path: &Path| hidden.clone().any(|top| path != Path::new(top) && path.starts_with(top));
    let mut kept = Vec::new();
    for path in paths.iter().filter(|path| is_hidden(path)) {
        let place = scratch.join(format!("kept-{}", kept.len()));
        make_place(&place, path.is_dir())?;
        mount(Some(path), &place, NOTHING, MsFlags::MS_BIND | MsFlags::MS_REC, NOTHING)
            .with_context(|| format!("cannot bind-mount {}", path.display()))?;
        let opened = fs::File::open(&place).with_context(|| format!("cannot open {}", place.display()))?;
        kept.push((path.clone(), opened));
    }
    Ok(kept)
}

/// Makes something that a directory or a file can be mounted on.
fn make_place(path: &Path, is_directory: bool) -> Result<()> {
    let made = match (is_directory, path.parent()) {
        (true, _) => fs::create_dir_all(path),
        (false, parent) => parent.map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::File::create(path).map(drop)),
    };
    made.with_context(|| format!("cannot make {}", path.display()))
}

/// Mounts what is open, and all that is mounted below it, at another path.
fn bind(opened: BorrowedFd<'_>, target: &Path) -> Result<()> {
    let source = format!("/proc/self/fd/{}", opened.as_raw_fd());
    mount(Some(source.as_str()), target, NOTHING, MsFlags::MS_BIND | MsFlags::MS_REC, NOTHING)
        .with_context(|| format!("cannot bind-mount on {}", target.display()))
}

/// Moves this process out of the way of version 2's rule that a cgroup with controllers for its children has no processes.
fn share_controllers(root: &Path) -> Result<()> {
    let own = root.join("init");
    fs::create_dir(&own).with_context(|| format!("cannot make the cgroup {}", own.display()))?;
    fs::write(own.join("cgroup.procs"), "0").with_context(|| format!("cannot enter the cgroup {}", own.display()))?;
    enable_controllers(root);
    Ok(())
}

fn below_sys() -> Result<Vec<(PathBuf, String)>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    let mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let point = PathBuf::from(before.split(' ').nth(4)?);
        let kind = after.split(' ').next().filter(|kind| BELOW_SYS.contains(kind))?;
        point.starts_with("/sys").then(|| (point, kind.to_owned()))
    };
    Ok(text.lines().filter_map(mount).collect())
}

/// Detaches the mounts at and below a directory, the last first.
fn detach_below(top: &Path) -> Result<()> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    let points: Vec<_> = text.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new).collect();
    for point in points.into_iter().rev().filter(|point| point.starts_with(top)) {
        match umount2(point, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot detach {}", point.display())),
        }
    }
    Ok(())
}

/// The symbolic links in a directory: names and targets. (Hierarchies with several controllers have them.)
fn links(directory: &Path) -> Vec<(PathBuf, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into(), fs::read_link(entry.path()).ok()?))).collect()
}

fn fresh(target: impl AsRef<Path>, kind: &str, options: &str) -> Result<()> {
    let target = target.as_ref();
    if !target.is_dir() {
        bail!("{} is no directory", target.display());
    }
    let options = Some(options).filter(|options| !options.is_empty());
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .with_context(|| format!("cannot mount {kind} on {}", target.display()))
}
