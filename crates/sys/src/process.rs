//! Starting and reading processes.

use std::cmp::Ordering;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::kcmp::{self, Resource};

/// The children of a process, zombies included, by its threads' order and in that of their creation; none of one that is gone.
pub fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut threads: Vec<u32> = threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    threads.sort_unstable();
    let of = |thread: u32| std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
    let numbers = |text: String| text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>();
    threads.into_iter().flat_map(|thread| numbers(of(thread))).collect()
}

/// The pids of a process and of all that descend from it and have not ended, as far as they can be seen now.
pub fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let pids = children(*pid);
        // One that has ended has no program.
        let has_ended = |pid: &u32| {
            let program = std::fs::read_link(format!("/proc/{pid}/exe"));
            program.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        found.extend(pids.into_iter().filter(|pid| !has_ended(pid)));
        next += 1;
    }
    found
}

fn compare_memory(one: u32, other: u32) -> Option<Ordering> {
    kcmp::compare(one, other, Resource::Memory)
}

/// Whether it is sure that a process has another one's memory, as one has that was vforked until it calls exec. Once it has not it never will again.
pub fn has_memory_of(process: u32, other: u32) -> bool {
    compare_memory(process, other) == Some(Ordering::Equal)
}

/// Processes each of which has another memory.
#[derive(Debug, Default)]
pub struct Memories {
    /// By an order of the kernel's own, so that not each has to be compared with each.
    sorted: Vec<u32>,
}

impl Memories {
    /// Adds a process, if it has another memory than those that are there: whether it has. `None`: the kernel does not say, and nothing is added.
    pub fn add(&mut self, pid: u32) -> Option<bool> {
        let lives = |pid: &u32| compare_memory(*pid, *pid).is_some();
        let place = match self.find(pid) {
            Some(place) => place,
            // Perhaps one of the others has ended.
            None if lives(&pid) => {
                self.sorted.retain(lives);
                self.find(pid)?
            }
            None => return None,
        };
        Some(place.map_err(|place| self.sorted.insert(place, pid)).is_err())
    }

    /// Where it is, or would be.
    fn find(&self, pid: u32) -> Option<Result<usize, usize>> {
        let mut said = true;
        let place = self.sorted.binary_search_by(|other| {
            let order = compare_memory(*other, pid);
            said &= order.is_some();
            order.unwrap_or(Ordering::Less)
        });
        said.then_some(place)
    }
}

/// Whether any two of these processes have their memory in common; also if the kernel does not say.
pub fn share_memory(pids: &[u32]) -> bool {
    let mut memories = Memories::default();
    pids.iter().any(|pid| memories.add(*pid) != Some(true))
}

/// Whether a thread that is at this place in the kernel (`/proc/PID/task/TID/wchan`) waits for a child that it has vforked: in `wait_for_vfork_done` of
/// kernel/fork.c, which is part of its callers where the compiler has put it there.
pub fn waits_for_vforked(place: &str) -> bool {
    ["vfork", "kernel_clone", "do_fork"].iter().any(|function| place.contains(function))
}

/// Whether a thread that is at this place in the kernel has been stopped by a signal: in `do_signal_stop` of kernel/signal.c.
pub fn is_stopped_at(place: &str) -> bool {
    place.contains("do_signal_stop")
}

/// Bytes as text. Those that are not UTF-8 become a backslash and three octal digits, as the kernel writes a space in `/proc/PID/mountinfo`.
pub fn escaped(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len());
    for part in bytes.utf8_chunks() {
        text.push_str(part.valid());
        for byte in part.invalid() {
            let _ = write!(text, "\\{byte:03o}");
        }
    }
    text
}

/// Reads a file of /proc as text. The names and paths in it are those of programs and need not be UTF-8: bytes that are none
/// are [`escaped`], so that a program's name never hides the rest.
///
/// # Errors
/// It cannot be read.
pub fn text(path: impl AsRef<Path>) -> io::Result<String> {
    std::fs::read(path).map(|bytes| escaped(&bytes))
}

/// Longest text of arguments or environment that the kernel gives to a new program: `MAX_ARG_STRINGS` of linux/binfmts.h is not reached, but
/// three quarters of `_STK_LIM` (fs/exec.c). A process may name any other range as its own (prctl(2), PR_SET_MM).
pub const LONGEST_STRINGS: u64 = 6 << 20;

/// The parent of a process (proc_pid_stat(5)), as this pid namespace has it: 0 for one outside.
/// `None` if it has ended.
pub fn parent(pid: u32) -> Option<u32> {
    let stat = text(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The name of a process (`comm`); as [`text`].
///
/// # Errors
/// There is no such process.
pub fn name(pid: u32) -> io::Result<String> {
    text(format!("/proc/{pid}/comm")).map(|name| name.trim_end().to_owned())
}

/// The lines of `/proc/PID/maps`, one at a time, since a process has as many mappings with as long names as it likes. A line break in a
/// name is shown as `\012` by the kernel.
///
/// # Errors
/// There is no such process; the system's refusal.
pub fn mapping_lines(pid: u32) -> io::Result<impl Iterator<Item = io::Result<Vec<u8>>>> {
    Ok(BufReader::new(File::open(format!("/proc/{pid}/maps"))?).split(b'\n'))
}

/// [`mapping_lines`] as text: bytes that are no UTF-8 are replaced.
///
/// # Errors
/// As there.
pub fn mappings(pid: u32) -> io::Result<impl Iterator<Item = io::Result<String>>> {
    Ok(mapping_lines(pid)?.map(|line| line.map(|line| String::from_utf8_lossy(&line).into_owned())))
}

/// Where in its memory a process has the arguments and the environment that the kernel tells of it; empty ranges for one without memory.
/// Of a longer range than [`LONGEST_STRINGS`], that much.
///
/// # Errors
/// There is no such process.
pub fn strings(pid: u32) -> io::Result<[Range<u64>; 2]> {
    let stat = text(format!("/proc/{pid}/stat"))?;
    // The name may contain anything, so fields are counted from its closing parenthesis: state is the third.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    let mut places = fields.skip(48 - 3).map(|field| field.parse().unwrap_or(0));
    let mut range = || {
        let (start, end): (u64, u64) = (places.next().unwrap_or(0), places.next().unwrap_or(0));
        start..end.min(start.saturating_add(LONGEST_STRINGS))
    };
    Ok([range(), range()])
}

/// A descriptor that stands for a process, also when another one has got its pid.
pub fn descriptor(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only and returns a new descriptor, owned by nobody else, or an error.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            ..0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

/// Sends a signal to the process that a descriptor stands for.
///
/// # Errors
/// It has ended; the system's refusal.
pub fn signal(process: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes numbers only; without a siginfo the kernel makes one as for kill(2).
    unsafe {
        match libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, std::ptr::null::<u8>(), 0) {
            ..0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

/// Forks a process that has its own copy of the memory, and the table of descriptors in common with this one: what either opens the other has, what
/// either closes is closed, and what is open stays so until both have ended. Returns the child's pid; in the child, `None`.
///
/// # Errors
/// This process has several threads; or the system's refusal.
pub fn fork_sharing_descriptors() -> io::Result<Option<u32>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with several threads does not fork"));
    }
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: without CLONE_VM the child goes on with a copy of the memory; there was one thread (just checked, and only this thread could start
    // another), so that nothing in it is left in the middle of a change.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        ..0 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid as u32)),
    }
}

/// Keeps the memory of this process, which may be that of containers or a key, from others and from the disk: no core dump is made
/// of it, nobody but root reads it, and files and sockets that it makes are for its owner alone unless it says otherwise.
pub fn protect_secrets() {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    // SAFETY: prctl(2) with these arguments changes an attribute of the process, and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
}

/// Takes note of children that have ended, so that nothing is left of them.
pub fn reap_children() {
    // SAFETY: without a place for the status the kernel writes nothing.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
}

/// Names the calling thread, as `ps` shows it.
pub fn set_name(name: &std::ffi::CStr) {
    // SAFETY: the name is a C string, of which the kernel takes 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Waits for a child's end, for so long at most; `None` if it has not come.
///
/// # Errors
/// The system's refusal.
pub fn end_of(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    let process = descriptor(child.id())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let status = child.try_wait()?;
        if status.is_some() || left.is_zero() {
            return Ok(status);
        }
        let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], limit) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// What another process has open.
#[derive(Debug)]
pub struct OpenFiles(OwnedFd);

impl OpenFiles {
    /// Finds the process.
    ///
    /// # Errors
    /// There is no such process; the system's refusal.
    pub fn of(process: u32) -> io::Result<Self> {
        descriptor(process).map(Self)
    }

    /// A second reference to what it has open under a number; the process does not notice.
    ///
    /// # Errors
    /// It has nothing under that number, or has ended; the system's refusal.
    pub fn take(&self, number: i32) -> io::Result<OwnedFd> {
        // SAFETY: the call takes numbers only and returns a new descriptor, owned by nobody else, or an error.
        unsafe {
            let taken = libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), number, 0);
            if taken < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(taken as i32)) }
        }
    }
}

/// A second reference to what another process has open under a number; the process does not notice.
///
/// # Errors
/// There is no such process, or it has nothing under that number; or the system's refusal.
pub fn take_descriptor(process: u32, number: i32) -> io::Result<OwnedFd> {
    OpenFiles::of(process)?.take(number)
}

/// `F_GETOWN_EX` of fcntl(2), and what it fills: a type, and a thread, process or process group.
const F_GETOWN_EX: libc::c_int = 16;

/// Whom the kernel signals when something happens to an open file (`F_SETOWN`): a thread, process or process group, as
/// this process's PID namespace numbers it.
pub fn signal_owner(file: &OwnedFd) -> Option<u32> {
    let mut owner = [0; 2];
    // SAFETY: the call fills two integers, which are ours.
    let told = unsafe { libc::fcntl(file.as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) };
    owner.get(1).and_then(|pid: &i32| u32::try_from(*pid).ok()).filter(|pid| told == 0 && *pid != 0)
}

/// What the kernel calls the file that one of this process's descriptors refers to. (The name of a file that has a path begins with `/`.)
fn kind_of(number: RawFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{number}")).ok()
}

/// Whether one of this process's descriptors is a userfaultfd.
pub(crate) fn is_userfaultfd(number: RawFd) -> bool {
    kind_of(number).is_some_and(|kind| kind.as_os_str() == "anon_inode:[userfaultfd]")
}

/// Whether a descriptor of a process is a userfaultfd for which nobody has asked for a version of its interface yet (UFFDIO_API).
pub fn is_unused_userfaultfd(process: u32, number: i32) -> bool {
    let link = std::fs::read_link(format!("/proc/{process}/fd/{number}"));
    if !link.is_ok_and(|kind| kind.as_os_str() == "anon_inode:[userfaultfd]") {
        return false;
    }
    // The version that the kernel has, the features, the state.
    let text = std::fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix("API:")).any(|api| api.trim().split(':').nth(1) == Some("0"))
}

/// Whether a process has the same open file under a number as this one under a descriptor: kcmp(2).
pub(crate) fn has_open(process: u32, number: i32, descriptor: &OwnedFd) -> bool {
    kcmp::same_file((std::process::id(), descriptor.as_raw_fd()), (process, number))
}

/// Makes the command's process the leader of a session of its own, so that neither a terminal's signals nor the end of
/// its parent's session reach it.
pub fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: setsid is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            // Fails only if the process leads a group already, which a freshly forked child does not.
            libc::setsid();
            Ok(())
        })
    }
}

/// Gives the command's process the usual umask, 022, in place of that of [`protect_secrets`]: engines make directories that the
/// programs of a container must be able to enter.
pub fn with_usual_umask(command: &mut Command) -> &mut Command {
    // SAFETY: umask is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            libc::umask(0o022);
            Ok(())
        })
    }
}

/// The user namespace that owns the namespace at `path` (a file such as `/proc/PID/ns/net`), as the inode that stands for it.
///
/// # Errors
/// There is no such namespace, or its owner is above the user namespace of this process.
pub fn owner_of_namespace(path: impl AsRef<Path>) -> io::Result<u64> {
    /// `NS_GET_USERNS` of linux/nsfs.h.
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    let namespace = File::open(path)?;
    // SAFETY: the request takes no argument and returns a new descriptor.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS as _) };
    if owner < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened it for this process, and nobody else knows of it.
    let owner = File::from(unsafe { OwnedFd::from_raw_fd(owner) });
    Ok(std::os::unix::fs::MetadataExt::ino(&owner.metadata()?))
}

/// Lets the command's process have `descriptor` under the number `number`, whatever was there before, and keeps every
/// other descriptor as its own close-on-exec flag says.
pub fn with_descriptor(command: &mut Command, descriptor: OwnedFd, number: RawFd) -> &mut Command {
    // SAFETY: dup2 and fcntl are async-signal-safe; the closure owns the descriptor, so it is open when it runs.
    unsafe {
        command.pre_exec(move || {
            let raw = descriptor.as_raw_fd();
            let done = if raw == number { libc::fcntl(raw, libc::F_SETFD, 0) } else { libc::dup2(raw, number) };
            if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        })
    }
}

/// Has the command's process, and so all that it starts, be in these cgroups from the beginning.
///
/// # Errors
/// If one of them is not there, or takes no process.
pub fn in_cgroups<'a>(command: &'a mut Command, cgroups: &[PathBuf]) -> io::Result<&'a mut Command> {
    let open = |cgroup: &PathBuf| File::options().write(true).open(cgroup.join("cgroup.procs"));
    let members = cgroups.iter().map(open).collect::<io::Result<Vec<File>>>()?;
    // SAFETY: write is async-signal-safe and reads one byte that is static; the closure owns the descriptors, so they are open.
    Ok(unsafe {
        command.pre_exec(move || {
            for file in &members {
                // Zero is who writes.
                if libc::write(file.as_raw_fd(), c"0".as_ptr().cast(), 1) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gets_a_file_s_signals_is_found() {
        let socket = OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        assert_eq!(signal_owner(&socket), None);
        let own = std::process::id();
        // SAFETY: numbers only.
        assert_eq!(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETOWN, own as i32) }, 0);
        assert_eq!(signal_owner(&socket), Some(own));
    }
    use std::io::Read;

    #[test]
    fn processes_that_share_memory_are_told() {
        let mut others: Vec<_> = (0..5).map(|_| Command::new("sleep").arg("100").spawn().unwrap()).collect();
        let mut pids: Vec<u32> = others.iter().map(Child::id).chain([std::process::id()]).collect();
        assert!(!share_memory(&pids), "each has its own");
        pids.push(pids[2]);
        assert!(share_memory(&pids), "one has the same as the third");
        assert!(has_memory_of(pids[6], pids[2]) && !has_memory_of(pids[1], pids[2]));
        let mut memories = Memories::default();
        let added: Vec<_> = pids.iter().map(|pid| memories.add(*pid)).collect();
        assert_eq!(added, [Some(true), Some(true), Some(true), Some(true), Some(true), Some(true), Some(false)]);
        let ended = [None, None, None, None, None, Some(false), None];
        others.iter_mut().for_each(|other| other.kill().and_then(|()| other.wait().map(drop)).unwrap());
        assert!(share_memory(&pids[..3]), "the kernel does not say");
        // Those that have ended are in nobody's way.
        assert_eq!(pids.iter().map(|pid| memories.add(*pid)).collect::<Vec<_>>(), ended);
    }

    #[test]
    fn mappings_of_files_with_any_name_are_listed() {
        use std::os::unix::ffi::OsStringExt;
        let name = std::ffi::OsString::from_vec(b"tranship-\xff\nname".to_vec());
        let path = std::env::temp_dir().join(name);
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.set_len(4096).unwrap();
        std::fs::remove_file(&path).unwrap();
        let length = std::num::NonZero::new(4096).unwrap();
        let (readable, private) = (nix::sys::mman::ProtFlags::PROT_READ, nix::sys::mman::MapFlags::MAP_PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses; nobody has a reference to it.
        let mapped = unsafe { nix::sys::mman::mmap(None, length, readable, private, &file, 0) }.unwrap();
        let lines: Vec<String> = mappings(std::process::id()).unwrap().map(Result::unwrap).collect();
        assert!(lines.iter().any(|line| line.contains("tranship-\u{fffd}\\012name")), "{lines:?}");
        assert!(lines.iter().any(|line| line.ends_with("[vdso]")));
        // SAFETY: as above.
        unsafe { nix::sys::mman::munmap(mapped, 4096) }.unwrap();
        assert!(mappings(4_000_000).is_err());
    }

    #[test]
    fn a_child_s_end_is_waited_for_no_longer_than_told() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let begin = Instant::now();
        assert_eq!(end_of(&mut child, Duration::from_millis(20)).unwrap(), None);
        assert!(begin.elapsed() >= Duration::from_millis(20));
        child.kill().unwrap();
        assert!(end_of(&mut child, Duration::from_secs(100)).unwrap().is_some_and(|status| !status.success()));
        assert!(begin.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn a_command_whose_cgroup_is_missing_is_not_started() {
        let mut command = Command::new("true");
        assert!(in_cgroups(&mut command, &["/sys/fs/cgroup/no such".into()]).is_err());
        // A file takes the number as a cgroup does.
        let directory = std::env::temp_dir().join(format!("tranship-in-cgroups-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("cgroup.procs"), "").unwrap();
        assert!(in_cgroups(&mut command, std::slice::from_ref(&directory)).unwrap().status().unwrap().success());
        assert_eq!(std::fs::read_to_string(directory.join("cgroup.procs")).unwrap(), "0");
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_child_finds_its_descriptor_under_the_number_and_leads_a_session() {
        let (mut read, write) = io::pipe().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ $(cut -d' ' -f6 /proc/$$/stat) >&7"]);
        with_descriptor(&mut command, write.into(), 7);
        detach(&mut command);
        assert!(command.status().unwrap().success());
        drop(command);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        let ids: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(ids[0], ids[1]);
    }
}
