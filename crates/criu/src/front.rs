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
//! Requests other than DUMP and RESTORE (an engine asks for criu's version first) go straight through.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prost::Message;
use serde::{Deserialize, Serialize};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::descriptor;

use crate::rpc::{self, Overrides, RequestHead, RequestType, Response};

/// The environment variable that names the plan's file. Without it the front is criu, and nothing else.
pub const PLAN_VARIABLE: &str = "TRANSHIP_FRONT";

/// Largest RPC message; CRIU itself uses 40 KiB and less.
const MESSAGE_CAP: usize = 1 << 20;

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
    /// For how long an agent may leave a front WAITING, in ms.
    pub patience_ms: u64,
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

/// What the agent tells a front; one JSON object a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub enum Order {
    /// Let criu have the request.
    Go,
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
    }
    tranship_sys::process::with_descriptor(&mut command, theirs, number);
    command.stdin(Stdio::inherit()).stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let criu = command.spawn().map_err(|source| FrontError::Start { path: plan.criu.clone(), source })?;
    // The closure in it owns criu's end of the socket: while that is open here, criu's death would not show.
    drop(command);
    hang_up_after(criu.id(), ours.try_clone().map_err(lost("criu"))?);

    let mut front = Front { engine, criu_socket: ours, criu, init: 0, past_return: false, agent: None, listener: None };
    if !working {
        return front.pass_through(&request);
    }
    let images = open_of_engine(head.opts.as_ref().and_then(|o| o.images_dir_fd));
    let work = open_of_engine(head.opts.as_ref().and_then(|o| o.work_dir_fd));
    let mut overrides = plan.overrides.clone();
    use std::os::fd::AsRawFd;
    overrides.images_dir_fd = images.as_ref().map(AsRawFd::as_raw_fd);
    overrides.work_dir_fd = work.as_ref().map(AsRawFd::as_raw_fd);
    let request = rpc::edit(&request, &overrides)?;
    front.work(&request, &plan)
}

/// Shuts the socket to criu down when criu has ended. What it said before can still be read. Its death alone does not close
/// the socket: the tasks that it has restored so far have the other end as long as they are part of criu.
fn hang_up_after(criu: u32, socket: OwnedFd) {
    use std::os::fd::AsRawFd;
    std::thread::spawn(move || {
        let criu = nix::unistd::Pid::from_raw(criu.cast_signed());
        // Only looked at: whoever owns the child collects it.
        let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        while nix::sys::wait::waitid(nix::sys::wait::Id::Pid(criu), flags) == Err(nix::errno::Errno::EINTR) {}
        let _ = nix::sys::socket::shutdown(socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    });
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

struct Front {
    engine: OwnedFd,
    criu_socket: OwnedFd,
    criu: Child,
    /// Pid of the restored init.
    init: i32,
    /// The restored tasks are complete: from here on they run, whatever happens to criu.
    past_return: bool,
    agent: Option<BufReader<UnixStream>>,
    listener: Option<UnixListener>,
}

impl Front {
    fn pass_through(&mut self, request: &[u8]) -> Result<i32, FrontError> {
        send(self.criu_socket.as_fd(), request, &[]).map_err(lost("criu"))?;
        while let Ok((answer, descriptors)) = receive(self.criu_socket.as_fd()) {
            send(self.engine.as_fd(), &answer, &descriptors).map_err(lost("the engine"))?;
            let notify = Response::decode(&*answer).is_ok_and(|r| r.kind == RequestType::Notify as i32);
            if !notify {
                break;
            }
            let (reply, _) = receive(self.engine.as_fd()).map_err(lost("the engine"))?;
            send(self.criu_socket.as_fd(), &reply, &[]).map_err(lost("criu"))?;
        }
        self.finish()
    }

    fn work(&mut self, request: &[u8], plan: &FrontPlan) -> Result<i32, FrontError> {
        // For an agent that finds the front killed: criu goes on without it.
        let criu = self.criu.id().to_string();
        if let Some(started) = start_of(&criu) {
            std::fs::write(criu_note(&plan.socket), format!("{criu} {started}")).map_err(lost("the agent"))?;
        }
        self.listen(&plan.socket)?;
        let waiting = Mark::Waiting { criu: self.criu.id(), front: std::process::id() };
        let deadline = Instant::now() + Duration::from_millis(plan.patience_ms);
        if self.order(&waiting, Some(deadline)) != Some(Order::Go) {
            return self.refuse("the migration was given up before criu was needed");
        }
        send(self.criu_socket.as_fd(), request, &[]).map_err(lost("criu"))?;
        loop {
            let Ok((answer, descriptors)) = receive(self.criu_socket.as_fd()) else {
                if self.past_return {
                    return self.conclude();
                }
                self.tell(&Mark::Done { success: false, message: "criu died".into(), at_ns: monotonic_ns() });
                return self.refuse("criu died");
            };
            let Ok(response) = Response::decode(&*answer) else { return self.refuse("criu's answer cannot be read") };
            if response.kind != RequestType::Notify as i32 {
                self.tell(&Mark::Done {
                    success: response.success,
                    message: response.cr_errmsg.unwrap_or_default(),
                    at_ns: monotonic_ns(),
                });
                send(self.engine.as_fd(), &answer, &descriptors).map_err(lost("the engine"))?;
                return self.finish();
            }
            let notify = response.notify.unwrap_or_default();
            if notify.script.as_deref() == Some("pre-resume") {
                // For an agent that hears no more of this front.
                let _ = std::fs::write(resumed_note(&plan.socket), self.init.to_string());
                self.past_return = true;
            }
            let reply = self.notified(&notify, &answer, &descriptors)?;
            match send(self.criu_socket.as_fd(), &reply, &[]) {
                Err(_) if self.past_return => return self.conclude(),
                sent => sent.map_err(lost("criu"))?,
            }
        }
    }

    /// Answers one notification of criu.
    fn notified(
        &mut self,
        notify: &rpc::Notify,
        message: &[u8],
        descriptors: &[OwnedFd],
    ) -> Result<Vec<u8>, FrontError> {
        let at_ns = monotonic_ns();
        match notify.script.as_deref().unwrap_or_default() {
            // No engine does anything at these, and they lie within the blackout.
            "pre-resume" | "network-unlock" | "network-lock" => return Ok(rpc::notify_reply(true)),
            "post-resume" => {
                self.tell(&Mark::Resumed { at_ns });
                return Ok(rpc::notify_reply(true));
            }
            "post-restore" => {
                send(self.engine.as_fd(), message, descriptors).map_err(lost("the engine"))?;
                let (reply, _) = receive(self.engine.as_fd()).map_err(lost("the engine"))?;
                self.init = notify.pid.unwrap_or_default();
                let init = self.init.unsigned_abs();
                // Past this point only an agent's word counts; a lost agent is waited for.
                return Ok(match self.order(&Mark::Held { init, at_ns: monotonic_ns() }, None) {
                    Some(Order::Release) => reply,
                    _ => rpc::notify_reply(false),
                });
            }
            script => self.tell(&Mark::Stage { script: script.to_owned(), at_ns }),
        }
        send(self.engine.as_fd(), message, descriptors).map_err(lost("the engine"))?;
        Ok(receive(self.engine.as_fd()).map_err(lost("the engine"))?.0)
    }

    fn listen(&mut self, path: &Path) -> Result<(), FrontError> {
        // Bound under another name and renamed, so that whoever sees the socket can connect to it.
        let nascent = path.with_extension("nascent");
        let listener = UnixListener::bind(&nascent)
            .and_then(|listener| std::fs::rename(&nascent, path).map(|()| listener))
            .map_err(lost("the agent"))?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Tells every agent that connects where the front stands, until one gives an order. `None`: time is up, or (with a
    /// deadline) the agent is gone, or criu has died, or the engine has.
    fn order(&mut self, mark: &Mark, deadline: Option<Instant>) -> Option<Order> {
        self.tell(mark);
        loop {
            let wait = match deadline {
                None => PollTimeout::NONE,
                Some(at) => {
                    let left = at.checked_duration_since(Instant::now())?;
                    PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
                }
            };
            let listener = self.listener.as_ref()?;
            let watched = [
                Some(listener.as_fd()),
                Some(self.criu_socket.as_fd()),
                Some(self.engine.as_fd()),
                self.agent.as_ref().map(|a| a.get_ref().as_fd()),
            ];
            let mut fds: Vec<PollFd<'_>> =
                watched.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            match poll(&mut fds, wait) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return None,
                Ok(_) => {}
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
            drop(fds);
            if ready[1] || ready[2] {
                // Neither has anything to say now: criu died, or the engine was killed.
                return None;
            }
            if ready[0]
                && let Ok((stream, _)) = self.listener.as_ref()?.accept()
            {
                self.agent = Some(BufReader::new(stream));
                self.tell(mark);
                continue;
            }
            if ready.get(3).copied().unwrap_or(false) {
                let mut line = String::new();
                let read = self.agent.as_mut().map(|agent| agent.read_line(&mut line));
                match (read, serde_json::from_str(&line)) {
                    (Some(Ok(1..)), Ok(order)) => return Some(order),
                    _ => {
                        self.agent = None;
                        if deadline.is_some() {
                            return None;
                        }
                    }
                }
            }
        }
    }

    /// A mark that nobody hears is not an error: the agent may be gone, and a later one asks the engine.
    fn tell(&mut self, mark: &Mark) {
        if let Some(agent) = &mut self.agent {
            let mut line = serde_json::to_vec(mark).expect("a mark is plain data");
            line.push(b'\n');
            let _ = agent.get_mut().write_all(&line);
        }
    }

    /// After criu's death past the point of no return: it held the tasks by ptrace, and the kernel lets them go.
    fn conclude(&mut self) -> Result<i32, FrontError> {
        let at_ns = monotonic_ns();
        self.tell(&Mark::Resumed { at_ns });
        self.tell(&Mark::Done { success: true, message: "criu died after it was done".into(), at_ns });
        send(self.engine.as_fd(), &rpc::restored(self.init), &[]).map_err(lost("the engine"))?;
        let _ = self.criu.wait();
        Ok(0)
    }

    /// Tells the engine that criu failed, and ends criu.
    fn refuse(&mut self, why: &str) -> Result<i32, FrontError> {
        #[derive(Clone, PartialEq, Message)]
        struct Refusal {
            #[prost(enumeration = "RequestType", required, tag = "1")]
            kind: i32,
            #[prost(bool, required, tag = "2")]
            success: bool,
            #[prost(string, optional, tag = "9")]
            message: Option<String>,
        }
        let refusal = Refusal { kind: RequestType::Empty as i32, success: false, message: Some(why.to_owned()) };
        let _ = send(self.engine.as_fd(), &refusal.encode_to_vec(), &[]);
        let _ = self.criu.kill();
        let _ = self.criu.wait();
        Ok(1)
    }

    fn finish(&mut self) -> Result<i32, FrontError> {
        // criu swrk ends when its peer hangs up.
        let _ = nix::sys::socket::shutdown(
            std::os::fd::AsRawFd::as_raw_fd(&self.criu_socket),
            nix::sys::socket::Shutdown::Both,
        );
        let status = self.criu.wait().map_err(lost("criu"))?;
        Ok(status.code().unwrap_or(1))
    }
}

fn criu_note(socket: &Path) -> PathBuf {
    socket.with_extension("criu")
}

/// Whether the real criu of the front with this socket is at work, also without its front: one whose front was killed goes
/// on until it has something to say.
pub fn criu_lives(socket: &Path) -> bool {
    let note = std::fs::read_to_string(criu_note(socket)).unwrap_or_default();
    note.split_once(' ').is_some_and(|(pid, started)| start_of(pid).is_some_and(|now| now == started))
}

/// When a process was started (field 22 of proc_pid_stat(5)), which tells it from a later one with its pid; criu changes its
/// arguments. `None` if it is gone, or a zombie.
fn start_of(pid: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18).map(ToOwned::to_owned))?
}

/// The file beside a restore front's socket that says that its tasks run, whatever becomes of the front.
pub fn resumed_note(socket: &Path) -> PathBuf {
    socket.with_extension("resumed")
}

/// The pid of the restored init, if the tasks of the front with this socket were let go.
pub fn resumed_init(socket: &Path) -> Option<u32> {
    std::fs::read_to_string(resumed_note(socket)).ok()?.trim().parse().ok()
}

/// The agent's end of a front.
#[derive(Debug)]
pub struct FrontHandle {
    stream: BufReader<UnixStream>,
}

/// What an agent can fail at with a front.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// No front came, or it is gone.
    #[error("the CRIU front does not answer at {path:?}: {source}")]
    Absent {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It broke off, or time was up.
    #[error("the CRIU front broke off: {0}")]
    Broken(#[from] io::Error),
}

impl FrontHandle {
    /// Connects to a front that is known to listen.
    pub fn connect(path: &Path) -> Result<Self, HandleError> {
        let stream =
            UnixStream::connect(path).map_err(|source| HandleError::Absent { path: path.to_owned(), source })?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// The next mark; fails when `timeout` has passed.
    pub fn next(&mut self, timeout: Duration) -> Result<Mark, HandleError> {
        self.stream.get_ref().set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line).map_err(io::Error::from)?)
    }

    /// Whether it is there and has nothing to say: so it is while a front waits for an order.
    pub fn is_quiet(&self) -> bool {
        let mut fds = [PollFd::new(self.stream.get_ref().as_fd(), PollFlags::POLLIN)];
        self.stream.buffer().is_empty() && matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
    }

    /// Gives an order.
    pub fn order(&mut self, order: Order) -> Result<(), HandleError> {
        let mut line = serde_json::to_vec(&order).expect("an order is plain data");
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }
}
