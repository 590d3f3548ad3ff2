//! The rules against real containers, each result compared with what criu itself says: a container without blockers is
//! dumped by it (and goes on running), one with a blocker is not.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use tranship_types::{Blocker, BlockerKind};

use super::{Findings, Subject, inspect};
use crate::find::{Criu, find};

const BOUND: [&str; 6] = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/shared"];

/// A runc container that runs a Python script; removed on drop.
pub(super) struct Sandbox {
    dir: tempfile::TempDir,
    name: String,
    init: u32,
}

fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "waited 20 s in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Why containers cannot be run here, if so.
fn missing() -> Option<&'static str> {
    let there = |p: &str| Path::new(p).exists();
    if !nix::unistd::Uid::effective().is_root() {
        return Some("not root");
    }
    let runc = std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join("runc").exists()));
    match (runc, there("/usr/bin/python3")) {
        (false, _) => Some("no runc"),
        (_, false) => Some("no /usr/bin/python3"),
        _ => None,
    }
}

impl Sandbox {
    /// Runs `script`, which ends with `ready()`, below the usual set of mounts.
    pub(super) fn run(name: &str, script: &str, stdout: Option<File>) -> Option<Self> {
        let prologue = "import os, socket, sys, time, ctypes, mmap, threading, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n\
                        def ready():\n    open('/shared/ready', 'w').close()\n    while True: time.sleep(1000)\n";
        let script = format!("{prologue}{script}");
        Self::run_program(name, &["/usr/bin/python3", "-u", "/shared/script.py"], &script, stdout)
    }

    fn run_program(name: &str, program: &[&str], script: &str, stdout: Option<File>) -> Option<Self> {
        if let Some(why) = missing() {
            eprintln!("skipped: {why}");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let name = format!("tranship-preflight-{name}-{}", std::process::id());
        for d in ["rootfs", "shared", "state"] {
            fs::create_dir(dir.path().join(d)).unwrap();
        }
        fs::write(dir.path().join("shared/script.py"), script).unwrap();
        fs::write(dir.path().join("config.json"), config(dir.path(), &name, program).to_string()).unwrap();
        let mut container = Sandbox { dir, name, init: 0 };
        let pid_file = container.dir.path().join("pid");
        let out = stdout.map_or_else(Stdio::null, Stdio::from);
        let mut run = container.runc();
        let run = run.args(["run", "-d", "--bundle"]).arg(container.dir.path()).arg("--pid-file").arg(&pid_file);
        let status = run.arg(&container.name).stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).status();
        assert!(status.unwrap().success(), "runc run failed");
        container.init = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        Some(container)
    }

    pub(super) fn started(self) -> Self {
        wait("the script is ready", || {
            assert!(Path::new(&format!("/proc/{}", self.init)).exists(), "the container has ended");
            self.dir.path().join("shared/ready").exists()
        });
        self
    }

    /// A file of the directory that the container shares with the test.
    pub(super) fn shared(&self, name: &str) -> PathBuf {
        self.dir.path().join("shared").join(name)
    }

    fn runc(&self) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.dir.path().join("state"));
        command
    }

    pub(super) fn subject(&self) -> Subject {
        let output = self.runc().args(["ps", "--format", "json", &self.name]).output().unwrap();
        Subject {
            init_pid: self.init,
            pids: serde_json::from_slice(&output.stdout).unwrap(),
            external_mounts: BOUND.iter().map(PathBuf::from).collect(),
            stdio_pipes_kept: true,
            ..Subject::default()
        }
    }

    /// What criu says, where there is one: an error is the dump's.
    pub(super) fn dump(&self) -> Option<Result<(), String>> {
        let criu: Criu = find(None).map_err(|e| eprintln!("not compared with criu: {e}")).ok()?;
        let images = self.dir.path().join("images");
        let mut path = criu.path.parent()?.as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH")?);
        let mut command = self.runc();
        command.env("PATH", path).args(["checkpoint", "--leave-running", "--tcp-established", "--file-locks"]);
        if let Some(library) = preload() {
            command.envs(criu.environment(&library));
        }
        command.arg("--image-path").arg(&images).arg("--work-path").arg(&images);
        let output = command.arg(&self.name).output().unwrap();
        let log = fs::read_to_string(images.join("dump.log")).unwrap_or_default();
        let errors: Vec<&str> = log.lines().filter(|l| l.contains("Error")).collect();
        let said = format!("{}{}", String::from_utf8_lossy(&output.stderr), errors.join("\n"));
        assert!(output.status.success() || !errors.is_empty(), "criu was not even asked: {said}");
        Some(if output.status.success() { Ok(()) } else { Err(said) })
    }

    /// Whether criu dumps and restores it; where there is a criu.
    fn is_restored(&self) -> Option<bool> {
        let criu: Criu = find(None).map_err(|e| eprintln!("not compared with criu: {e}")).ok()?;
        let images = self.dir.path().join("images");
        let work = |action: &str, options: &[&str]| {
            let mut path = criu.path.parent().unwrap().as_os_str().to_owned();
            path.push(":");
            path.push(std::env::var_os("PATH").unwrap());
            // In some trees a process waits for ever.
            let mut command = Command::new("timeout");
            command.arg("10").arg("runc").arg("--root").arg(self.dir.path().join("state"));
            command.env("PATH", path).arg(action).args(options).arg("--image-path").arg(&images);
            command.arg("--work-path").arg(&images).arg(&self.name);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
        };
        assert!(work("checkpoint", &[]), "{}", fs::read_to_string(images.join("dump.log")).unwrap_or_default());
        let bundle = self.dir.path().to_str().unwrap();
        Some(work("restore", &["-d", "--bundle", bundle]))
    }

    pub(super) fn passes(&self) -> Findings {
        let findings = inspect(&self.subject()).unwrap();
        assert_eq!(findings.blockers, [], "a false alarm");
        if let Some(result) = self.dump() {
            result.expect("criu refuses what preflight lets pass");
        }
        findings
    }

    pub(super) fn blocked(&self, kind: BlockerKind, cause: &str) -> Blocker {
        let findings = inspect(&self.subject()).unwrap();
        let found: Vec<String> = findings.blockers.iter().map(ToString::to_string).collect();
        assert!(findings.blockers.iter().all(|b| b.kind == kind), "{found:#?}");
        let blocker = findings.blockers.iter().find(|b| b.cause.contains(cause));
        let blocker = blocker.unwrap_or_else(|| panic!("no {cause:?} among {found:#?}")).clone();
        assert_eq!(found.len(), 1, "{found:#?}");
        assert!(!blocker.remedy.is_empty());
        if let Some(result) = self.dump() {
            assert!(result.is_err(), "criu dumps what preflight refuses: {blocker}");
        }
        blocker
    }
}

/// The preloaded library as the workspace builds it, or another one that the variable names.
fn preload() -> Option<PathBuf> {
    let built = || Some(std::env::current_exe().ok()?.parent()?.parent()?.join("libtranship_preload.so"));
    std::env::var_os("TRANSHIP_TEST_PRELOAD").map(PathBuf::from).or_else(built).filter(|p| p.exists())
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.runc().args(["delete", "--force", &self.name]).stderr(Stdio::null()).status();
    }
}

fn config(dir: &Path, name: &str, program: &[&str]) -> serde_json::Value {
    let bind = |to: &str| {
        let from =
            if to == "/shared" { dir.join("shared") } else { fs::canonicalize(to).unwrap_or_else(|_| to.into()) };
        json!({"destination": to, "source": from, "type": "bind", "options": ["bind", if to == "/shared" { "rw" } else { "ro" }]})
    };
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666", "mode=0620"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}),
        json!({"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"}),
        json!({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}),
    ];
    mounts.extend(BOUND.map(bind));
    let capabilities = json!([
        "CAP_NET_RAW",
        "CAP_NET_ADMIN",
        "CAP_SYS_PTRACE",
        "CAP_SETUID",
        "CAP_SETGID",
        "CAP_SYS_ADMIN",
        "CAP_SYS_NICE",
        "CAP_IPC_LOCK",
        "CAP_SYS_CHROOT",
        "CAP_BPF",
        "CAP_PERFMON"
    ]);
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "args": program, "cwd": "/", "user": {"uid": 0, "gid": 0},
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin"],
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "root": {"path": dir.join("rootfs"), "readonly": false},
        "mounts": mounts,
        "linux": {
            "cgroupsPath": format!("/{name}"),
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"}, {"type": "cgroup"}],
            "maskedPaths": ["/proc/kcore", "/proc/keys"], "readonlyPaths": ["/proc/sys"],
            "resources": {"devices": [{"allow": true, "access": "rwm"}]},
        },
    })
}

#[test]
fn an_ordinary_program_has_no_blockers_and_is_counted() {
    let script = r#"
import select, tempfile, subprocess
l = socket.create_server(('127.0.0.1', 7000))
c = socket.create_connection(('127.0.0.1', 7000)); s, _ = l.accept()
a, b = socket.socketpair(); u = socket.socket(socket.AF_UNIX); u.bind('/tmp/u'); u.listen()
v = socket.socket(socket.AF_UNIX); v.connect('/tmp/u'); w, _ = u.accept()
d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); d.bind('\0abstract')
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp6 = socket.create_server(('::1', 7001), family=socket.AF_INET6)
nl = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); nl.bind((0, 0)); raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
pk = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
p = os.pipe(); e = select.epoll(); e.register(l, 1); e.register(p[0], 1); os.pidfd_open(os.getpid()); os.eventfd(0)
m = os.memfd_create('x'); os.ftruncate(m, 1 << 20); mm = mmap.mmap(m, 1 << 20); mm.write(b'x' * (1 << 20))
sh = mmap.mmap(-1, 1 << 20); sh.write(b'y' * (1 << 20))
f = open('/tmp/file', 'wb'); f.write(b'z' * 100000); f.flush(); g = open('/tmp/gone', 'wb'); os.unlink('/tmp/gone')
h = open('/shared/script.py'); z = open('/dev/zero'); n = os.open('/proc/self/ns/net', os.O_RDONLY); r = open('/dev/urandom')
master, slave = os.openpty(); o = os.open('/tmp', os.O_PATH)
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
if os.fork() == 0: os.setsid(); time.sleep(1000)
if os.fork() == 0: os._exit(0)
subprocess.Popen(['sleep', '1000'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ready()
"#;
    let Some(container) = Sandbox::run("ordinary", script, None).map(Sandbox::started) else { return };
    let findings = container.passes();
    assert_eq!((findings.tasks, findings.threads, findings.tcp_connections), (3, 4, 2), "{findings:?}");
    assert!((100_000..1_000_000).contains(&findings.tmpfs_bytes), "{findings:?}");
    assert!((2 << 20..100 << 20).contains(&findings.memory_bytes), "{findings:?}");
    assert_eq!(findings.notes, [""; 0]);
}

#[test]
fn a_busy_program_raises_no_false_alarm() {
    let script = r#"
import select, subprocess
def repeat(f):
    def forever():
        while True: f()
    threading.Thread(target=forever, daemon=True).start()
def pairs():
    a, b = socket.socketpair(); e = select.epoll(); e.register(a, 1); e.register(b, 1); r, w = os.pipe(); e.register(r, 1)
    a.close(); b.close(); e.close(); os.close(r); os.close(w)
def clients(family, address):
    def once():
        c = socket.socket(family); c.connect(address); c.send(b'x'); c.recv(1); c.close()
    return once
def servers(family, address):
    l = socket.socket(family); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); l.bind(address); l.listen(64)
    if os.fork() == 0:
        def once():
            s, _ = l.accept(); s.send(b'y'); s.recv(1); s.close()
        repeat(once)
        while True: time.sleep(1000)
for family, address in [(socket.AF_UNIX, '/tmp/u'), (socket.AF_INET, ('127.0.0.1', 7004))]:
    servers(family, address)
    if os.fork() == 0:
        repeat(clients(family, address))
        while True: time.sleep(1000)
if os.fork() == 0:
    while True: subprocess.run(['true'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
repeat(pairs)
ready()
"#;
    let Some(container) = Sandbox::run("busy", script, None).map(Sandbox::started) else { return };
    for _ in 0..20 {
        assert_eq!(inspect(&container.subject()).unwrap().blockers, []);
    }
}

#[test]
fn servers_as_people_run_them_have_no_blockers() {
    let nginx = "user root; daemon off; master_process on; error_log /dev/null; pid /tmp/pid; events {} http { access_log off; \
                 client_body_temp_path /tmp/a; proxy_temp_path /tmp/b; fastcgi_temp_path /tmp/c; uwsgi_temp_path /tmp/d; \
                 scgi_temp_path /tmp/e; server { listen 8080; } }";
    let postgres = "initdb --no-sync -D /tmp/pg -U pg >/dev/null && exec postgres -D /tmp/pg -k /tmp";
    let unprivileged = ["--reuid=65534", "--regid=65534", "--clear-groups", "/bin/sh", "-c", postgres];
    let servers: [(&str, &[&str], u16, &str); 3] = [
        ("/usr/bin/redis-server", &["--port", "7002", "--save", "", "--dir", "/tmp"], 7002, ""),
        ("/usr/sbin/nginx", &["-e", "/dev/null", "-c", "/shared/script.py"], 8080, nginx),
        ("/usr/bin/setpriv", &unprivileged, 5432, ""),
    ];
    for (program, arguments, port, configuration) in servers {
        if !Path::new(program).exists() || port == 5432 && !Path::new("/usr/local/bin/initdb").exists() {
            eprintln!("skipped: no {program}");
            continue;
        }
        let name = program.rsplit('/').next().unwrap();
        let command = [&[program], arguments].concat();
        let Some(container) = Sandbox::run_program(name, &command, configuration, None) else { return };
        let listens = format!(":{port:04X} 00000000:0000 0A");
        wait("the server listens", || {
            fs::read_to_string(format!("/proc/{}/net/tcp", container.init)).is_ok_and(|t| t.contains(&listens))
        });
        if port == 5432 && !super::processes::has_sys_resource() {
            let blockers = inspect(&container.subject()).unwrap().blockers;
            assert!(
                !blockers.is_empty() && blockers.iter().all(|b| b.cause.contains("resource limits")),
                "{blockers:?}"
            );
            let subject = Subject { limits_answered: true, ..container.subject() };
            assert_eq!(inspect(&subject).unwrap().blockers, []);
        } else {
            container.passes();
        }
    }
}

#[test]
fn of_a_process_that_a_signal_has_stopped_the_parent_is_told_once_more() {
    for signal in ["SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"] {
        let script = format!(
            "pid = os.fork()\nif pid == 0:\n  os.setpgid(0, 0)\n  os.kill(os.getpid(), signal.{signal})\n  os._exit(0)\n\
             os.waitpid(pid, os.WUNTRACED)\nready()\n"
        );
        let Some(container) = Sandbox::run("stopped", &script, None).map(Sandbox::started) else { return };
        let Findings { blockers, changes, .. } = inspect(&container.subject()).unwrap();
        assert_eq!(blockers, [], "{signal}");
        assert!(changes.len() == 1 && changes[0].contains("is stopped by a signal"), "{signal}: {changes:?}");
    }
}

#[test]
fn processes_that_were_born_since_they_were_listed_are_looked_at() {
    let script = "r, w = os.pipe()\nif os.fork() == 0:\n  os.close(r)\n  time.sleep(1000)\nos.close(w)\nready()\n";
    let Some(container) = Sandbox::run("born", script, None).map(Sandbox::started) else { return };
    let all = container.subject();
    let before = Subject { pids: vec![all.init_pid], ..all };
    let found = inspect(&before).unwrap();
    assert_eq!((found.blockers, found.tasks), (vec![], 2));
}

/// What the rules for sessions and groups say of random trees is what criu does with them.
#[test]
fn trees_are_refused_if_criu_cannot_restore_them_and_only_then() {
    let seeds = std::env::var("TRANSHIP_TREES").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let (mut carried, mut refused) = (0, 0);
    for seed in 0..seeds {
        let script = "exec(open('/shared/trees.py').read())\n";
        let script = format!("while not os.path.exists('/shared/seed'): time.sleep(0.001)\n{script}");
        let Some(container) = Sandbox::run("trees", &script, None) else { return };
        fs::write(container.shared("trees.py"), include_str!("trees.py")).unwrap();
        fs::write(container.shared("seed.new"), seed.to_string()).unwrap();
        fs::rename(container.shared("seed.new"), container.shared("seed")).unwrap();
        let container = container.started();
        let blockers = inspect(&container.subject()).unwrap().blockers;
        let is_named =
            |b: &Blocker| b.cause.contains("is in the session of") || b.cause.contains("is in the process group");
        assert!(blockers.iter().all(is_named), "seed {seed}: {blockers:?}");
        let Some(restored) = container.is_restored() else { return };
        let log = || fs::read_to_string(container.dir.path().join("images/restore.log")).unwrap_or_default();
        let errors = || log().lines().filter(|l| l.contains("Error")).collect::<Vec<_>>().join("\n");
        assert_eq!(blockers.is_empty(), restored, "seed {seed}: {blockers:#?} {}", errors());
        *(if restored { &mut carried } else { &mut refused }) += 1;
    }
    assert!(carried > 0 && refused > 0, "{carried} carried, {refused} refused");
    println!("{carried} trees carried, {refused} refused");
}

#[test]
fn a_group_that_its_leader_has_left_is_refused_as_criu_waits_for_ever() {
    let script = "pids = []\nfor _ in range(3):\n  pids.append(os.fork())\n  if pids[-1] == 0: time.sleep(1000)\n  os.setpgid(pids[-1], 0)\n\
                  one, two, three = pids\nos.setpgid(two, one)\nos.setpgid(one, three)\nready()\n";
    let Some(container) = Sandbox::run("group", script, None).map(Sandbox::started) else { return };
    let blockers = inspect(&container.subject()).unwrap().blockers;
    assert!(blockers.len() == 1 && blockers[0].cause.contains("is in the process group of python3"), "{blockers:?}");
    assert!(container.is_restored().is_none_or(|restored| !restored));
}

#[test]
fn an_io_uring_is_named() {
    let script =
        "params = ctypes.create_string_buffer(120)\nfd = libc.syscall(425, 4, params)\nassert fd > 0\nready()\n";
    if fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|t| t.trim() == "2") {
        eprintln!("skipped: io_uring is disabled on this machine");
        return;
    }
    let Some(container) = Sandbox::run("uring", script, None).map(Sandbox::started) else { return };
    let blocker = container.blocked(BlockerKind::Descriptor, "is an io_uring");
    assert_eq!((blocker.pid, blocker.fd.is_some()), (Some(container.init), true));
}

/// Not compared with criu, which needs the preloaded library for the listener.
#[test]
fn of_multipath_tcp_sockets_those_that_listen_are_carried_and_told() {
    let script = "s, other = [socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) for _ in range(2)]\n\
                  s.bind(('', 7003))\ns.listen()\nother.bind(('', 7004))\nready()\n";
    if fs::read_to_string("/proc/sys/net/mptcp/enabled").map_or(true, |t| t.trim() != "1") {
        eprintln!("skipped: this kernel has no MPTCP");
        return;
    }
    let Some(container) = Sandbox::run("mptcp", script, None).map(Sandbox::started) else { return };
    let Findings { blockers, changes, .. } = inspect(&container.subject()).unwrap();
    assert!(changes.len() == 1 && changes[0].contains("listens on port 7003 for multipath TCP"), "{changes:?}");
    assert!(blockers.len() == 1 && blockers[0].cause.contains("is a multipath TCP socket"), "{blockers:?}");
    assert!(blockers[0].remedy.contains("GODEBUG=multipathtcp=0"), "{blockers:?}");
}

#[test]
fn stdout_on_a_host_file_is_named() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let out = log.reopen().unwrap();
    let Some(container) = Sandbox::run("stdout", "ready()\n", Some(out)).map(Sandbox::started) else { return };
    let blocker = container.blocked(BlockerKind::Descriptor, &log.path().display().to_string());
    assert!(blocker.cause.starts_with("stdout of python3"), "{blocker}");
    assert_eq!((blocker.pid, blocker.fd), (Some(container.init), Some(1)));
}

#[test]
fn a_traced_process_is_named_with_its_tracer() {
    let script = "child = os.fork()\nif child == 0:\n    libc.ptrace(0, 0, 0, 0)\n    os.kill(os.getpid(), signal.SIGSTOP)\n    \
                  time.sleep(1000)\nos.waitpid(child, os.WUNTRACED)\nready()\n";
    let Some(container) = Sandbox::run("traced", script, None).map(Sandbox::started) else { return };
    // Not compared with criu, which takes ten seconds to give up.
    let blockers = inspect(&container.subject()).unwrap().blockers;
    assert!(blockers.len() == 1 && blockers[0].cause.contains("is being traced by python3"), "{blockers:?}");
    assert!(blockers[0].cause.ends_with("in the same container"), "{blockers:?}");
}

#[test]
fn a_process_that_entered_by_exec_is_named_alone() {
    let Some(container) = Sandbox::run("exec", "ready()\n", None).map(Sandbox::started) else { return };
    let mut command = container.runc();
    let command = command.args(["exec", &container.name, "/bin/sh", "-c", "sleep 1000 & touch /shared/in; wait"]);
    let mut entered: Child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait("the command runs", || container.dir.path().join("shared/in").exists());
    let findings = inspect(&container.subject()).unwrap();
    let causes: Vec<&str> = findings.blockers.iter().map(|b| b.cause.as_str()).collect();
    assert!(
        causes.len() == 1 && causes[0].starts_with("sh (pid") && causes[0].contains("started by exec"),
        "{causes:?}"
    );
    assert_eq!(findings.tasks, 3);
    drop(container);
    entered.wait().unwrap();
}

#[test]
fn a_connection_to_a_socket_of_the_host_is_named_with_its_holder() {
    let script = "c = socket.socket(socket.AF_UNIX)\nwhile True:\n    try: c.connect('/shared/host.sock'); break\n    \
                  except OSError: time.sleep(0.01)\nready()\n";
    let Some(container) = Sandbox::run("unix", script, None) else { return };
    let listener = UnixListener::bind(container.dir.path().join("shared/host.sock")).unwrap();
    let _accepted = listener.accept().unwrap();
    let container = container.started();
    container.blocked(BlockerKind::Socket, "is connected to a Unix socket");
}

#[test]
fn a_renamed_socket_that_was_replaced_is_named_at_once_and_not_for_its_connections() {
    let script = "s, c = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)\ns.bind('/tmp/s')\ns.listen()\n\
                  c.connect('/tmp/s')\na, _ = s.accept()\nc.close()\nos.rename('/tmp/s', '/tmp/t')\nopen('/tmp/s', 'w').close()\nready()\n";
    let Some(container) = Sandbox::run("renamed", script, None).map(Sandbox::started) else { return };
    // It does not pass by itself, so that there is nothing to wait for: one look of many is enough.
    let looks = (0..5).map(|_| {
        let (begun, found) = (Instant::now(), inspect(&container.subject()).unwrap().blockers);
        assert!(found.len() == 1 && found[0].cause.contains("was bound to /tmp/s, and whose file is"), "{found:?}");
        begun.elapsed()
    });
    let soonest = looks.min().unwrap();
    assert!(soonest < super::PATIENCE, "{soonest:?}");
}

#[test]
fn a_message_queue_is_named() {
    let script = "fd = libc.mq_open(b'/queue', os.O_CREAT | os.O_RDWR, 0o600, None)\nassert fd > 0\nready()\n";
    let Some(container) = Sandbox::run("mqueue", script, None).map(Sandbox::started) else { return };
    container.blocked(BlockerKind::Descriptor, "is the POSIX message queue /queue");
}

#[test]
fn a_pending_sigtrap_is_named() {
    let script =
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTRAP])\nos.kill(os.getpid(), signal.SIGTRAP)\nready()\n";
    let Some(container) = Sandbox::run("sigtrap", script, None).map(Sandbox::started) else { return };
    let findings = inspect(&container.subject()).unwrap();
    let causes: Vec<&str> = findings.blockers.iter().map(|b| b.cause.as_str()).collect();
    assert!(causes.len() == 1 && causes[0].contains("SIGTRAP"), "{causes:?}");
}

#[test]
fn a_vfork_that_lasts_is_named() {
    // posix_spawn vforks; the child is held up by opening a FIFO that nobody writes to.
    let script = "os.mkfifo('/tmp/fifo')\ndef spawn():\n    os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, \
                  9, '/tmp/fifo', os.O_RDONLY, 0)])\nif os.fork() == 0: spawn()\nready()\n";
    let Some(container) = Sandbox::run("vfork", script, None).map(Sandbox::started) else { return };
    wait("the child waits", || container.subject().pids.len() == 3);
    let findings = inspect(&container.subject()).unwrap();
    let causes: Vec<&str> = findings.blockers.iter().map(|b| b.cause.as_str()).collect();
    assert!(causes.len() == 1 && causes[0].contains("vforked"), "{causes:?}");
}

#[test]
fn bind_mounts_that_the_engine_does_not_know_are_named() {
    let Some(container) = Sandbox::run("mounts", "ready()\n", None).map(Sandbox::started) else { return };
    let mut subject = container.subject();
    subject.external_mounts.retain(|p| p != Path::new("/shared"));
    let causes: Vec<String> = inspect(&subject).unwrap().blockers.into_iter().map(|b| b.cause).collect();
    assert!(causes.iter().all(|c| c.starts_with("the mount at /shared ")), "{causes:?}");
    // Where the test's directory lies on the root filesystem of the container, CRIU finds it by itself.
    assert!(causes.len() <= 1);
}

#[test]
fn pipes_to_the_outside_are_named_unless_the_engine_keeps_them() {
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let Some(container) = Sandbox::run("pipe", "ready()\n", Some(File::from(write))).map(Sandbox::started) else {
        return;
    };
    // Our own descriptors do not count (an agent may hold one for an instant), so another process has to hold the end.
    let mut holder = Command::new("sleep").arg("1000").stdin(read).spawn().unwrap();
    assert_eq!(inspect(&container.subject()).unwrap().blockers, []);
    let subject = Subject { stdio_pipes_kept: false, ..container.subject() };
    let blockers = inspect(&subject).unwrap().blockers;
    holder.kill().unwrap();
    holder.wait().unwrap();
    let cause = format!("is a pipe whose other end is held by sleep (pid {}) outside of the container", holder.id());
    assert!(blockers.len() == 1 && blockers[0].cause.ends_with(&cause), "{blockers:?}");
}

#[test]
fn other_objects_of_the_kernel_are_named() {
    let script = "fd = libc.syscall(323, 1)\nassert fd > 0\nready()\n";
    let Some(container) = Sandbox::run("userfault", script, None).map(Sandbox::started) else { return };
    container.blocked(BlockerKind::Descriptor, "is a userfaultfd, which CRIU does not support");
}

#[test]
fn a_descriptor_that_was_inherited_is_named_once() {
    let script = "fd = libc.syscall(323, 1)\nassert fd > 0\ncopy = os.dup(fd)\n\
                  for _ in range(3):\n    if os.fork() == 0: time.sleep(1000)\n\
                  made, done = os.pipe()\n\
                  if os.fork() == 0:\n    other = libc.syscall(323, 1)\n    os.close(fd)\n    os.close(copy)\n    \
                  os.close(made)\n    os.close(done)\n    time.sleep(1000)\n\
                  os.close(done)\nos.read(made, 1)\nos.close(made)\nready()\n";
    let Some(container) = Sandbox::run("inherited", script, None).map(Sandbox::started) else { return };
    wait("all children are there", || container.subject().pids.len() == 5);
    let blockers = inspect(&container.subject()).unwrap().blockers;
    let causes: Vec<&str> = blockers.iter().map(|b| b.cause.as_str()).collect();
    assert_eq!(causes.len(), 2, "{causes:#?}");
    assert!(
        causes[0].ends_with("is a userfaultfd, which CRIU does not support; 3 other processes have it too"),
        "{causes:#?}"
    );
    assert_eq!(blockers[0].pid, Some(container.init));
    assert!(causes[1].ends_with("is a userfaultfd, which CRIU does not support"), "{causes:#?}");
}

#[test]
fn a_container_that_has_ended_is_an_error_of_its_own() {
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let subject = Subject { init_pid: child.id(), ..Subject::default() };
    assert!(inspect(&subject).unwrap_err().to_string().contains("has ended"));
}
