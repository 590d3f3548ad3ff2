//! Finds a criu that works on this machine's kernel.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, sockopt};
use tranship_sys::launch::Program;

/// Where `make setup` puts a criu if the machine's own does not work.
pub const PRIVATE_PREFIX: &str = "/opt/tranship/criu/criu";

/// A criu that has passed its own check here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    /// The file to execute.
    pub path: PathBuf,
    /// Its version as it prints it, e.g. `4.2.1`.
    pub version: String,
    /// How a library gets into it.
    pub how_preloaded: HowPreloaded,
    /// Whether it dumps 32-bit tasks.
    pub compat: bool,
}

/// How a library is preloaded into a criu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HowPreloaded {
    /// By the dynamic loader's own `LD_PRELOAD`.
    Loader,
    /// By the wrapper that `scripts/setup-criu` writes: it runs criu by a loader of its own, whose libc is not that of the
    /// shell that runs the wrapper, so the library must not get into that shell.
    Wrapper,
}

impl Criu {
    /// Whether it carries BPF maps: as far as is known it does where it was built with libbpf.
    pub fn carries_bpf_maps(&self) -> bool {
        fs::read(&self.path).is_ok_and(|program| program.windows(9).any(|part| part == b"libbpf.so"))
    }

    /// What to set in the environment so that the library `preload` is preloaded into this criu.
    pub fn environment(&self, preload: &Path) -> Vec<(OsString, OsString)> {
        let name = match self.how_preloaded {
            HowPreloaded::Loader => "LD_PRELOAD",
            HowPreloaded::Wrapper => WRAPPER_VARIABLE,
        };
        vec![(name.into(), preload.into())]
    }
}

/// The variable by which the wrapper of `scripts/setup-criu` is told what to preload.
const WRAPPER_VARIABLE: &str = "TRANSHIP_CRIU_PRELOAD";

/// There is no criu that works here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("criu is missing or does not work on this kernel: {why}; run `make setup` or install criu >= 4.2")]
pub struct CriuMissing {
    /// What was tried last and the last line of what it said.
    pub why: String,
}

/// How long criu may take for a check of itself.
const PATIENCE: Duration = Duration::from_secs(60);

/// A check's outcome belongs to a file as it was: path, time of change in seconds and ns, size.
type Key = (PathBuf, i64, i64, u64);
static CHECKED: LazyLock<Mutex<HashMap<Key, Result<Criu, String>>>> = LazyLock::new(Mutex::default);

/// Finds the first of the configured path, `criu` on PATH and [`PRIVATE_PREFIX`] that passes `criu check`; where a path is
/// configured, it alone counts. A check takes about 50 ms and is done once for each file as long as that does not change.
///
/// # Errors
/// None of them exists, or none passes; the text says why, for the most promising one.
pub fn find(configured: Option<&Path>) -> Result<Criu, CriuMissing> {
    let candidates = match configured {
        Some(path) => vec![path.to_owned()],
        None => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            on_path(&path).into_iter().chain([PathBuf::from(PRIVATE_PREFIX)]).collect()
        }
    };
    let mut why = None;
    for path in &candidates {
        match checked(path) {
            Ok(criu) => return Ok(criu),
            // A criu that exists and fails says more than one that is not there.
            Err(reason) if why.is_none() || path.exists() => why = Some(reason),
            Err(_) => {}
        }
    }
    Err(CriuMissing { why: why.unwrap_or_else(|| "none is on PATH".into()) })
}

/// The executables named `criu` on a PATH. Our own front bears that name too, for the engine's sake; it is passed over.
fn on_path(path: &OsStr) -> Vec<PathBuf> {
    let own = std::env::current_exe().and_then(fs::canonicalize).ok();
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join("criu"))
        .filter(|p| fs::metadata(p).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
        .filter(|p| own.is_none() || fs::canonicalize(p).ok() != own)
        .collect()
}

fn checked(path: &Path) -> Result<Criu, String> {
    let meta = fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let key = (path.to_owned(), meta.mtime(), meta.mtime_nsec(), meta.size());
    // Held during the check, so that two who ask at the same time do not both run it.
    let mut known = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry(key).or_insert_with(|| check(path)).clone()
}

fn check(path: &Path) -> Result<Criu, String> {
    let run = |arguments: &[&str]| {
        // A preload meant for some other criu must not decide about this one.
        let command = &mut Program::new(path);
        let output = command.args(arguments).env_remove(WRAPPER_VARIABLE).env_remove("LD_PRELOAD").output(PATIENCE);
        match output {
            Ok(Some(output)) => Ok(output),
            Ok(None) => Err(format!("{} has not ended within {} s", path.display(), PATIENCE.as_secs())),
            Err(e) => Err(format!("{} cannot be run: {e}", path.display())),
        }
    };
    let output = run(&["check"])?;
    if !output.status.success() {
        return Err(format!("{} check says: {}", path.display(), last_line(&output)));
    }
    let version = run(&["--version"])?;
    let version = version_in(&String::from_utf8_lossy(&version.stdout))
        .ok_or_else(|| format!("{} tells no version: {}", path.display(), last_line(&version)))?;
    let mut numbers = version.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
    let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if major < 4 {
        return Err(format!("{} is version {version}", path.display()));
    }
    if (major, minor) < (4, 2) && kernel_refuses_passcred() {
        return Err(format!("{} is version {version}, which cannot dump a TCP socket on this kernel", path.display()));
    }
    let compat = run(&["check", "--feature", "compat_restore"])?.status.success();
    let how_preloaded = how_preloaded(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))?;
    Ok(Criu { path: path.to_owned(), version, how_preloaded, compat })
}

/// Since 6.16 kernels refuse SO_PASSCRED for all but Unix and netlink sockets, and criu < 4.2 asks every socket for it, a
/// thing that `criu check` does not notice. Asks the kernel rather than for its version, since distributions move such
/// changes about.
fn kernel_refuses_passcred() -> bool {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None);
    socket.is_ok_and(|s| sockopt::socket_passcred(&s) == Err(rustix::io::Errno::OPNOTSUPP))
}

/// An ELF file is preloaded by the loader; a script only if it is one that knows our variable.
fn how_preloaded(path: &Path) -> io::Result<HowPreloaded> {
    let mut head = Vec::new();
    fs::File::open(path)?.take(4096).read_to_end(&mut head)?;
    let knows = head.windows(WRAPPER_VARIABLE.len()).any(|w| w == WRAPPER_VARIABLE.as_bytes());
    Ok(if head.starts_with(b"#!") && knows { HowPreloaded::Wrapper } else { HowPreloaded::Loader })
}

/// The last line with something on it, of what went to stderr, else to stdout.
fn last_line(output: &Output) -> String {
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.lines().map(str::trim).rfind(|l| !l.is_empty()).map(str::to_owned)
    };
    last(&output.stderr).or_else(|| last(&output.stdout)).unwrap_or_else(|| format!("nothing ({})", output.status))
}

pub(crate) fn version_in(text: &str) -> Option<String> {
    let version = text.lines().find_map(|l| l.strip_prefix("Version:"))?.trim();
    (!version.is_empty()).then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
        let path = dir.join(name);
        // Another process writes it: a descriptor of ours, inherited for an instant by a child that a test on another
        // thread starts, would make the file "busy" when it is to be run.
        let mut writer = Command::new("tee").arg(&path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        writer.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{body}\n").as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    const WORKS: &str =
        r#"case $1 in check) [ $# = 1 ] && echo "Looks good.";; --version) echo "Version: 4.2.1";; esac"#;

    #[test]
    fn a_configured_criu_is_checked_once_until_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let path = script(dir.path(), "criu", &format!("echo x >> {}; {WORKS}", log.display()));
        let criu = find(Some(&path)).unwrap();
        assert_eq!((criu.version.as_str(), criu.compat), ("4.2.1", false));
        let runs = fs::read(&log).unwrap();
        assert_eq!(find(Some(&path)).unwrap(), criu);
        assert_eq!(fs::read(&log).unwrap(), runs, "it was run again");
        script(dir.path(), "criu", "echo broken now >&2; exit 1");
        assert!(find(Some(&path)).unwrap_err().why.ends_with("check says: broken now"));
    }

    #[test]
    fn the_error_is_one_sentence_with_the_last_line_and_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "criu", "echo one; echo 'Error (x): no vdso' >&2; echo >&2; exit 1");
        let text = find(Some(&path)).unwrap_err().to_string();
        assert!(text.starts_with("criu is missing or does not work on this kernel: "), "{text}");
        assert!(text.ends_with("Error (x): no vdso; run `make setup` or install criu >= 4.2"), "{text}");
        let missing = find(Some(&dir.path().join("none"))).unwrap_err().to_string();
        assert!(missing.contains("none: No such file"), "{missing}");
    }

    #[test]
    fn too_old_a_criu_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "criu", &WORKS.replace("4.2.1", "3.17.1"));
        assert!(find(Some(&path)).unwrap_err().why.ends_with("is version 3.17.1"));
    }

    #[test]
    fn the_wrapper_is_told_in_its_own_variable() {
        let dir = tempfile::tempdir().unwrap();
        let wrapper = script(dir.path(), "criu", &format!("# {WRAPPER_VARIABLE}\n{WORKS}"));
        let environment = find(Some(&wrapper)).unwrap().environment(Path::new("/x.so"));
        assert_eq!(environment, [(OsString::from(WRAPPER_VARIABLE), OsString::from("/x.so"))]);
        assert_eq!(how_preloaded(Path::new("/proc/self/exe")).unwrap(), HowPreloaded::Loader);
    }

    #[test]
    fn path_is_searched_in_order_and_our_own_front_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("c"));
        for d in [&a, &b, &c] {
            fs::create_dir(d).unwrap();
        }
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), a.join("criu")).unwrap();
        fs::write(b.join("criu"), "not executable").unwrap();
        let real = script(&c, "criu", WORKS);
        let path = std::env::join_paths([Path::new("relative"), &a, &b, &c]).unwrap();
        assert_eq!(on_path(&path), [real]);
    }

    #[test]
    fn this_machines_criu_is_found() {
        match find(None) {
            Ok(criu) => assert!(criu.path.is_absolute() && !criu.version.is_empty(), "{criu:?}"),
            Err(e) => eprintln!("skipped: {e}"),
        }
    }
}
