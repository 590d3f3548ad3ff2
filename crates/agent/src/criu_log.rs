//! CRIU's log of a dump or restore that failed: its first error in words, with the process and the descriptor that it is about, and the
//! log itself, which is kept beside the move's report when the migration's directory goes.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tranship_sys::process;

/// Bytes of a log that are kept: its end.
const LARGEST: usize = 4 << 20;

/// The first error in a log, and what it is about. Those after it tell who was told.
#[derive(Debug, PartialEq, Eq)]
pub struct Cause {
    /// The error's own words.
    pub words: String,
    /// The process, as the node numbers it.
    pub pid: Option<u32>,
    /// The descriptor.
    pub fd: Option<i32>,
}

/// The number behind the first of some words in a text.
fn number_after<T: std::str::FromStr>(text: &str, words: &[&str]) -> Option<T> {
    let behind = words.iter().find_map(|word| text.split_once(word).map(|(_, behind)| behind))?;
    let end = behind.find(|c: char| !c.is_ascii_digit()).unwrap_or(behind.len());
    behind[..end].parse().ok()
}

impl Cause {
    /// `None` if the log has no error. CRIU's complaint about `RLIMIT_NOFILE` is none.
    pub fn in_log(log: &str) -> Option<Self> {
        let mut errors = log.lines().filter(|line| line.contains("Error (") && !line.contains("rlimit"));
        let (_, first) = errors.next()?.split_once("Error (")?;
        let words = first.split_once("): ").map_or(first, |(_, words)| words).trim().to_owned();
        let pids = ["(pid: ", "pid ", "pid:", "task: ", "namespace for "];
        // The next error says of whose descriptors one could not be dumped.
        let pid = number_after(&words, &pids)
            .or_else(|| number_after(errors.next().filter(|line| line.contains("(pid: "))?, &["(pid: "]));
        let fd = number_after(&words, &["fd=", "dump file ", "fd ", "for fd "]);
        Some(Self { words, pid, fd })
    }

    /// In a sentence; names the process and what its descriptor is, where they are still there.
    pub fn told(&self) -> String {
        let Self { words, pid, fd } = self;
        let mut told = format!("criu says: {words}");
        if let Some((pid, name)) = pid.and_then(|pid| Some((pid, process::name(pid).ok()?))) {
            told += &format!(" ({} is process {pid}", name.escape_debug());
            let link = fd.and_then(|fd| Some((fd, std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?)));
            if let Some((fd, link)) = link {
                told += &format!(", its descriptor {fd} is {}", link.to_string_lossy().escape_debug());
            }
            told += ")";
        }
        told
    }
}

/// Keeps the end of a log in a directory, for root alone, under a name. `None`: there is no log, or no room.
pub fn keep(log: &Path, directory: &Path, name: &str) -> Option<PathBuf> {
    let text = std::fs::read(log).ok().filter(|text| !text.is_empty())?;
    let kept = directory.join(name);
    std::fs::create_dir_all(directory).ok()?;
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&kept).ok()?;
    file.write_all(&text[text.len().saturating_sub(LARGEST)..]).ok()?;
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
(00.000700) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.043706) Error (criu/files-ext.c:94): Can't dump file 4 of that type [600] (anon anon_inode:bpf-map)
(00.043717) Error (criu/cr-dump.c:1545): Dump files (pid: 914) failed with -1
(00.099649) Error (criu/cr-dump.c:1975): Dumping FAILED.
";

    #[test]
    fn the_first_error_is_the_cause_and_the_next_names_the_process() {
        let cause = Cause::in_log(LOG).unwrap();
        let words = "Can't dump file 4 of that type [600] (anon anon_inode:bpf-map)".to_owned();
        assert_eq!(cause, Cause { words, pid: Some(914), fd: Some(4) });
        let log = "(00.1) Error (criu/files-reg.c:1790): Can't lookup mount=15 for fd=7 path=/secretmem (deleted)\n";
        let cause = Cause::in_log(log).unwrap();
        assert_eq!((cause.pid, cause.fd), (None, Some(7)));
        let log = "(00.1) Error (criu/timer.c:329): Unable to convert the notify thread id 4268\n";
        assert_eq!(Cause::in_log(log).unwrap().fd, None);
        assert_eq!(Cause::in_log("(00.1) Warn  (x): y\n"), None);
    }

    #[test]
    fn a_process_that_is_there_is_named() {
        let cause = Cause { words: "no".into(), pid: Some(std::process::id()), fd: None };
        assert!(cause.told().ends_with(&format!(" is process {})", std::process::id())), "{}", cause.told());
        assert_eq!(Cause { words: "no".into(), pid: None, fd: Some(3) }.told(), "criu says: no");
    }

    #[test]
    fn the_end_of_a_log_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("dump.log");
        assert_eq!(keep(&log, &directory.path().join("history"), "m-1.dump.log"), None);
        std::fs::write(&log, vec![b'x'; LARGEST + 10]).unwrap();
        let kept = keep(&log, &directory.path().join("history"), "m-1.dump.log").unwrap();
        assert_eq!(kept.metadata().unwrap().len(), LARGEST as u64);
    }
}
