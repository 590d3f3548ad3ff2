//! Where paths of a container lead by the symbolic links of its root filesystem.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// A root filesystem without what is mounted in it: a lookup waits for no other filesystem, and its
/// symbolic links lead nowhere else.
pub(crate) struct Root(OwnedFd);

impl Root {
    /// The root of a process of any mount namespace.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn of_process(pid: u32) -> io::Result<Self> {
        let root = opened(Path::new(&format!("/proc/{pid}/root")))?;
        // Mounts of other mount namespaces cannot be cloned.
        tranship_sys::mount::inside(pid, || cloned(root)).map(Self)
    }

    /// The root filesystem that is mounted here, or lies below a directory of another one.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn at(directory: &Path) -> io::Result<Self> {
        opened(directory).and_then(cloned).map(Self)
    }

    /// Where a path leads. What is not there leads nowhere else. `None`: nowhere, or that cannot be
    /// known.
    pub(crate) fn place_of(&self, path: &Path) -> Option<PathBuf> {
        let path = absolute(path);
        if path.components().any(|part| part == Component::ParentDir) {
            return None;
        }
        for there in path.ancestors() {
            match self.find(there, OFlags::empty()) {
                Ok(found) => {
                    let rest = path.strip_prefix(there).ok()?;
                    return Some(absolute(&self.name_of(&found)?.join(rest)));
                }
                // A symbolic link without a target is there.
                Err(Errno::NOENT) if self.find(there, OFlags::NOFOLLOW).is_err() => {}
                Err(_) => return None,
            }
        }
        None
    }

    fn find(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        openat2(&self.0, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty(), resolve)
    }

    /// What the kernel calls something that was found, from the root on.
    fn name_of(&self, found: &OwnedFd) -> Option<PathBuf> {
        let name = |of: &OwnedFd| std::fs::read_link(format!("/proc/self/fd/{}", of.as_raw_fd())).ok();
        Some(name(found)?.strip_prefix(name(&self.0)?).ok()?.to_owned())
    }
}

/// A path of a container, from its root on and in one way of writing.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    Path::new("/").join(path).components().collect()
}

fn opened(directory: &Path) -> io::Result<OwnedFd> {
    Ok(open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A clone of the mount that a directory is on, with that as its root and without other mounts.
fn cloned(directory: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(directory, "", flags)?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

    use nix::mount::{MsFlags, mount};
    use serde_json::json;

    use super::*;

    fn with_links() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("var/lib")).unwrap();
        for (to, from) in [
            ("/run", "var/run"),
            ("usr/sbin", "sbin"),
            ("../../../run/x", "var/lib/up"),
            ("loop", "loop"),
            ("/gone", "dangling"),
        ] {
            symlink(to, root.path().join(from)).unwrap();
        }
        ["run", "usr/sbin", "mounted"].iter().for_each(|dir| std::fs::create_dir_all(root.path().join(dir)).unwrap());
        std::fs::create_dir(root.path().join("run/x")).unwrap();
        root
    }

    #[test]
    fn a_path_leads_where_the_links_of_the_root_do() {
        let directory = with_links();
        let root = Root::at(directory.path()).unwrap();
        for (path, leads_to) in [
            ("/var/run/x", Some("/run/x")),
            ("/var/run/new/file", Some("/run/new/file")),
            ("/sbin/docker-init", Some("/usr/sbin/docker-init")),
            ("/var/lib/up", Some("/run/x")),
            ("var//lib/./db/", Some("/var/lib/db")),
            ("/", Some("/")),
            ("/loop/x", None),
            ("/dangling/x", None),
            ("/var/../run", None),
        ] {
            assert_eq!(root.place_of(Path::new(path)).as_deref(), leads_to.map(Path::new), "{path}");
        }
    }

    #[test]
    fn what_is_mounted_in_a_root_is_not_looked_into() {
        let directory = with_links();
        let point = directory.path().join("mounted");
        let found = tranship_sys::threads::apart("mounts", || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
            mount(Some("t"), &point, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            symlink("/run", point.join("link")).unwrap();
            Root::at(directory.path()).unwrap().place_of(Path::new("/mounted/link/x"))
        });
        assert_eq!(found.unwrap(), Some("/mounted/link/x".into()));
    }

    #[test]
    fn links_of_a_root_do_not_leave_it() {
        let directory = with_links();
        let outer = directory.path().canonicalize().unwrap();
        symlink(&outer, outer.join("run/host")).unwrap();
        assert_eq!(Root::at(&outer).unwrap().place_of(Path::new("/run/host")), None);
        symlink("/usr", outer.join("run/own")).unwrap();
        assert_eq!(Root::at(&outer).unwrap().place_of(Path::new("/run/own")), Some("/usr".into()));
    }

    #[test]
    fn the_mounts_of_a_process_with_a_root_of_its_own_are_found() {
        let directory = with_links();
        let script = "mount -t tmpfs t $0 && cd $0 && mkdir old run var run/x var/y && ln -s /run var/run && \
                      ln -s /var/run/x $0/late && mount -t tmpfs x run/x && mount -t tmpfs y 'var/y' && \
                      pivot_root . old && echo ready && read end";
        let mut process = Command::new("unshare");
        process.args(["--mount", "--propagation", "private", "sh", "-c", script]).arg(directory.path());
        let mut process = process.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let ready = &mut [0; 6];
        process.stdout.take().unwrap().read_exact(ready).unwrap();
        let mount = |place: &str| json!({"destination": place, "type": "tmpfs"});
        let mut config = json!({"mounts": [mount("/var/run/x"), mount("/var/y"), mount("/late"), mount("/var/run/z")]});
        crate::mounts::follow_links(&mut config, process.id());
        drop(process.stdin.take());
        process.wait().unwrap();
        let moved = |from: &str| json!({"destination": "/run/x", "configuredDestination": from, "type": "tmpfs"});
        assert_eq!(
            config["mounts"],
            json!([moved("/var/run/x"), mount("/var/y"), moved("/late"), mount("/var/run/z")])
        );
    }
}
