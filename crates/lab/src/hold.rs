//! The init process of a node: it gives the node its own view of the file system, says that it is ready, and from then
//! on only reaps what is orphaned in the node. Killing it ends the node and everything in it.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};

use crate::error::{LabError, Result};
use crate::state::{BIN, ROOTFS, STAGE, SWITCH};

const NOTHING: Option<&str> = None;
/// Where directories are kept while what they are in gets hidden, below a node's /run.
const KEPT: &str = "tranship-lab/kept";
/// The file system of security modules; a directory where the kernel has it.
const SECURITY: &str = "/sys/kernel/security";
/// What a node has for itself: what the host has there is not seen in it.
const PRIVATE: [&str; 7] =
    ["/run", "/tmp", "/srv", "/var/lib/tranship", "/var/lib/containers", "/var/lib/cni", "/etc/tranship"];

/// Becomes the init process of node `name`: process 1 of a fresh pid namespace, in fresh network and mount namespaces
/// (`unshare --net --mount --pid --fork`). Prints `ready PID`, the pid being the host's, and does not return unless it
/// fails before that. The directories in `common` are the host's, also within those that the node has for itself.
pub fn hold(name: &str, programs: &Path, disk: &Path, common: &[PathBuf]) -> Result<()> {
    let outside = fs::read_link("/proc/self").map_err(LabError::file("read", "/proc/self"))?;
    if std::process::id() != 1 {
        return Err(LabError::Refused("`hold` is for the lab's own use; say `tranship-lab up`".into()));
    }
    if name != SWITCH {
        private_view(programs, disk, common)?;
    }
    fresh("/proc", "proc", MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC)?;

    println!("ready {}", outside.display());
    io::stdout().flush().map_err(LabError::file("write", "stdout"))?;
    let null =
        fs::File::options().read(true).write(true).open("/dev/null").map_err(LabError::file("open", "/dev/null"))?;
    dup2_stdin(&null)
        .and_then(|()| dup2_stdout(&null))
        .and_then(|()| dup2_stderr(&null))
        .map_err(failed("replace", "stdio"))?;
    reap_forever()
}

fn reap_forever() -> ! {
    let mut child_ended = SigSet::empty();
    child_ended.add(Signal::SIGCHLD);
    // Blocked, the signal stays pending until it is waited for, so none is missed between the two calls below.
    let _ = child_ended.thread_block();
    loop {
        while matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(status) if status != WaitStatus::StillAlive) {}
        let _ = child_ended.wait();
    }
}

/// Gives this mount namespace, which is private already, its own /run, /tmp, /srv, /sys and directories of Tranship.
fn private_view(programs: &Path, disk: &Path, common: &[PathBuf]) -> Result<()> {
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    tmpfs(STAGE, "mode=755", quiet)?;
    let stage = Path::new(STAGE);
    let cgroups = stage.join("cgroup");
    for (source, target) in [(Path::new(ROOTFS), "rootfs"), (programs, "bin")] {
        let target = stage.join("tranship-lab").join(target);
        fs::create_dir_all(&target).map_err(LabError::file("make", &target))?;
        bind(source, &target, MsFlags::empty())?;
        // A bind mount takes no flags but by a second call.
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(NOTHING, &target, NOTHING, read_only, NOTHING).map_err(failed("mount read-only", &target))?;
    }
    // Before anything hides them.
    let is_hidden = |directory: &Path| PRIVATE.iter().any(|top| directory != *top && directory.starts_with(top));
    let hidden: Vec<_> = common.iter().filter(|directory| is_hidden(directory)).collect();
    for (index, directory) in hidden.iter().enumerate() {
        let kept = stage.join(KEPT).join(index.to_string());
        fs::create_dir_all(&kept).map_err(LabError::file("make", &kept))?;
        bind(directory, &kept, MsFlags::MS_REC)?;
    }
    if disk.exists() {
        bind(disk, Path::new("/srv"), MsFlags::empty())?;
    }

    // sysfs shows the network namespace that it was mounted from; the cgroups below it are carried over.
    fs::create_dir(&cgroups).map_err(LabError::file("make", &cgroups))?;
    bind(Path::new("/sys/fs/cgroup"), &cgroups, MsFlags::MS_REC)?;
    fresh("/sys", "sysfs", quiet | MsFlags::MS_NOEXEC)?;
    // Engines look there for AppArmor, and confine containers where they find it.
    if Path::new(SECURITY).is_dir() {
        mount(Some("securityfs"), SECURITY, Some("securityfs"), quiet | MsFlags::MS_NOEXEC, NOTHING)
            .map_err(failed("mount", SECURITY))?;
    }
    relocate(&cgroups, Path::new("/sys/fs/cgroup"))?;
    fs::remove_dir(&cgroups).map_err(LabError::file("remove", &cgroups))?;

    // The host's mounts below /run would be hidden, but stay pinned by this node: let them go.
    for hidden in mounts_below("/run").into_iter().rev().filter(|m| !Path::new(m).starts_with(STAGE)) {
        match umount2(hidden.as_str(), MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(e) => return Err(failed("unmount", &hidden)(e)),
        }
    }
    relocate(stage, Path::new("/run"))?;
    for (directory, mode) in [("/run/lock", 0o1777), ("/run/containers", 0o700)] {
        fs::create_dir(directory)
            .and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(mode)))
            .map_err(LabError::file("make", directory))?;
    }
    tmpfs("/tmp", "mode=1777", quiet)?;
    for directory in ["/var/lib/tranship", "/var/lib/containers", "/var/lib/cni"] {
        tmpfs(directory, "mode=700", quiet)?;
    }
    tmpfs("/etc/tranship", "mode=700", quiet)?;
    for (index, directory) in hidden.iter().enumerate() {
        let kept = Path::new("/run").join(KEPT).join(index.to_string());
        fs::create_dir_all(directory).map_err(LabError::file("make", directory))?;
        relocate(&kept, directory)?;
        fs::remove_dir(&kept).map_err(LabError::file("remove", &kept))?;
    }
    debug_assert!(Path::new(BIN).is_dir() && Path::new(ROOTFS).is_dir());
    Ok(())
}

fn tmpfs(target: &str, options: &str, flags: MsFlags) -> Result<()> {
    mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options)).map_err(failed("mount a tmpfs on", target))
}

fn bind(source: &Path, target: &Path, extra: MsFlags) -> Result<()> {
    mount(Some(source), target, NOTHING, MsFlags::MS_BIND | extra, NOTHING).map_err(failed("bind-mount", source))
}

fn relocate(source: &Path, target: &Path) -> Result<()> {
    mount(Some(source), target, NOTHING, MsFlags::MS_MOVE, NOTHING).map_err(failed("move a mount to", target))
}

/// Replaces a pseudo file system by one that belongs to this process's namespaces.
fn fresh(target: &str, kind: &str, flags: MsFlags) -> Result<()> {
    umount2(target, MntFlags::MNT_DETACH).map_err(failed("unmount", target))?;
    mount(Some(kind), target, Some(kind), flags, NOTHING).map_err(failed("mount", target))
}

fn failed(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(Errno) -> LabError {
    let path = path.as_ref().to_owned();
    move |e| LabError::file(action, path)(e.into())
}

fn mounts_below(top: &str) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|p| p.strip_prefix(top).is_some_and(|rest| rest.starts_with('/'))).map(str::to_owned).collect()
}
