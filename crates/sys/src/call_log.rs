//! Which parts of files in tmpfs are written by calls, whoever makes them. A tmpfs has no tracepoints of its own, so a BPF program at the
//! end of each system call (`sys_exit`) looks whether it is one that writes, at the file that its descriptor stands for, and at where.
//!
//! **What is exact.** While a call runs, its descriptor stands for one file if no other task shares the table of descriptors when it
//! begins; nobody else can then change the table up to its end. Where others share it, as threads do, it stands for one file if no call that
//! takes a file away from this descriptor (`close`, `dup2`, …) was under way when it began, nor has begun since: such calls are counted for each
//! descriptor that threads write to. Where a call wrote is known if the position is an argument, or the file's own and there was no other reference to the
//! open file and no sharer of the table when it began. Another program, at the beginning of calls (`sys_enter`), notes for the task whether that is so. A call
//! of another kind that changes a file by its descriptor (it truncates, splices, …) is told as one that may have changed all of it.
//!
//! **What is not.** Some calls may change files that the program cannot tell: those whose descriptor another thread takes away meanwhile, those that
//! take a path, io_uring, aio, and calls of 32-bit programs. Where a task in the container's mount namespace makes
//! one, [`CallLog::read`] says that not all was told. Of tasks elsewhere, also the kernel's own, it is told instead whenever they
//! change a file's times ([`Called::begins`]), also when they read it: they do so before they write, and may write long afterwards; and only once in a tick
//! of the clock, or since Linux 6.13 once more when somebody has looked at the times since. So who writes to a file in such a way only in ticks in which others
//! have written there just before is not told of. Mappings are a matter of [`crate::mapping_log`]. (Two calls that were under way already when a thread's first write began, and both
//! take its file away and put it back in the course of that write, would not be noticed.)

mod programs;

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::bpf::{self, Counter, Instruction, Notes, Outputs};
use crate::btf::Btf;
use crate::perf::{self, Attributes, Ring};
use crate::processors::{listed, online};
use crate::tracepoint::{RECORD_SAMPLE, SAMPLE_RAW};
use programs::{Fields, Writer};

const TYPE_SOFTWARE: u32 = 1;
/// An event that happens when a BPF program sends something.
const BPF_OUTPUT: u64 = 10;
/// Most tasks that something is noted of. What others write is uncertain.
const TASKS: u32 = 16 << 10;
/// The same for descriptors of tasks that have them in common with others, as threads do.
const DESCRIPTORS: u32 = 64 << 10;

/// A part of a file that a call has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Called {
    /// Major and minor number of its filesystem's device.
    pub device: (u32, u32),
    /// Its inode.
    pub ino: u64,
    /// From this byte.
    pub start: u64,
    /// To before this one; [`u64::MAX`]: all of the file may have changed.
    pub end: u64,
    /// A task outside of the namespace may only just begin to change it, and that it has done so may not be told; or it reads it.
    pub begins: bool,
}

/// The log of a whole machine.
#[derive(Debug)]
pub struct CallLog {
    /// Closed first: a program must not run when its ring is gone.
    links: Vec<OwnedFd>,
    programs: Vec<OwnedFd>,
    /// The kernel empties it when it is closed.
    _outputs: Outputs,
    _notes: [Notes; 2],
    rings: Vec<Ring>,
    online: String,
    untold: Counter,
    /// What that was when it was looked at last.
    untold_before: u64,
}

impl CallLog {
    /// Begins it. `namespace` is the inode of the mount namespace (`/proc/PID/ns/mnt`) of the tasks that the log must tell of without a
    /// gap.
    ///
    /// # Errors
    /// If the kernel lacks something that this takes (it is of x86-64, describes its types, and has the tracepoints of system calls and
    /// of io_uring), or refuses: it takes CAP_BPF and CAP_PERFMON.
    pub fn start(namespace: u32) -> io::Result<Self> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let fields = Fields::find(&Btf::of_kernel()?)?;
        let online = online()?;
        let attributes = Attributes::new(TYPE_SOFTWARE, BPF_OUTPUT, SAMPLE_RAW, 0);
        let processors = listed(&online);
        let ring = |cpu: &i32| Ring::new(perf::open(&attributes, *cpu)?, None);
        let rings: Vec<Ring> = processors.iter().map(ring).collect::<io::Result<_>>()?;
        let outputs = Outputs::new(processors.iter().copied().zip(rings.iter().map(AsFd::as_fd)))?;
        let untold = Counter::new()?;
        let (tasks, descriptors) = (Notes::new(TASKS, 4)?, Notes::new(DESCRIPTORS, 1)?);
        let writer =
            Writer { fields, namespace, outputs: &outputs, untold: &untold, tasks: &tasks, descriptors: &descriptors };
        let load = |code: Vec<Instruction>| bpf::load_for_tracepoints(&code);
        let [begins, calls] = [load(writer.begins())?, load(writer.calls())?];
        let [uring, times] = [load(writer.untold())?, load(writer.times())?];
        let mut links = vec![attach_one_of(&uring, &[c"io_uring_submit_req", c"io_uring_submit_sqe"])?];
        links.push(bpf::attach(&uring, c"io_uring_complete")?);
        links.push(bpf::attach(&times, c"writeback_mark_inode_dirty")?);
        // First, since what is not noted is uncertain.
        links.push(bpf::attach(&calls, c"sys_exit")?);
        links.push(bpf::attach(&begins, c"sys_enter")?);
        let programs = vec![begins, calls, uring, times];
        Ok(Self {
            links,
            programs,
            _outputs: outputs,
            _notes: [tasks, descriptors],
            rings,
            online,
            untold,
            untold_before: 0,
        })
    }

    /// What polls as readable when a ring is filling up.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(AsFd::as_fd)
    }

    /// Tells of each call that has ended since the last time, of whatever tmpfs. False: that was not all; any file may have changed
    /// anywhere, by calls that may have begun long before.
    pub fn read(&mut self, mut tell: impl FnMut(Called)) -> bool {
        let mut complete = online().is_ok_and(|now| now == self.online);
        for ring in &mut self.rings {
            complete &= ring.read(|kind, record| {
                // The size of the raw bytes comes before them.
                let (RECORD_SAMPLE, Some(raw)) = (kind, record.get(4..)) else { return kind != RECORD_SAMPLE };
                let Some(called) = Called::parse(raw) else { return false };
                tell(called);
                true
            });
        }
        let untold = self.untold.read().unwrap_or(u64::MAX);
        complete &= std::mem::replace(&mut self.untold_before, untold) == untold;
        // Where a program was once not run, nothing is certain any more.
        complete && self.programs.iter().all(|program| bpf::misses(program).is_ok_and(|misses| misses == 0))
    }

    /// Ends it: calls go their usual way, and nothing more is told.
    pub fn end(&mut self) {
        self.links.clear();
    }
}

impl Called {
    pub(crate) fn parse(raw: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(raw.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        let device = word(0)? as u32;
        // MINORBITS of linux/kdev_t.h.
        let (start, begins) = match word(2)? {
            u64::MAX => (0, true),
            start => (start, false),
        };
        Some(Self { device: (device >> 20, device & 0xf_ffff), ino: word(1)?, start, end: word(3)?, begins })
    }
}

fn attach_one_of(program: &OwnedFd, tracepoints: &[&CStr]) -> io::Result<OwnedFd> {
    let mut result = Err(io::ErrorKind::Unsupported.into());
    for tracepoint in tracepoints {
        result = result.or_else(|_: io::Error| bpf::attach(program, tracepoint));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::process::{Command, Stdio};

    fn namespace(of: &str) -> u32 {
        std::fs::metadata(format!("/proc/{of}/ns/mnt")).unwrap().ino() as u32
    }

    fn file(name: &str) -> (String, File) {
        let path = format!("/dev/shm/call-log-{name}-{}", std::process::id());
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.write_all_at(&[7; 64 << 10], 0).unwrap();
        (path, file)
    }

    /// What is told of a file, and whether that is all.
    fn told(log: &mut CallLog, file: &File) -> (Vec<(u64, u64)>, bool) {
        let (mut parts, meta) = (Vec::new(), file.metadata().unwrap());
        let complete = log.read(|called| {
            if called.device == (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()))
                && called.ino == meta.ino()
            {
                parts.push((called.start, called.end));
            }
        });
        parts.sort_unstable();
        parts.dedup();
        (parts, complete)
    }

    fn log(of: u32) -> Option<CallLog> {
        CallLog::start(of).inspect_err(|error| println!("skipped: calls are not told here: {error}")).ok()
    }

    /// Runs python, which has one thread, with a file.
    fn run(path: &str, code: &str) {
        let code = format!("import os, sys\npath = {path:?}\nfd = os.open(path, os.O_RDWR)\n{code}");
        assert!(Command::new("python3").args(["-c", &code]).status().unwrap().success());
    }

    /// Needs root, and a tmpfs, which /dev/shm is.
    #[test]
    fn a_process_without_threads_tells_exactly_where_it_writes() {
        let (path, file) = file("exact");
        let Some(mut log) = log(namespace("self")) else { return };
        // The threads of other tests write, too, so that it is not asked whether that was all.
        told(&mut log, &file);
        let mut check = |code: &str, expected: &[(u64, u64)]| {
            run(&path, code);
            let (parts, _) = told(&mut log, &file);
            assert_eq!(parts, expected, "{code}");
        };
        const ALL: (u64, u64) = (0, u64::MAX);
        check("os.pwrite(fd, b'a' * 100, 5000)", &[(5000, 5100)]);
        check("os.pwritev(fd, [b'a' * 10, b'b' * 20], 9000, 0)", &[ALL]);
        check(
            "os.lseek(fd, 20000, 0); os.write(fd, b'abc'); os.writev(fd, [b'd', b'ef'])",
            &[(20000, 20003), (20003, 20006)],
        );
        check("fd = os.open(path, os.O_WRONLY | os.O_APPEND); os.write(fd, b'abcd')", &[(65536, 65540)]);
        check("fd = os.open(path, os.O_WRONLY | os.O_APPEND); os.pwrite(fd, b'abcd', 10)", &[ALL]);
        check("other = os.dup(fd); os.write(fd, b'abcd')", &[ALL]);
        check("os.ftruncate(fd, 60000)", &[ALL]);
        check("os.open(path, os.O_RDONLY)", &[]);
        check("os.open(path, os.O_RDWR | os.O_TRUNC)", &[ALL]);
        check("os.posix_fallocate(fd, 0, 65536)", &[ALL]);
        check("r, w = os.pipe(); os.write(w, b'abc'); os.splice(r, fd, 3)", &[ALL]);
        std::fs::remove_file(path).unwrap();
    }

    /// What is told of a file while python, which has a second thread and a mount namespace of its own, runs some code, and whether that is all.
    fn of_threads(path: &str, file: &File, code: &str) -> Option<(Vec<(u64, u64)>, bool)> {
        let code = format!(
            "import os, socket, sys, threading, time\nfd = os.open({path:?}, os.O_RDWR)\n\
             threading.Thread(target=lambda: time.sleep(100), daemon=True).start()\n\
             print(flush=True); input()\n{code}\nprint(flush=True); input()"
        );
        let arguments = ["-m", "python3", "-c", &code];
        let mut python =
            Command::new("unshare").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut to, mut from) = (python.stdin.take().unwrap(), BufReader::new(python.stdout.take().unwrap()));
        let mut says = || from.read_line(&mut String::new()).unwrap();
        says();
        let log = log(namespace(&python.id().to_string()));
        let found = log.map(|mut log| {
            told(&mut log, file);
            to.write_all(b"\n").unwrap();
            assert_eq!(says(), 1, "python has failed");
            told(&mut log, file)
        });
        python.kill().unwrap();
        python.wait().unwrap();
        found
    }

    /// Has a thread close a connection, `number`, that waits for its data to be taken.
    const CLOSING: &str = "
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\\1\\0\\0\\0\\x1e\\0\\0\\0')
client.setblocking(False)
number = client.fileno()
try:
    while True: os.write(number, b'x' * 65536)
except BlockingIOError: client.setblocking(True)
threading.Thread(target=client.close, daemon=True).start()
while os.path.exists(f'/proc/self/fd/{number}'): time.sleep(0.01)
";

    #[test]
    fn of_threads_it_is_told_exactly_where_they_write_unless_one_takes_files_away() {
        let (path, file) = file("threads");
        let Some(found) = of_threads(&path, &file, "os.pwrite(fd, b'a' * 100, 5000)") else { return };
        assert_eq!(found, (vec![(5000, 5100)], true));
        let check = |code: &str, expected: &[(u64, u64)], complete: bool| {
            assert_eq!(of_threads(&path, &file, code).unwrap(), (expected.to_vec(), complete), "{code}");
        };
        const ALL: (u64, u64) = (0, u64::MAX);
        // A position could be another thread's.
        check("os.write(fd, b'abc')", &[ALL], true);
        check("os.ftruncate(fd, 60000)", &[ALL], true);
        check(&format!("os.close(os.open({path:?}, os.O_RDWR | os.O_TRUNC))"), &[ALL], true);
        check("[(os.pwrite(fd, b'abc', 7), os.close(os.dup(fd))) for _ in range(100)]", &[(7, 10)], true);
        check(&format!("{CLOSING}os.pwrite(fd, b'a' * 100, 5000)"), &[(5000, 5100)], true);
        let open = format!("os.open({path:?}, os.O_RDWR | os.O_TRUNC)");
        check(&format!("{open}{CLOSING}{open}"), &[ALL], false);
        let same = format!("{CLOSING}assert os.dup(fd) == number\nos.pwrite(number, b'abc', 7)");
        check(&same, &[ALL], false);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn of_other_namespaces_it_is_told_that_a_file_has_changed() {
        let (path, file) = file("others");
        let Some(mut log) = log(1) else { return };
        told(&mut log, &file);
        // The clock that times are taken from goes in ticks.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_at(b"abc", 10).unwrap();
        assert_eq!(told(&mut log, &file), (vec![(0, u64::MAX)], true));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn nothing_is_told_when_it_has_ended() {
        let (path, file) = file("ended");
        let Some(mut log) = log(namespace("self")) else { return };
        log.end();
        told(&mut log, &file);
        run(&path, "os.pwrite(fd, b'abc', 10)");
        assert_eq!(told(&mut log, &file), (vec![], true));
        std::fs::remove_file(path).unwrap();
    }
}
