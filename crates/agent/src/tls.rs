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
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use tranship_sys::launch::{Program, Started, Stream};
use tranship_sys::{descriptor, privileges, process, seccomp, threads};
use tranship_transport::remote::{self, Failed, TlsProcess};
use tranship_transport::{Established, Expiry, Files, Handshakes, Identity, Pins, Role, TransportError, Trust};
use tranship_types::NodeName;

use crate::config;
use crate::live::Certificates;
use crate::node::sentence;

/// The argument with which `transhipd` is the TLS process.
pub const ARGUMENT: &str = "tls";
/// What it sends when it is ready, followed by when its certificates end; else it sends why it is not.
const READY: &[u8] = b"ready ";
/// How long it may take until it is.
const START: Duration = Duration::from_secs(10);
/// One that ends sooner than this after its start is followed by another one after a pause, which becomes longer.
const LONG: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// One that has left so many requests in succession without an answer in their time is ended.
const SILENCES: u32 = 2;
/// Descriptors that it may have open: two for each handshake.
const DESCRIPTORS: u64 = 1024;
/// Longest reason why it is not ready.
const REASON: usize = 4096;
/// Longest message that it is ready.
const ANSWER: usize = 32 << 10;

/// `transhipd tls CA CERT KEY NODE ROOT [CRL]`, with the agent's socket as standard input.
pub fn run(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, ca, cert, key, node, root, crl @ ..] = arguments else {
        anyhow::bail!("usage: transhipd {ARGUMENT} CA CERT KEY NODE ROOT [CRL]");
    };
    process::set_name(c"tranship-tls");
    process::protect_secrets();
    let agent = io::stdin().as_fd().try_clone_to_owned()?;
    let prepare = || -> anyhow::Result<Identity> {
        let crl = crl.first().map(Path::new);
        let files = Files { ca: Path::new(ca), cert: Path::new(cert), key: Path::new(key), crl };
        let identity = Identity::load_files(&files)?;
        identity.expect_node(&node.to_string_lossy().parse::<NodeName>()?)?;
        confine(Path::new(root)).context("the TLS process cannot give up its privileges")?;
        Ok(identity)
    };
    match prepare() {
        Ok(identity) => {
            let ends = serde_json::to_vec(&identity.expiries())?;
            descriptor::send(agent.as_fd(), &[READY, &ends].concat(), &[])?;
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
    node: NodeName,
    root: PathBuf,
    trust: Trust,
    current: Mutex<Current>,
    replaced: Condvar,
}

/// The TLS process that runs, or has run last.
#[derive(Debug, Clone)]
struct Current {
    number: u64,
    process: Arc<TlsProcess>,
    arguments: Vec<OsString>,
    /// When its certificates end.
    ends: Vec<Expiry>,
    /// The process itself.
    child: Arc<OwnedFd>,
    /// Requests without an answer since the last one that had one.
    silences: Arc<AtomicU32>,
}

impl Tls {
    /// Starts a TLS process, which reads the files; `root` becomes its root directory.
    ///
    /// # Errors
    /// It cannot be started, or the files are not what they should be.
    pub fn start(files: &config::Tls, node: &NodeName, root: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(root).with_context(|| format!("{} cannot be made", root.display()))?;
        let arguments = arguments(files, node, root);
        let (current, child) = spawn(&arguments)?.into_current(0, arguments, node);
        let current = Mutex::new(current);
        let (node, root, trust, replaced) = (node.clone(), root.to_owned(), Trust::default(), Condvar::new());
        let tls = Self(Arc::new(Shared { node, root, trust, current, replaced }));
        let keeper = tls.clone();
        threads::start("tls", move || keeper.keep(0, child))?;
        Ok(tls)
    }

    /// Starts another TLS process whenever one has ended, until this one, with this number, was replaced by one of other files.
    fn keep(&self, mut number: u64, mut child: Started) {
        let (mut pause, mut begun) = (Duration::ZERO, Instant::now());
        loop {
            let ended = child.wait();
            if self.current().number != number {
                return;
            }
            tracing::warn!(?ended, "the TLS process has ended, another one is started");
            pause = match begun.elapsed() {
                lived if lived >= LONG => Duration::ZERO,
                _ => (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            };
            child = loop {
                std::thread::sleep(pause);
                begun = Instant::now();
                let arguments = self.current().arguments.clone();
                match spawn(&arguments) {
                    Ok(started) => {
                        let mut current = self.current();
                        if current.number != number {
                            drop(started.requests);
                            break started.child;
                        }
                        let (next, child) = started.into_current(number + 1, arguments, &self.0.node);
                        number = next.number;
                        self.take(&mut current, next);
                        break child;
                    }
                    Err(_) if self.current().number != number => return,
                    Err(error) => {
                        tracing::error!(
                            error = sentence(error.as_ref()),
                            "no TLS process can be started: there are no new links"
                        );
                        pause = (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                    }
                }
            };
        }
    }

    /// Gives what follows to this TLS process.
    fn take(&self, current: &mut Current, next: Current) {
        *current = next;
        self.0.replaced.notify_all();
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Current> {
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Certificates for Tls {
    /// Another TLS process reads the files; the one from before ends with the handshakes that it has begun.
    fn replace(&self, files: &config::Tls) -> Result<(), String> {
        let arguments = arguments(files, &self.0.node, &self.0.root);
        let started = spawn(&arguments).map_err(|error| sentence(error.as_ref()))?;
        let mut current = self.current();
        let (next, child) = started.into_current(current.number + 1, arguments, &self.0.node);
        let (keeper, number) = (self.clone(), next.number);
        threads::start("tls", move || keeper.keep(number, child)).map_err(|error| sentence(&error))?;
        self.take(&mut current, next);
        Ok(())
    }

    fn pin(&self, pins: Pins) {
        self.0.trust.pin(pins);
    }

    fn expiries(&self) -> Vec<Expiry> {
        let own = self.current().ends.clone();
        own.into_iter().chain(self.0.trust.seen()).collect()
    }
}

impl Handshakes for Tls {
    fn node(&self) -> &NodeName {
        &self.0.node
    }

    fn check_peer(&self, peer: &NodeName, certificate: &[u8]) -> Result<(), String> {
        self.0.trust.check(peer, certificate)
    }

    fn shake(
        &self,
        stream: &Arc<std::net::TcpStream>,
        role: &Role,
        deadline: Instant,
    ) -> Result<Established, TransportError> {
        loop {
            let Current { number, process, child, silences, .. } = self.current().clone();
            let shaken = process.shake(stream, role, deadline);
            if !matches!(shaken, Err(Failed::Silent(_))) {
                silences.store(0, Ordering::Relaxed);
            }
            let (error, may_repeat) = match shaken {
                Ok(established) => return Ok(established),
                Err(Failed::Handshake(error)) => return Err(error),
                Err(Failed::Silent(error)) => {
                    if silences.fetch_add(1, Ordering::Relaxed) + 1 >= SILENCES {
                        tracing::error!("the TLS process stands still, and is ended");
                        let _ = process::signal(&child, Signal::SIGKILL as i32);
                    }
                    (error, false)
                }
                Err(Failed::NotBegun(error)) => (error, true),
                Err(Failed::Ended(error)) => (error, false),
            };
            // Whoever tries again, here or above, shall find another one.
            let left = deadline.saturating_duration_since(Instant::now());
            let same = |current: &mut Current| current.number == number;
            let replaced = self.0.replaced.wait_timeout_while(self.current(), left, same);
            let (current, _) = replaced.unwrap_or_else(PoisonError::into_inner);
            if current.number == number || !may_repeat {
                return Err(TransportError::TlsProcess(error));
            }
        }
    }
}

/// The arguments of a TLS process after the first one.
fn arguments(files: &config::Tls, node: &NodeName, root: &Path) -> Vec<OsString> {
    let path = |path: &PathBuf| path.clone().into_os_string();
    let fixed = [path(&files.ca), path(&files.cert), path(&files.key), node.as_str().into(), root.into()];
    fixed.into_iter().chain(files.crl.as_ref().map(path)).collect()
}

/// A TLS process that is ready.
struct Ready {
    child: Started,
    descriptor: OwnedFd,
    /// The socket for requests.
    requests: OwnedFd,
    /// When its certificates end.
    ends: Vec<Expiry>,
}

impl Ready {
    fn into_current(self, number: u64, arguments: Vec<OsString>, node: &NodeName) -> (Current, Started) {
        let process = Arc::new(TlsProcess::new(self.requests, node.clone()));
        let (child, silences) = (Arc::new(self.descriptor), Arc::default());
        (Current { number, process, arguments, ends: self.ends, child, silences }, self.child)
    }
}

/// Starts a TLS process, and waits until it is ready.
fn spawn(arguments: &[OsString]) -> anyhow::Result<Ready> {
    let (ours, theirs) = descriptor::seqpacket_pair()?;
    let mut command = Program::own();
    command.arg0("transhipd").arg(ARGUMENT).args(arguments).env_clear();
    command.stdin(theirs).stdout(Stream::Null).detach();
    let mut child = command.spawn().context("the TLS process cannot be started")?;
    let ready = await_ready(&ours).and_then(|ends| Ok((ends, child.process().try_clone_to_owned()?)));
    match ready {
        Ok((ends, descriptor)) => Ok(Ready { child, descriptor, requests: ours, ends }),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

fn await_ready(socket: &OwnedFd) -> anyhow::Result<Vec<Expiry>> {
    let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::try_from(START).unwrap_or(PollTimeout::MAX))? == 0 {
        anyhow::bail!("the TLS process is not ready within {START:?}");
    }
    let mut answer = vec![0; ANSWER];
    let (length, _) = descriptor::receive(socket.as_fd(), &mut answer)?;
    let answer = &answer[..length];
    if let Some(ends) = answer.strip_prefix(READY) {
        return Ok(serde_json::from_slice(ends)?);
    }
    match answer {
        [] => anyhow::bail!("the TLS process has ended at its start"),
        reason => anyhow::bail!("{}", String::from_utf8_lossy(reason)),
    }
}
