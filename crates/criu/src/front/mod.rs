//! The CRIU front: what an engine executes when it wants criu.
//!
//! An engine starts `criu swrk FD` and speaks CRIU's RPC over FD. For a migration, the agent puts a directory first on
//! the engine's PATH in which `criu` is this program. It stands between the two:
//!
//! ```text
//!  engine ──RPC── front ──RPC── criu            the front starts criu at once, so that it is warm when it is needed
//!                   │
//!                 agent                          commands and marks, as JSON lines over a Unix socket
//!
//!  WAITING ──go──▶ WORKING ──"post-restore"──▶ HELD ──release──▶ RESUMING ──▶ done
//!     │               │                          │
//!     └── agent gone, or abort: the engine is told that criu failed
//!                                                └── agent gone: waits for another one to connect
//! ```
//!
//! - WAITING: the engine's request is here, criu is running and waits for it. Nothing has been done.
//! - HELD (restores only): all tasks are restored and stopped; the engine knows of them. This is the state in which a
//!   migration is READY. The front leaves it only by an agent's word, so that an agent that was restarted can find its
//!   journal and say it.
//!
//! While a restore is WAITING its front, which the engine has put into the container's cgroup, allocates the pages of
//! files in memory, so that they are charged there ([`tranship_sys::charge`]).
//!
//! Requests other than DUMP and RESTORE (an engine asks for criu's version first) go straight through.

mod handle;
mod queues;
mod work;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prost::Message;
use serde::{Deserialize, Serialize};
use tranship_sys::descriptor;

pub use handle::{FrontHandle, HandleError, allocator_socket, criu_lives, resumed_init, resumed_note, signal_criu};
pub use queues::{note_queues, queues_note};

use crate::rpc::{self, ExternalMount, InheritedDescriptor, Overrides, RequestHead, RequestType};
use queues::empty_queues;
use work::Front;

/// The environment variable that names the plan's file. Without it the front is criu, and nothing else.
pub const PLAN_VARIABLE: &str = "TRANSHIP_FRONT";

/// Largest RPC message; CRIU itself uses 40 KiB and less.
const MESSAGE_CAP: usize = 1 << 20;

/// Programs that are fronts, by device and inode.
static PROGRAMS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

/// Makes the program with this device and inode known as that of fronts.
pub fn add_program(program: (u64, u64)) {
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if !programs.contains(&program) {
        programs.push(program);
    }
}

/// Whether the program with this device and inode is that of fronts.
pub fn is_program(program: (u64, u64)) -> bool {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner).contains(&program)
}

/// What the agent wants of a front; a JSON file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FrontPlan {
    /// The real criu.
    pub criu: PathBuf,
    /// Environment for it.
    pub environment: Vec<(String, String)>,
    /// The Unix socket at which the front waits for the agent.
    pub socket: PathBuf,
    /// Options to change.
    pub overrides: Overrides,
    /// The network namespace in which criu runs: the container's own. What is criu's own it neither dumps nor restores: it needs
    /// neither a walk over the machine's connection tracking table nor a mount of sysfs, which took 10 ms of each blackout.
    pub network: Option<PathBuf>,
    /// For how long an agent may leave a front WAITING, in ms.
    pub patience_ms: u64,
    /// What a restore is given for objects outside of the container.
    #[serde(default)]
    pub given: Vec<Given>,
}

/// A descriptor of another process that a restore is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// What the images name the object.
    pub key: String,
    /// The process that has it open, by its pid on this node.
    pub pid: u32,
    /// Under which number.
    pub number: i32,
}

/// What a front tells the agent; one JSON object a line. Times are CLOCK_MONOTONIC in ns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "mark")]
pub enum Mark {
    /// The engine's request is here; criu waits.
    Waiting {
        /// Pid of the real criu.
        criu: u32,
        /// Pid of the front.
        front: u32,
    },
    /// CRIU reached a stage.
    Stage {
        /// CRIU's name for it.
        script: String,
        /// When.
        at_ns: u64,
    },
    /// All tasks are restored and stopped.
    Held {
        /// Pid of the container's init on this node.
        init: u32,
        /// When.
        at_ns: u64,
    },
    /// All tasks run.
    Resumed {
        /// When.
        at_ns: u64,
    },
    /// criu is done.
    Done {
        /// Whether it did what was asked.
        success: bool,
        /// Its own words where it did not.
        message: String,
        /// When.
        at_ns: u64,
    },
}

/// What begins the message of [`Mark::Done`] where a signal has ended criu.
const KILLED: &str = "criu was killed by signal ";
/// How long criu may take to end once it has hung up.
const DEATH: Duration = Duration::from_secs(1);

/// How criu has ended, in words.
fn end_of(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        // Nobody else sends that one unasked.
        (Some(9), _) => format!("{KILLED}9 (out of memory?)"),
        (Some(signal), _) => format!("{KILLED}{signal}"),
        (None, Some(code)) => format!("criu ended by itself, with status {code}"),
        (None, None) => "criu died".to_owned(),
    }
}

/// Which signal has killed criu, in words, if the message of [`Mark::Done`] says that one has.
pub fn killed(message: &str) -> Option<&str> {
    message.starts_with(KILLED).then_some(message)
}

/// What the agent tells a front; one JSON object a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub enum Order {
    /// Let criu have the request.
    Go {
        /// Mounts that it shall leave alone, besides those that the engine names. Named so late because only a frozen container's
        /// mounts stay what they are.
        #[serde(default)]
        external: Vec<ExternalMount>,
    },
    /// Let the held tasks run.
    Release,
    /// Fail.
    Abort,
}

/// A front that could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The plan cannot be read.
    #[error("the plan {path:?} cannot be read: {why}")]
    Plan {
        /// Its file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The real criu cannot be started.
    #[error("criu {path:?} cannot be started: {source}")]
    Start {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A socket broke.
    #[error("the front lost its connection to {whom}: {source}")]
    Lost {
        /// To whom.
        whom: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The container's network namespace cannot be entered.
    #[error("the network namespace {path:?} cannot be entered: {source}")]
    Network {
        /// Where it is.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What the restore is to be given cannot be taken.
    #[error("what a standard stream is to be, {key}, cannot be taken: {source}")]
    Given {
        /// Its name in the images.
        key: String,
        /// Why.
        source: io::Error,
    },
    /// The engine sent something else than a request.
    #[error(transparent)]
    Request(#[from] rpc::BadRequest),
}

fn lost(whom: &'static str) -> impl Fn(io::Error) -> FrontError {
    move |source| FrontError::Lost { whom, source }
}

/// Runs the front for `criu swrk FD`; returns the exit code. `plan` is the file that [`PLAN_VARIABLE`] names.
pub fn run(plan: &Path, engine: OwnedFd, number: i32) -> Result<i32, FrontError> {
    let bad = |why: String| FrontError::Plan { path: plan.to_owned(), why };
    let text = std::fs::read(plan).map_err(|e| bad(e.to_string()))?;
    let plan: FrontPlan = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;

    let (request, _) = receive(engine.as_fd()).map_err(lost("the engine"))?;
    let head = RequestHead::decode(&*request).map_err(rpc::BadRequest::from)?;
    let working = matches!(RequestType::try_from(head.kind), Ok(RequestType::Dump | RequestType::Restore));
    let (ours, theirs) = descriptor::seqpacket_pair().map_err(lost("criu"))?;
    let mut command = Command::new(&plan.criu);
    command.arg("swrk").arg(number.to_string());
    if working {
        command.envs(plan.environment.iter().map(|(k, v)| (k, v)));
        if let Some(path) = &plan.network {
            let entered = std::fs::File::open(path)
                .and_then(|namespace| Ok(nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)?));
            entered.map_err(|source| FrontError::Network { path: path.clone(), source })?;
        }
    }
    if head.kind == RequestType::Restore as i32
        && let Err(error) = tranship_sys::keyrings::join_new_session()
    {
        // Else the container would have the session keyring of the agent, or of the engine's daemon.
        tracing::warn!(%error, "the restored container has no session keyring of its own");
    }
    let given = if head.kind == RequestType::Restore as i32 { take_given(&plan.given)? } else { Vec::new() };
    tranship_sys::process::with_descriptor(&mut command, theirs, number);
    command.stdin(Stdio::inherit()).stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let criu = command.spawn().map_err(|source| FrontError::Start { path: plan.criu.clone(), source })?;
    // The closure in it owns criu's end of the socket: while that is open here, criu's death would not show.
    drop(command);
    let socket = ours.try_clone().map_err(lost("criu"))?;
    if let Err(source) = hang_up_after(criu.id(), socket) {
        let mut criu = criu;
        let _ = criu.kill().and_then(|()| criu.wait());
        return Err(FrontError::Start { path: plan.criu.clone(), source });
    }

    let mut front = Front::new(engine, ours, criu);
    if !working {
        return front.pass_through(&request);
    }
    let images = open_of_engine(head.opts.as_ref().and_then(|o| o.images_dir_fd));
    let work = open_of_engine(head.opts.as_ref().and_then(|o| o.work_dir_fd));
    let mut overrides = plan.overrides.clone();
    use std::os::fd::AsRawFd;
    overrides.images_dir_fd = images.as_ref().map(AsRawFd::as_raw_fd);
    overrides.work_dir_fd = work.as_ref().map(AsRawFd::as_raw_fd);
    let inherited = |(key, descriptor): &(String, OwnedFd)| InheritedDescriptor {
        key: key.clone(),
        number: descriptor.as_raw_fd(),
    };
    overrides.inherited = given.iter().map(inherited).collect();
    let request = rpc::edit(&request, &overrides)?;
    let restores = matches!(RequestType::try_from(head.kind), Ok(RequestType::Restore));
    front.work(&request, &plan, restores)
}

/// Takes what the restore is given. Programs that are started inherit it under the same numbers.
fn take_given(all: &[Given]) -> Result<Vec<(String, OwnedFd)>, FrontError> {
    let take = |one: &Given| {
        let taken = tranship_sys::process::take_descriptor(one.pid, one.number)?;
        nix::fcntl::fcntl(&taken, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()))?;
        Ok(taken)
    };
    let taken = |one: &Given| match take(one) {
        Ok(descriptor) => Ok((one.key.clone(), descriptor)),
        Err(source) => Err(FrontError::Given { key: one.key.clone(), source }),
    };
    all.iter().map(taken).collect()
}

/// Shuts the socket to criu down when criu has ended. What it said before can still be read. Its death alone does not close
/// the socket: the tasks that it has restored so far have the other end as long as they are part of criu.
fn hang_up_after(criu: u32, socket: OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let wait = move || {
        let criu = nix::unistd::Pid::from_raw(criu.cast_signed());
        // Only looked at: whoever owns the child collects it.
        let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        while nix::sys::wait::waitid(nix::sys::wait::Id::Pid(criu), flags) == Err(nix::errno::Errno::EINTR) {}
        let _ = nix::sys::socket::shutdown(socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    };
    tranship_sys::threads::start("hang up", wait).map(drop)
}

/// CRIU opens such descriptors of the process that sent the request, which is the front: so the front must have them.
fn open_of_engine(number: Option<i32>) -> Option<std::fs::File> {
    let path = format!("/proc/{}/fd/{}", std::os::unix::process::parent_id(), number.filter(|n| *n >= 0)?);
    std::fs::File::open(path).ok()
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut buffer = vec![0; MESSAGE_CAP];
    let (got, descriptors) = descriptor::receive(socket, &mut buffer)?;
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    buffer.truncate(got);
    Ok((buffer, descriptors))
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    descriptor::send(socket, bytes, &descriptors).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_criu_that_was_killed_is_told_from_one_that_failed() {
        assert_eq!(killed(&end_of(ExitStatus::from_raw(9))), Some("criu was killed by signal 9 (out of memory?)"));
        assert_eq!(killed(&end_of(ExitStatus::from_raw(11))), Some("criu was killed by signal 11"));
        assert_eq!(end_of(ExitStatus::from_raw(256)), "criu ended by itself, with status 1");
        assert_eq!(killed("criu ended by itself, with status 1"), None);
    }
}
