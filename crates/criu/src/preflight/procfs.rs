//! Readers of /proc. The parsers take text, so that they can be tested without a process; whatever does not parse is left
//! out rather than guessed.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

pub(super) use tranship_sys::process::{escaped, text};

/// What /proc/PID/status tells about a task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Status {
    pub name: String,
    /// `R`, `S`, `D`, `T`, `t`, `Z` …
    pub state: char,
    /// Parent as this /proc shows it; 0 where the parent is out of its sight.
    pub ppid: u32,
    /// Tracer, 0 for none.
    pub tracer: u32,
    /// Whether it is in seccomp's strict mode (seccomp(2)).
    pub strict: bool,
    pub threads: usize,
    /// Pid in the innermost pid namespace.
    pub inner_pid: u32,
    /// Session in the innermost pid namespace, 0 where its leader is outside of it.
    pub inner_sid: u32,
    /// Session and process group as this /proc shows them; 0 where their leaders are out of its sight.
    pub session: u32,
    pub group: u32,
    /// All user ids, then all group ids: real, effective, saved, of the filesystem.
    pub ids: Vec<u32>,
    /// Signals that are pending for the thread or for its process, by their numbers less one.
    pub pending: u64,
    /// How often it has left the CPU; stands still for as long as it does not run.
    pub switches: u64,
    /// Resident private anonymous memory and what of it is swapped out, in bytes.
    pub anonymous: u64,
    /// Locked memory, in bytes.
    pub locked: u64,
}

impl Status {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut status = Status { state: '?', ..Status::default() };
        let first = |v: &str| v.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let last = |v: &str| v.split_whitespace().next_back().and_then(|n| n.parse().ok()).unwrap_or(0);
        let kib =
            |v: &str| v.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0).saturating_mul(1024);
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match key {
                "Name" => value.clone_into(&mut status.name),
                "State" => status.state = value.chars().next()?,
                "PPid" => status.ppid = value.parse().ok()?,
                "TracerPid" => status.tracer = value.parse().ok()?,
                "Seccomp" => status.strict = value == "1",
                "Threads" => status.threads = value.parse().ok()?,
                "NSpid" => status.inner_pid = last(value),
                "NSpgid" => status.group = first(value),
                "NSsid" => (status.session, status.inner_sid) = (first(value), last(value)),
                "Uid" | "Gid" => status.ids.extend(value.split_whitespace().filter_map(|n| n.parse::<u32>().ok())),
                "voluntary_ctxt_switches" | "nonvoluntary_ctxt_switches" => {
                    status.switches = status.switches.saturating_add(value.parse().unwrap_or(0));
                }
                "VmLck" => status.locked = kib(value),
                "SigPnd" | "ShdPnd" => status.pending |= u64::from_str_radix(value, 16).unwrap_or(0),
                "RssAnon" | "VmSwap" => status.anonymous = status.anonymous.saturating_add(kib(value)),
                _ => {}
            }
        }
        (status.state != '?').then_some(status)
    }

    pub(super) fn read(pid: u32, tid: Option<u32>) -> io::Result<Self> {
        let path = match tid {
            Some(tid) => format!("/proc/{pid}/task/{tid}/status"),
            None => format!("/proc/{pid}/status"),
        };
        Self::parse(&text(&path)?).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, path))
    }
}

/// A reference to a file that was not opened.
pub(super) const O_PATH: u32 = 0o10_000_000;

/// What /proc/PID/fdinfo/FD tells about any descriptor; the rest of the lines stay at hand as `text`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FdInfo {
    /// Open flags, `O_CLOEXEC` included where it is set.
    pub flags: u32,
    /// Mount that the file was opened through.
    pub mount: u32,
    pub text: String,
}

impl FdInfo {
    pub(super) fn parse(text: &str) -> Self {
        let mut info = FdInfo { text: text.to_owned(), ..FdInfo::default() };
        for line in text.lines() {
            match line.split_once(':') {
                Some(("flags", v)) => info.flags = u32::from_str_radix(v.trim(), 8).unwrap_or(0),
                Some(("mnt_id", v)) => info.mount = v.trim().parse().unwrap_or(0),
                _ => {}
            }
        }
        info
    }

    /// Whether it was opened for reading, and for writing; a mere reference is open for neither.
    pub(super) fn ends(&self) -> (bool, bool) {
        match self.flags & 0o3 {
            _ if self.flags & O_PATH != 0 => (false, false),
            0 => (true, false),
            1 => (false, true),
            _ => (true, true),
        }
    }

    /// The number behind a key of a type's own lines, e.g. `Pid:` of a pidfd or `tty-index:` of a pty's master.
    pub(super) fn number(&self, key: &str) -> Option<i64> {
        self.text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':')?.trim().parse().ok())
    }

    /// Targets of an epoll: descriptor number and inode.
    pub(super) fn epoll_targets(&self) -> Vec<(i32, u64)> {
        let target = |line: &str| {
            let mut words = line.strip_prefix("tfd:")?.split_whitespace();
            let fd = words.next()?.parse().ok()?;
            let inode = line.split_once("ino:")?.1.split_whitespace().next()?;
            Some((fd, u64::from_str_radix(inode, 16).ok()?))
        };
        self.text.lines().filter_map(target).collect()
    }
}

/// The mount that a file of this process was opened through.
pub(crate) fn mount_of(file: &OwnedFd) -> Option<u32> {
    Some(FdInfo::parse(&text(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?).mount)
}

/// One line of /proc/PID/mountinfo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    pub id: u32,
    pub parent: u32,
    /// `major:minor` of the filesystem.
    pub device: String,
    /// What of the filesystem is mounted; `/` for all of it.
    pub root: String,
    pub point: String,
    /// The mount point as it is; it need not be UTF-8.
    pub place: PathBuf,
    /// Options of the mount itself, with commas between them.
    pub options: String,
    pub shared: Option<u32>,
    pub master: Option<u32>,
    pub fstype: String,
    pub source: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut words = front.split(' ');
        let id = words.next()?.parse().ok()?;
        let parent = words.next()?.parse().ok()?;
        let device = words.next()?.to_owned();
        let root = escaped(unescape(words.next()?).as_os_str().as_bytes());
        let place = unescape(words.next()?);
        let point = escaped(place.as_os_str().as_bytes());
        let options = words.clone().next()?.to_owned();
        let group = |tag: &str| words.clone().find_map(|w| w.strip_prefix(tag)?.strip_prefix(':')?.parse::<u32>().ok());
        let (shared, master) = (group("shared"), group("master"));
        let mut words = back.split(' ');
        let fstype = words.next()?.to_owned();
        let source = escaped(unescape(words.next().unwrap_or("")).as_os_str().as_bytes());
        Some(Mount { id, parent, device, root, point, place, options, shared, master, fstype, source })
    }

    pub(crate) fn parse_all(text: &str) -> Vec<Self> {
        text.lines().filter_map(Self::parse).collect()
    }
}

/// Undoes the octal escapes of mountinfo (`\040` for a space).
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = (bytes[i] == b'\\').then(|| field.get(i + 1..i + 4)).flatten();
        match code.and_then(|c| u8::from_str_radix(c, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    OsString::from_vec(out).into()
}

/// One mapping of /proc/PID/maps that has a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    /// `start-end` as written, which is also its name in map_files.
    pub range: String,
    /// Device and inode as written; equal for all mappings of one file.
    pub file: String,
    pub name: String,
}

impl Mapping {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut rest = line;
        let mut word = || {
            let (w, r) = rest.split_once(' ')?;
            rest = r.trim_start();
            Some(w)
        };
        let (range, _permissions, _offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
        (!rest.is_empty()).then(|| Mapping {
            range: range.to_owned(),
            file: format!("{device} {inode}"),
            name: rest.to_owned(),
        })
    }
}

/// Whether an auxiliary vector (proc_pid_auxv(5)) is that of a 32-bit program: by the size of its program headers.
pub(super) fn is_32_bit(vector: &[u8]) -> bool {
    const AT_PHENT: u32 = 4;
    const ELF32_PHDR: u32 = 32;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_ne_bytes);
    vector.chunks_exact(8).any(|pair| (word(&pair[..4]), word(&pair[4..])) == (AT_PHENT, ELF32_PHDR))
}

/// The inode in a link such as `socket:[123]`, `pipe:[7]`, `net:[4026531840]`.
pub(super) fn bracketed(link: &str, kind: &str) -> Option<u64> {
    link.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

/// As [`text`] the beginning of a file, where the kernel takes its time for each line.
pub(super) fn beginning(path: impl AsRef<Path>) -> io::Result<String> {
    let mut bytes = [0; 64];
    let read = fs::File::open(path)?.read(&mut bytes)?;
    Ok(escaped(&bytes[..read]))
}

/// The target of a link in /proc as text: to be shown, and to be compared with others.
pub(super) fn link(path: impl AsRef<Path>) -> io::Result<String> {
    fs::read_link(path).map(|p| escaped(p.as_os_str().as_bytes()))
}

/// The numbers that name the entries of a directory (pids of /proc, tids of task, descriptors of fd), sorted.
pub(super) fn numbers(dir: impl AsRef<Path>) -> io::Result<Vec<u32>> {
    let mut all: Vec<u32> = fs::read_dir(dir)?.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    Ok(all)
}

/// The namespaces of a process: name of the link (`net`, `pid_for_children` …) to its target (`net:[…]`).
pub(super) fn namespaces(pid: u32) -> io::Result<HashMap<String, String>> {
    let entries = fs::read_dir(format!("/proc/{pid}/ns"))?.flatten();
    Ok(entries.filter_map(|e| Some((e.file_name().into_string().ok()?, link(e.path()).ok()?))).collect())
}

/// A path inside the container as this process can reach it.
pub(super) fn inside(init: u32, path: &Path) -> PathBuf {
    Path::new(&format!("/proc/{init}/root")).join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_takes_the_innermost_numbers_and_survives_odd_names() {
        let text = "Name:\tx: y) z\nState:\tS (sleeping)\nPPid:\t7\nTracerPid:\t0\nNSpid:\t812\t1\nNSpgid:\t810\t0\nNSsid:\t812\t1\n\
                    VmSwap:\t       4 kB\nRssAnon:\t    12 kB\nThreads:\t3\nSigPnd:\t0000000000000010\n\
                    ShdPnd:\t0000000000000800\n";
        let s = Status::parse(text).unwrap();
        assert_eq!((s.name.as_str(), s.state, s.ppid, s.inner_pid, s.inner_sid), ("x: y) z", 'S', 7, 1, 1));
        assert_eq!((s.group, s.session), (810, 812));
        assert_eq!((s.threads, s.anonymous, s.pending), (3, 16 * 1024, 0x810));
        assert_eq!(Status::parse("Name:\tx\n"), None);
    }

    #[test]
    fn fdinfo_gives_flags_mount_and_what_epoll_watches() {
        let info = FdInfo::parse(
            "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t2064\n\
             tfd:        5 events:       19 data:                5  pos:0 ino:1f3a sdev:9\nPid:\t-1\n",
        );
        assert_eq!((info.flags, info.mount), (0o2000002, 16));
        assert_eq!(info.epoll_targets(), [(5, 0x1f3a)]);
        assert_eq!(info.number("Pid"), Some(-1));
        assert_eq!(info.number("tty-index"), None);
    }

    #[test]
    fn mountinfo_with_spaces_and_propagation() {
        let m = Mount::parse("36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=c");
        let m = m.unwrap();
        assert_eq!((m.id, m.parent, m.device.as_str(), m.root.as_str()), (36, 35, "98:0", "/mnt1"));
        assert_eq!((m.point.as_str(), m.shared, m.master), ("/mnt 2", Some(7), Some(1)));
        assert_eq!((m.fstype.as_str(), m.source.as_str()), ("ext3", "/dev/root"));
        assert!(Mount::parse_all("garbage\n\n1 2 3\n").is_empty());
    }

    #[test]
    fn names_that_are_not_utf8_are_escaped_and_paths_stay_as_they_are() {
        let line = escaped(b"36 35 98:0 / /m\xff\\040\xd0\x9f rw - tmpfs \xfe rw");
        let mount = Mount::parse(&line).unwrap();
        assert_eq!(mount.place.as_os_str().as_bytes(), b"/m\xff \xd0\x9f");
        assert_eq!((mount.point.as_str(), mount.source.as_str()), ("/m\\377 \u{41f}", "\\376"));
    }

    #[test]
    fn maps_keep_names_with_spaces_and_drop_the_anonymous() {
        let text = "7f00-7f01 rw-p 00000000 00:00 0 \n\
                    7f02-7f03 rw-s 00000000 00:0e 2064                       anon_inode:[io_uring]\n\
                    7f04-7f05 r--p 00000000 fe:00 12   /a b (deleted)\n";
        let all: Vec<_> = text.lines().filter_map(Mapping::parse).collect();
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].range.as_str(), all[0].name.as_str()), ("7f02-7f03", "anon_inode:[io_uring]"));
        assert_eq!((all[1].file.as_str(), all[1].name.as_str()), ("fe:00 12", "/a b (deleted)"));
    }

    #[test]
    fn a_32_bit_program_is_known_by_its_auxiliary_vector() {
        let narrow: Vec<u8> = [32u32, 7, 4, 32, 0, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        let wide: Vec<u8> = [33u64, 32, 4, 56, 0, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert!(is_32_bit(&narrow) && !is_32_bit(&wide) && !is_32_bit(&[]));
        assert!(!is_32_bit(&fs::read("/proc/self/auxv").unwrap()));
    }

    #[test]
    fn links_of_kernel_objects() {
        assert_eq!(bracketed("socket:[42]", "socket"), Some(42));
        assert_eq!(bracketed("pipe:[42]", "socket"), None);
        assert_eq!(bracketed("/tmp/socket:[42]", "socket"), None);
    }
}
