//! Named network namespaces, as `ip netns` makes them: a file with a namespace bind-mounted over it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, fstatfs};
use tranship_sys::directory::make_public;

use crate::NetworkError;
use tranship_sys::threads;

const NSFS_MAGIC: FsType = FsType(0x6e73_6673);
const OWN: &str = "/proc/thread-self/ns/net";

/// The calling thread's network namespace: the node's.
pub(crate) fn own() -> Result<File, NetworkError> {
    File::open(OWN).map_err(|e| NetworkError::refused(format!("open {OWN}"), e))
}

fn open(netns: &Path) -> Result<File, NetworkError> {
    let file = File::open(netns).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => NetworkError::Missing { netns: netns.to_owned() },
        _ => NetworkError::refused(format!("open network namespace {}", netns.display()), e),
    })?;
    match fstatfs(&file) {
        Ok(fs) if fs.filesystem_type() == NSFS_MAGIC => Ok(file),
        _ => Err(NetworkError::not_a_namespace(netns)),
    }
}

/// Runs `work` on a thread of its own inside `netns`; sockets that it returns stay in there.
pub(crate) fn inside<T: Send>(
    netns: &Path,
    work: impl FnOnce() -> Result<T, NetworkError> + Send,
) -> Result<T, NetworkError> {
    let file = open(netns)?;
    on_a_thread(|| {
        setns(&file, CloneFlags::CLONE_NEWNET).map_err(|e| match e {
            Errno::EINVAL => NetworkError::not_a_namespace(netns),
            e => NetworkError::refused(format!("enter network namespace {}", netns.display()), e.desc()),
        })?;
        work()
    })
}

/// Runs `work` on a thread of its own inside a new network namespace, which nobody else sees.
pub(crate) fn in_a_new_one<T: Send>(work: impl FnOnce() -> Result<T, NetworkError> + Send) -> Result<T, NetworkError> {
    on_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|e| NetworkError::refused("make a network namespace", e.desc()))?;
        work()
    })
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T, NetworkError> + Send) -> Result<T, NetworkError> {
    threads::apart("netns", work).map_err(|e| NetworkError::refused("start a thread", e))?
}

/// Makes a new, empty network namespace at `netns`. Refuses if anything is there.
pub(crate) fn make(netns: &Path) -> Result<(), NetworkError> {
    let refused =
        |what: &str, e: &dyn ToString| NetworkError::refused(format!("{what} {}", netns.display()), e.to_string());
    if let Some(dir) = netns.parent() {
        make_public(dir).map_err(|e| refused("make the directory of", &e))?;
    }
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(netns).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => NetworkError::Exists { netns: netns.to_owned() },
        _ => refused("create", &e),
    })?;
    let made = on_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|e| refused("make a network namespace for", &e.desc()))?;
        mount(Some(OWN), netns, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|e| refused("mount the network namespace at", &e.desc()))
    });
    if made.is_err() {
        let _ = std::fs::remove_file(netns);
    }
    made
}

/// Whether `netns` is there, and is a namespace. A file without content that nothing is mounted on is what an
/// interrupted creation leaves; anything else that is no namespace is an error.
pub(crate) enum Presence {
    Absent,
    EmptyFile,
    Namespace,
}

pub(crate) fn presence(netns: &Path) -> Result<Presence, NetworkError> {
    match open(netns) {
        Ok(_) => Ok(Presence::Namespace),
        Err(NetworkError::Missing { .. }) => Ok(Presence::Absent),
        Err(NetworkError::NotANamespace { .. }) => match std::fs::symlink_metadata(netns) {
            Ok(meta) if meta.is_file() && meta.len() == 0 => Ok(Presence::EmptyFile),
            _ => Err(NetworkError::not_a_namespace(netns)),
        },
        Err(e) => Err(e),
    }
}

/// The processes that are in the namespace at `netns`, in no order.
pub(crate) fn processes(netns: &Path) -> Result<Vec<u32>, NetworkError> {
    let identity = |file: &Path| std::fs::metadata(file).map(|m| (m.dev(), m.ino()));
    let own = identity(netns).map_err(|e| NetworkError::refused(format!("look at {}", netns.display()), e))?;
    let list = std::fs::read_dir("/proc").map_err(|e| NetworkError::refused("list the processes", e))?;
    let pids = list.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // One that ends meanwhile is in no namespace.
    Ok(pids.filter(|pid| identity(Path::new(&format!("/proc/{pid}/ns/net"))).is_ok_and(|other| other == own)).collect())
}

/// Makes the directory of the name `netns` a mount point of its own that is shared, as `ip netns` does it. Engines do the same: where
/// they did it later, they would mount it over the name, which then could not be taken away.
pub(crate) fn share_names(netns: &Path) -> Result<(), NetworkError> {
    let nothing = None::<&str>;
    let directory = netns.parent().unwrap_or(Path::new("/"));
    let refused = |why: String| NetworkError::refused(format!("share {}", directory.display()), why);
    make_public(directory).map_err(|e| refused(e.to_string()))?;
    let share = || mount(nothing, directory, nothing, MsFlags::MS_SHARED | MsFlags::MS_REC, nothing);
    let shared = match share() {
        // It is no mount point yet.
        Err(Errno::EINVAL) => mount(Some(directory), directory, nothing, MsFlags::MS_BIND | MsFlags::MS_REC, nothing)
            .and_then(|()| share()),
        other => other,
    };
    shared.map_err(|e| refused(e.desc().to_owned()))
}

/// Has the name `other`, under which another namespace is mounted, or none any more, mean `netns`.
pub(crate) fn rename(netns: &Path, other: &Path) -> Result<(), NetworkError> {
    let what = || format!("bind {} to {}", netns.display(), other.display());
    match umount2(other, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL) => {}
        Err(Errno::ENOENT) => drop(File::create_new(other).map_err(|e| NetworkError::refused(what(), e))?),
        Err(e) => return Err(NetworkError::refused(what(), e.desc())),
    }
    let nothing = None::<&str>;
    mount(Some(netns), other, nothing, MsFlags::MS_BIND, nothing).map_err(|e| NetworkError::refused(what(), e.desc()))
}

/// Takes the name away: unmounts whatever namespaces are mounted there and deletes the file.
pub(crate) fn unname(netns: &Path) -> Result<(), NetworkError> {
    loop {
        match umount2(netns, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => break,
            Err(e) => return Err(NetworkError::refused(format!("unmount {}", netns.display()), e.desc())),
        }
    }
    match std::fs::remove_file(netns) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(NetworkError::refused(format!("delete {}", netns.display()), e))
        }
        _ => Ok(()),
    }
}
