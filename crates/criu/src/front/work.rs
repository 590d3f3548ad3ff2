//! The front at work: between engine, criu and agent.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prost::Message;
use tranship_sys::charge::Allocator;
use tranship_sys::clock::monotonic_ns;

use super::handle::{criu_note, start_of};
use super::{
    DEATH, FrontError, FrontPlan, Mark, Order, allocator_socket, empty_queues, end_of, lost, receive, resumed_note,
    send,
};
use crate::rpc::{self, Overrides, RequestType, Response};

pub(super) struct Front {
    engine: OwnedFd,
    criu_socket: OwnedFd,
    criu: Child,
    /// Pid of the restored init.
    init: i32,
    /// The restored tasks are complete: from here on they run, whatever happens to criu.
    past_return: bool,
    agent: Option<BufReader<UnixStream>>,
    listener: Option<UnixListener>,
    /// Serves while this waits for an order.
    allocator: Option<Allocator>,
}

impl Front {
    pub(super) fn new(engine: OwnedFd, criu_socket: OwnedFd, criu: Child) -> Self {
        Self { engine, criu_socket, criu, init: 0, past_return: false, agent: None, listener: None, allocator: None }
    }

    pub(super) fn pass_through(&mut self, request: &[u8]) -> Result<i32, FrontError> {
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

    pub(super) fn work(&mut self, request: &[u8], plan: &FrontPlan, restores: bool) -> Result<i32, FrontError> {
        // For an agent that finds the front killed: criu goes on without it.
        let criu = self.criu.id().to_string();
        if let Some(started) = start_of(&criu) {
            std::fs::write(criu_note(&plan.socket), format!("{criu} {started}")).map_err(lost("the agent"))?;
        }
        if restores {
            self.allocator = Some(Allocator::listen(&allocator_socket(&plan.socket)).map_err(lost("the agent"))?);
        }
        self.listen(&plan.socket)?;
        let waiting = Mark::Waiting { criu: self.criu.id(), front: std::process::id() };
        let deadline = Instant::now() + Duration::from_millis(plan.patience_ms);
        let Some(Order::Go { external }) = self.order(&waiting, Some(deadline)) else {
            return self.refuse("the migration was given up before criu was needed");
        };
        let request = rpc::edit(request, &Overrides { ext_mnt: external, ..Overrides::default() })?;
        send(self.criu_socket.as_fd(), &request, &[]).map_err(lost("criu"))?;
        loop {
            let Ok((answer, descriptors)) = receive(self.criu_socket.as_fd()) else {
                if self.past_return {
                    return self.conclude();
                }
                let message = self.death();
                self.tell(&Mark::Done { success: false, message: message.clone(), at_ns: monotonic_ns() });
                return self.refuse(&message);
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
                empty_queues(&plan.socket);
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
            let first = [listener.as_fd(), self.criu_socket.as_fd(), self.engine.as_fd()];
            let agent = self.agent.as_ref().map(|a| a.get_ref().as_fd());
            let allocator = self.allocator.iter().flat_map(Allocator::watched);
            let watched = first.into_iter().chain(agent).chain(allocator);
            let mut fds: Vec<PollFd<'_>> = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            match poll(&mut fds, wait) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return None,
                Ok(_) => {}
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
            drop(fds);
            if let Some(allocator) = &mut self.allocator {
                allocator.serve();
            }
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
            if self.agent.is_some() && ready[3] {
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

    /// How criu, which has hung up, has ended.
    fn death(&mut self) -> String {
        let deadline = Instant::now() + DEATH;
        loop {
            match self.criu.try_wait() {
                Ok(Some(status)) => return end_of(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                _ => return "criu hung up".to_owned(),
            }
        }
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
