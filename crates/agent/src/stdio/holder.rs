//! The process that holds the other ends of a moved container's standard streams, and outlives its
//! agent.
//!
//! ```text
//!   source                                                      destination
//!   reader ◀─pipe── holder ══unix══ agent ══TLS══ agent ══unix══ holder ──pipe─▶ stdin of the container
//!   writer ──pipe─▶                                                     ◀─pipe── stdout, stderr
//! ```
//! On the source it has what the container had open; on the destination it makes new pipes, socket
//! pairs and terminals, of which the restored container gets one end. Agents pass bytes on between
//! the two, and know nothing of them. While there is no link the destination's holder keeps reading
//! until [`UNLINKED`] bytes wait; then output goes to a file for good ([`Plan::spill`]).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use serde::{Deserialize, Serialize};
use tranship_sys::launch::Started;
use tranship_types::{NodeName, StdioStream, StdioTarget};

use super::flow::UNLINKED;
use super::frames::{self, Frame, Kind};
use super::line::{Line, Source};

/// Most bytes of a stream that are read and not acknowledged while there is a link.
const LINKED: usize = 256 << 10;
/// Frames that wait for the link.
const OUTGOING: usize = 256 << 10;
/// How long a command may take to come.
const COMMAND: Duration = Duration::from_secs(1);
/// How often is tried again what no descriptor tells of.
const AGAIN: Duration = Duration::from_secs(1);
/// What poll(2) counts in.
const TICK: Duration = Duration::from_millis(1);
/// How long a holder may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the output of a container that has ended waits for a link.
const ABANDONED: Duration = Duration::from_secs(600);
/// How long the last frame may take to leave.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a holder is started for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// The migration.
    pub relay: String,
    pub container: String,
    /// Whether this node is the one that the container left.
    pub is_source: bool,
    /// The other node.
    pub peer: NodeName,
    pub streams: Vec<Planned>,
    /// Where output goes; only on the destination.
    pub target: StdioTarget,
    /// Where output goes when the reader's node has not been heard of for too long.
    pub spill: PathBuf,
    /// A process that passes on what it has read before it ends, and after which the holder writes.
    #[serde(default)]
    pub after: Option<u32>,
}

/// A stream of a plan.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Planned {
    pub stream: StdioStream,
    /// What is to be read on the source, one after the other: processes and numbers of their
    /// descriptors.
    #[serde(default)]
    pub inputs: Vec<(u32, i32)>,
    /// What is to be written on the source.
    #[serde(default)]
    pub output: Option<(u32, i32)>,
}

/// What a holder is told; one JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub enum Command {
    /// Which descriptors of the holder the container is to get: the answer is a list of numbers, in
    /// the order of the plan.
    Descriptors,
    /// The container has them: the holder's own are closed.
    Begin,
    /// Frames follow in both directions.
    Attach,
    /// How it stands: the answer is a [`Status`].
    Status,
    /// The other node knows nothing of the relay any more.
    Forgotten,
    /// Nothing is to be passed on: the holder ends.
    End,
}

/// How a holder stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The other node is connected.
    pub linked: bool,
    /// Bytes of output that wait.
    pub waiting: usize,
    /// Where output goes since the other node was given up.
    pub spilled: Option<PathBuf>,
}

/// The socket of the holder with this directory.
pub fn socket(directory: &Path) -> PathBuf {
    directory.join("socket")
}

/// The plan of the holder with this directory.
pub fn plan(directory: &Path) -> PathBuf {
    directory.join("plan.json")
}

/// Connects with the holder with this directory.
///
/// # Errors
/// `NotFound` or `ConnectionRefused`: nobody listens.
pub fn connect(directory: &Path) -> io::Result<UnixStream> {
    let made = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(made);
    // Also of connect(2), while the holder accepts nobody (unix(7), SO_SNDTIMEO).
    stream.set_write_timeout(Some(ANSWER))?;
    socket::connect(stream.as_raw_fd(), &UnixAddr::new(&socket(directory))?)?;
    Ok(stream)
}

/// Asks the holder with this directory; the answer is its line, without what comes behind.
pub fn ask(directory: &Path, command: &Command) -> io::Result<(String, UnixStream)> {
    let mut stream = connect(directory)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let answer = read_line(&mut stream)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((answer, stream))
}

/// Reads a line, and nothing behind it.
fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = String::new();
    // Byte by byte: what follows belongs to somebody else.
    BufReader::with_capacity(1, Read::take(stream, 4096)).read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Runs the holder with this directory until all its streams have ended.
pub fn run(directory: &Path) -> anyhow::Result<()> {
    tranship_sys::process::set_name(c"tranship-stdio");
    let text = std::fs::read(plan(directory))?;
    let plan: Plan = serde_json::from_slice(&text)?;
    let lines = plan.streams.iter().map(|planned| Line::open(&plan, planned)).collect::<io::Result<Vec<_>>>()?;
    let after = plan.after.map(tranship_sys::process::descriptor).transpose().ok().flatten();
    let socket = socket(directory);
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket)?;
    let (unlinked, patience) = (Instant::now(), ABANDONED);
    let mut holder = Holder { plan, lines, after, listener, link: None, unlinked, patience, ended: false };
    let done = holder.serve();
    let _ = std::fs::remove_dir_all(directory);
    Ok(done?)
}

/// A connection to the other node's holder.
struct Link {
    stream: UnixStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

struct Holder {
    plan: Plan,
    lines: Vec<Line>,
    /// Nothing is written before this process has ended.
    after: Option<OwnedFd>,
    listener: UnixListener,
    link: Option<Link>,
    /// Since when there is none.
    unlinked: Instant,
    /// How long what is left waits for one.
    patience: Duration,
    ended: bool,
}

/// What a descriptor is polled for.
#[derive(Clone, Copy)]
enum Of {
    Listener,
    After,
    Link,
    Input(usize),
    Output(usize),
}

impl Holder {
    fn serve(&mut self) -> io::Result<()> {
        while !self.ended && !self.is_done() {
            for (of, events) in self.wait()? {
                self.handle(of, events);
            }
            self.give_up();
            self.write_lines();
            self.send_frames();
        }
        if let Some(link) = self.link.as_mut().filter(|_| !self.ended) {
            frames::put(&mut link.outgoing, Kind::Done, 0, 0, &[]);
            let _ = link.stream.set_nonblocking(false);
            let _ = link.stream.set_write_timeout(Some(FAREWELL));
            let _ = link.stream.write_all(&link.outgoing);
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.lines.iter().all(Line::is_done)
    }

    fn wait(&self) -> io::Result<Vec<(Of, PollFlags)>> {
        let mut asked: Vec<(Of, BorrowedFd<'_>, PollFlags)> =
            vec![(Of::Listener, self.listener.as_fd(), PollFlags::POLLIN)];
        asked.extend(self.after.iter().map(|process| (Of::After, process.as_fd(), PollFlags::POLLIN)));
        if let Some(link) = &self.link {
            let wants = if link.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
            asked.push((Of::Link, link.stream.as_fd(), wants | PollFlags::POLLIN));
        }
        for (at, line) in self.lines.iter().enumerate() {
            if let Some(input) = line.input().filter(|_| line.kept() < self.room(line)) {
                asked.push((Of::Input(at), input.as_fd(), PollFlags::POLLIN));
            }
            if let Some(output) = line.output() {
                let waits = line.is_waiting() && self.after.is_none();
                asked.push((
                    Of::Output(at),
                    output.as_fd(),
                    if waits { PollFlags::POLLOUT } else { PollFlags::empty() },
                ));
            }
        }
        let mut fds: Vec<PollFd<'_>> = asked.iter().map(|(_, fd, events)| PollFd::new(*fd, *events)).collect();
        let again = self.lines.iter().any(Line::looks_again).then_some(AGAIN);
        let given_up = self.is_left().then(|| self.patience.saturating_sub(self.unlinked.elapsed()) + TICK);
        let patience = again.into_iter().chain(given_up).min().map(PollTimeout::try_from);
        let patience = patience.transpose().ok().flatten().unwrap_or(PollTimeout::NONE);
        match poll(&mut fds, patience) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let found = fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        Ok(asked.iter().map(|(of, ..)| *of).zip(found).filter(|(_, events)| !events.is_empty()).collect())
    }

    fn room(&self, line: &Line) -> usize {
        if line.is_linked() || line.source() == Source::Node { LINKED } else { UNLINKED }
    }

    fn handle(&mut self, of: Of, events: PollFlags) {
        match of {
            Of::Listener => {
                if let Ok((stream, _)) = self.listener.accept()
                    && let Err(error) = self.command(stream)
                {
                    eprintln!("a command was not done: {error}");
                }
            }
            Of::After => self.after = None,
            Of::Link => {
                if let Err(error) = self.read_link() {
                    self.unlink(&error);
                }
            }
            Of::Input(at) => {
                self.lines[at].read();
                if self.lines[at].kept() >= UNLINKED && !self.lines[at].is_linked() {
                    self.spill(at);
                }
            }
            Of::Output(at) => {
                if events.intersects(PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL) {
                    self.lines[at].close_output();
                }
            }
        }
    }

    /// The reader's node is given up: output goes to a file.
    fn spill(&mut self, at: usize) {
        match self.lines[at].put_into(&self.plan.spill) {
            Ok(()) => eprintln!(
                "node {} has not taken output for too long: it goes to {}",
                self.plan.peer,
                self.plan.spill.display()
            ),
            Err(error) => eprintln!("{} cannot be written: {error}; output waits", self.plan.spill.display()),
        }
    }

    /// Whether the container writes no more, and what it has written waits for a link.
    fn is_left(&self) -> bool {
        let is_at_end = self.lines.iter().all(Line::reads_no_more) && self.lines.iter().any(Line::is_left);
        !self.plan.is_source && self.link.is_none() && is_at_end
    }

    /// Puts what is left into a file where no link has come for too long.
    fn give_up(&mut self) {
        if !self.is_left() || self.unlinked.elapsed() < self.patience {
            return;
        }
        for at in 0..self.lines.len() {
            match self.lines[at].kept() {
                _ if !self.lines[at].is_left() => {}
                0 => self.lines[at].forgotten(),
                _ => self.spill(at),
            }
        }
        // A file that cannot be written is tried again.
        self.unlinked = Instant::now();
    }

    fn command(&mut self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(COMMAND))?;
        stream.set_write_timeout(Some(COMMAND))?;
        let command: Command = serde_json::from_str(&read_line(&mut stream)?)?;
        let mut answer = match command {
            Command::Descriptors => {
                serde_json::to_string(&self.lines.iter().map(Line::of_container).collect::<Vec<_>>())?
            }
            Command::Status => serde_json::to_string(&self.status())?,
            _ => "{}".to_owned(),
        };
        answer.push('\n');
        stream.write_all(answer.as_bytes())?;
        match command {
            Command::Begin => self.lines.iter_mut().for_each(Line::begin),
            Command::Attach => self.attach(stream)?,
            Command::End => self.ended = true,
            Command::Forgotten => self.lines.iter_mut().for_each(Line::forgotten),
            Command::Descriptors | Command::Status => {}
        }
        Ok(())
    }

    fn status(&self) -> Status {
        let spilled = self.lines.iter().any(Line::is_spilled).then(|| self.plan.spill.clone());
        Status { linked: self.link.is_some(), waiting: self.lines.iter().map(Line::kept).sum(), spilled }
    }

    fn attach(&mut self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        self.lines.iter_mut().for_each(Line::unlink);
        let mut link = Link { stream, incoming: Vec::new(), outgoing: Vec::new() };
        for (at, line) in (0u8..).zip(&mut self.lines) {
            line.begin_link(at, &mut link.outgoing);
        }
        self.link = Some(link);
        Ok(())
    }

    fn unlink(&mut self, error: &io::Error) {
        if error.kind() != io::ErrorKind::UnexpectedEof {
            eprintln!("the link is lost: {error}");
        }
        (self.link, self.unlinked) = (None, Instant::now());
        self.lines.iter_mut().for_each(Line::unlink);
    }

    fn read_link(&mut self) -> io::Result<()> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let mut buffer = [0; 64 << 10];
        match link.stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => link.incoming.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let mut all = Vec::new();
        while let Some(frame) = frames::take(&mut link.incoming).map_err(io::Error::other)? {
            all.push(frame);
        }
        all.into_iter().try_for_each(|frame| self.take_in(frame))
    }

    fn take_in(&mut self, frame: Frame) -> io::Result<()> {
        if frame.kind == Kind::Done {
            self.lines.iter_mut().for_each(Line::other_is_done);
            return Ok(());
        }
        // Positions are counted, and never come near to the last number.
        if frame.position > u64::MAX / 2 {
            return Err(io::Error::other("a frame has a position that no stream reaches"));
        }
        let line = self.lines.get_mut(usize::from(frame.stream));
        let line = line.ok_or_else(|| io::Error::other("a frame names a stream that is not there"))?;
        line.take_in(frame)
    }

    fn write_lines(&mut self) {
        let may_write = self.after.is_none();
        self.lines.iter_mut().for_each(|line| line.pass_on(may_write));
    }

    /// Sends what is to be sent, until the link takes no more.
    fn send_frames(&mut self) {
        loop {
            self.fill_link();
            if self.link.as_ref().is_none_or(|link| link.outgoing.is_empty()) {
                return;
            }
            self.flush_link();
            if self.link.as_ref().is_some_and(|link| !link.outgoing.is_empty()) {
                return;
            }
        }
    }

    /// Puts what is to be sent into the link's buffer.
    fn fill_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        for (at, line) in (0u8..).zip(&mut self.lines) {
            line.fill(at, &mut link.outgoing, OUTGOING);
        }
    }

    fn flush_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        let mut failed = None;
        while !link.outgoing.is_empty() {
            match link.stream.write(&link.outgoing) {
                Ok(count) => drop(link.outgoing.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        failed.iter().for_each(|error| self.unlink(error));
    }
}

/// Waits until the holder with this directory answers, or its process has ended.
pub fn await_holder(directory: &Path, child: &mut Started, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match ask(directory, &Command::Status) {
            Ok(_) => return Ok(()),
            Err(_) if child.try_wait()?.is_none() && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use tranship_sys::process::take_descriptor;
    use tranship_types::StdioKind;

    use super::*;

    #[test]
    fn what_an_ended_container_has_left_goes_to_a_file_without_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let stream: StdioStream = serde_json::from_value(serde_json::json!({
            "kind": StdioKind::Pipe, "name": "pipe:[1]", "numbers": [1], "reads": false, "writes": true, "flags": 1,
        }))
        .unwrap();
        let plan = Plan {
            relay: "none".to_owned(),
            container: "talker".to_owned(),
            is_source: false,
            peer: "a".parse().unwrap(),
            streams: vec![Planned { stream, inputs: Vec::new(), output: None }],
            target: StdioTarget::Keep,
            spill: directory.path().join("spill").join("talker.log"),
            after: None,
        };
        let mut line = Line::open(&plan, &plan.streams[0]).unwrap();
        let mut container: std::fs::File = take_descriptor(std::process::id(), line.of_container()).unwrap().into();
        container.write_all(b"last words").unwrap();
        drop(container);
        line.begin();
        let (listener, spill) = (UnixListener::bind(socket(directory.path())).unwrap(), plan.spill.clone());
        let (unlinked, patience) = (Instant::now(), Duration::from_millis(50));
        let lines = vec![line];
        let mut holder = Holder { plan, lines, after: None, listener, link: None, unlinked, patience, ended: false };
        holder.serve().unwrap();
        assert!(unlinked.elapsed() >= patience);
        assert_eq!(std::fs::read(spill).unwrap(), b"last words");
    }
}
