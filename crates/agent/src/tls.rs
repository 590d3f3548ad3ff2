//! The TLS process: it has the node's private key, and parses what callers send before they have shown who they are.
//!
//! The agent starts `transhipd tls`, and again whenever that ends. It gives it each new connection for the handshake, and goes on with
//! the keys that it gets back ([`tranship_transport::remote`]). Links that are open do not depend on it.
//!
//! The TLS process reads the files of the identity, and then gives up what it has: its user is nobody, its root an empty directory, it has
//! no capabilities, and may make no system call but those for memory, threads and the sockets that it is given.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tranship_sys::{descriptor, privileges, process, seccomp, threads};
use tranship_transport::remote::{self, Failed, TlsProcess};
use tranship_transport::{Established, Handshakes, Identity, Role, TransportError};
use tranship_types::NodeName;

use crate::config;
use crate::node::sentence;

/// The argument with which `transhipd` is the TLS process.
pub const ARGUMENT: &str = "tls";
/// What it sends when it is ready; else it sends why it is not.
const READY: &[u8] = b"ready";
/// How long it may take until it is.
const START: Duration = Duration::from_secs(10);
/// One that ends sooner than this after its start is followed by another one after a pause, which becomes longer.
const LONG: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Descriptors that it may have open: two for each handshake.
const DESCRIPTORS: u64 = 1024;
/// Longest reason why it is not ready.
const REASON: usize = 4096;

/// `transhipd tls CA CERT KEY NODE ROOT`, with the agent's socket as standard input.
pub fn run(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, ca, cert, key, node, root] = arguments else {
        anyhow::bail!("usage: transhipd {ARGUMENT} CA CERT KEY NODE ROOT");
    };
    process::set_name(c"tranship-tls");
    process::protect_secrets();
    let agent = io::stdin().as_fd().try_clone_to_owned()?;
    let prepare = || -> anyhow::Result<Identity> {
        let identity = Identity::load(Path::new(ca), Path::new(cert), Path::new(key))?;
        identity.expect_node(&node.to_string_lossy().parse::<NodeName>()?)?;
        confine(Path::new(root)).context("the TLS process cannot give up its privileges")?;
        Ok(identity)
    };
    match prepare() {
        Ok(identity) => {
            descriptor::send(agent.as_fd(), READY, &[])?;
            let identity: Arc<dyn Handshakes> = Arc::new(identity);
            remote::serve(&agent, &identity)?;
            Ok(0)
        }
        Err(error) => {
            let mut reason = sentence(error.as_ref()).into_bytes();
            reason.truncate(REASON);
            descriptor::send(agent.as_fd(), &reason, &[])?;
            Ok(1)
        }
    }
}

fn confine(root: &Path) -> io::Result<()> {
    privileges::become_nobody(root, DESCRIPTORS)?;
    seccomp::allow_only(&[seccomp::BASE, seccomp::THREADS, seccomp::SOCKETS, seccomp::NO_FILES])
}

/// Does the handshakes of an agent by a TLS process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tls(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    arguments: [OsString; 5],
    node: NodeName,
    /// The one that runs, or has run last, and its number.
    current: Mutex<(u64, Arc<TlsProcess>)>,
    replaced: Condvar,
}

impl Tls {
    /// Starts a TLS process, which reads the files; `root` becomes its root directory.
    ///
    /// # Errors
    /// It cannot be started, or the files are not what they should be.
    pub fn start(files: &config::Tls, node: &NodeName, root: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(root).with_context(|| format!("{} cannot be made", root.display()))?;
        let path = |path: &PathBuf| path.clone().into_os_string();
        let (ca, cert, key) = (path(&files.ca), path(&files.cert), path(&files.key));
        let arguments = [ca, cert, key, node.as_str().into(), root.into()];
        let (child, requests) = spawn(&arguments)?;
        let first = Arc::new(TlsProcess::new(requests, node.clone()));
        let shared =
            Shared { arguments, node: node.clone(), current: Mutex::new((0, first)), replaced: Condvar::new() };
        let tls = Self(Arc::new(shared));
        let keeper = tls.clone();
        threads::start("tls", move || keeper.keep(child))?;
        Ok(tls)
    }

    /// Starts another TLS process whenever one has ended.
    fn keep(&self, mut child: Child) {
        let (mut pause, mut begun) = (Duration::ZERO, Instant::now());
        loop {
            let ended = child.wait();
            tracing::warn!(?ended, "the TLS process has ended, another one is started");
            pause = match begun.elapsed() {
                lived if lived >= LONG => Duration::ZERO,
                _ => (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            };
            child = loop {
                std::thread::sleep(pause);
                begun = Instant::now();
                match spawn(&self.0.arguments) {
                    Ok((child, requests)) => {
                        let mut current = self.current();
                        *current = (current.0 + 1, Arc::new(TlsProcess::new(requests, self.0.node.clone())));
                        self.0.replaced.notify_all();
                        break child;
                    }
                    Err(error) => {
                        tracing::error!(error = sentence(error.as_ref()), "no TLS process can be started: there are no new links");
                        pause = (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                    }
                }
            };
        }
    }

    fn current(&self) -> std::sync::MutexGuard<'_, (u64, Arc<TlsProcess>)> {
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handshakes for Tls {
    fn node(&self) -> &NodeName {
        &self.0.node
    }

    fn shake(
        &self,
        stream: &Arc<std::net::TcpStream>,
        role: &Role,
        deadline: Instant,
    ) -> Result<Established, TransportError> {
        let (number, process) = self.current().clone();
        process.shake(stream, role, deadline).map_err(|failed| match failed {
            Failed::Handshake(error) => error,
            Failed::Ended(error) => {
                // Whoever tries again shall find another one.
                let left = deadline.saturating_duration_since(Instant::now());
                let same = |current: &mut (u64, _)| current.0 == number;
                drop(self.0.replaced.wait_timeout_while(self.current(), left, same));
                TransportError::TlsProcess(error)
            }
        })
    }
}

/// Starts a TLS process, and waits until it is ready: the process, and the socket for requests.
fn spawn(arguments: &[OsString; 5]) -> anyhow::Result<(Child, OwnedFd)> {
    let (ours, theirs) = descriptor::seqpacket_pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("transhipd").arg(ARGUMENT).args(arguments).env_clear();
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
    process::detach(&mut command);
    let mut child = command.spawn().map_err(threads::explained).context("the TLS process cannot be started")?;
    // Its end of the socket must not stay open here.
    drop(command);
    match await_ready(&ours) {
        Ok(()) => Ok((child, ours)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

fn await_ready(socket: &OwnedFd) -> anyhow::Result<()> {
    let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::try_from(START).unwrap_or(PollTimeout::MAX))? == 0 {
        anyhow::bail!("the TLS process is not ready within {START:?}");
    }
    let mut answer = vec![0; REASON];
    let (length, _) = descriptor::receive(socket.as_fd(), &mut answer)?;
    match &answer[..length] {
        READY => Ok(()),
        [] => anyhow::bail!("the TLS process has ended at its start"),
        reason => anyhow::bail!("{}", String::from_utf8_lossy(reason)),
    }
}
