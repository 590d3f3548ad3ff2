//! One stream of a holder: its ends, and its directions.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};
use tranship_sys::process::take_descriptor;
use tranship_types::{StdioKind, StdioTarget};

use super::end::End;
use super::flow::{READ, Receiving, Sending};
use super::frames::{self, Frame, Kind};
use super::holder::{Plan, Planned};

/// How long a runtime in the foreground may take to write what it has read, how long it may pause,
/// and how much that may be.
const PATIENCE: Duration = Duration::from_secs(1);
const QUIET: u8 = 50;
const READ_AHEAD: usize = 1 << 20;

/// Where the bytes that are read come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// From the container: this is the destination.
    Container,
    /// From the source's node.
    Node,
}

/// Where output goes that is not sent to the other node.
#[derive(Debug)]
enum Sink {
    Nowhere,
    End(End),
    /// The journal, which is connected when there is something to write.
    Journal {
        identifier: String,
        is_error: bool,
        end: Option<End>,
    },
}

/// A stream. A terminal or socket has one open file for both directions.
#[derive(Debug)]
pub struct Line {
    source: Source,
    is_both: bool,
    /// A terminal of the holder's, whose line ends are those of a terminal.
    returns: Option<Returns>,
    /// What the container is to get.
    of_container: Option<OwnedFd>,
    inputs: Vec<End>,
    output: Option<End>,
    sending: Option<Sending>,
    receiving: Option<Receiving>,
    sink: Option<Sink>,
    is_spilled: bool,
    /// That the other side does not take any more was, or need not be, said on this link.
    closed_told: bool,
    /// The position of an end that is to be told to the other side, which gets nothing.
    end_due: Option<u64>,
}

impl Line {
    /// Opens the ends: what the source's processes have, or new ones.
    pub fn open(plan: &Plan, planned: &Planned) -> io::Result<Self> {
        let mut line = Self {
            source: if plan.is_source { Source::Node } else { Source::Container },
            is_both: matches!(planned.stream.kind, StdioKind::Terminal | StdioKind::Socket),
            returns: None,
            of_container: None,
            inputs: Vec::new(),
            output: None,
            sending: None,
            receiving: None,
            sink: None,
            is_spilled: false,
            closed_told: false,
            end_due: None,
        };
        match line.source {
            Source::Node => line.take(planned)?,
            Source::Container => {
                line.make(planned)?;
                line.aim(plan, planned)?;
            }
        }
        Ok(line)
    }

    fn take(&mut self, planned: &Planned) -> io::Result<()> {
        // The next one is taken from the end.
        for (at, (pid, number)) in planned.inputs.iter().enumerate().rev() {
            let taken = take_descriptor(*pid, *number).and_then(End::reading);
            match if at == 0 { taken } else { taken.and_then(End::rest) } {
                Ok(end) => self.inputs.push(end),
                // Closed by its process, or that has ended: there is nothing to read.
                Err(error) => eprintln!("descriptor {number} of process {pid} is not read: {error}"),
            }
        }
        if !planned.inputs.is_empty() {
            let sending = self.sending.insert(Sending::default());
            if self.inputs.is_empty() {
                sending.end();
            }
        }
        self.empty_runtime();
        if planned.stream.writes {
            self.receiving = Some(Receiving::default());
            let taken = planned.output.map(|(pid, number)| take_descriptor(pid, number).and_then(End::writing));
            match taken {
                Some(Ok(end)) => self.output = Some(end),
                // A pipe that nobody reads any more.
                Some(Err(_)) | None => self.close_output(),
            }
        }
        Ok(())
    }

    /// Reads what a runtime in the foreground has read of its own input, and has yet to write into
    /// the container's pipe: that is lost when it ends.
    fn empty_runtime(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.inputs.len() > 1 && self.kept() < READ_AHEAD && Instant::now() < deadline {
            let Some(input) = self.input() else { return };
            let mut asked = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
            if !poll(&mut asked, QUIET).is_ok_and(|ready| ready > 0) {
                return;
            }
            self.read();
        }
    }

    fn make(&mut self, planned: &Planned) -> io::Result<()> {
        if self.is_both {
            let (ours, theirs) = pair(planned)?;
            self.inputs.push(End::own(ours.try_clone()?)?);
            self.output = Some(End::own(ours)?);
            (self.sending, self.receiving) = (Some(Sending::default()), Some(Receiving::default()));
            self.of_container = Some(theirs);
            self.returns = (planned.stream.kind == StdioKind::Terminal).then(Returns::default);
            return Ok(());
        }
        let (reading, writing) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        super::own(&reading, &planned.stream)?;
        if planned.stream.reads {
            self.of_container = Some(reading);
            self.receiving = Some(Receiving::default());
            self.output = Some(End::own(writing)?);
        } else {
            self.of_container = Some(writing);
            self.sending = Some(Sending::default());
            self.inputs.push(End::own(reading)?);
        }
        Ok(())
    }

    /// Output that stays on this node; input is at its end then.
    fn aim(&mut self, plan: &Plan, planned: &Planned) -> io::Result<()> {
        let is_error = planned.stream.numbers == [2];
        self.sink = match &plan.target {
            StdioTarget::Keep => return Ok(()),
            StdioTarget::Null => Some(Sink::Nowhere),
            StdioTarget::File(path) => Some(Sink::End(End::appending(path)?)),
            StdioTarget::Journal => {
                let end = Some(End::journal(&plan.container, is_error)?);
                Some(Sink::Journal { identifier: plan.container.clone(), is_error, end })
            }
        };
        self.receiving.iter_mut().for_each(Receiving::end_here);
        Ok(())
    }

    pub fn source(&self) -> Source {
        self.source
    }

    /// The number of what the container is to get; `-1` where it has that already.
    pub fn of_container(&self) -> i32 {
        self.of_container.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// The container has its ends.
    pub fn begin(&mut self) {
        self.of_container = None;
    }

    pub fn input(&self) -> Option<&End> {
        self.inputs.last().filter(|_| self.sending.as_ref().is_some_and(|sending| !sending.has_ended()))
    }

    /// Where the container's input, or the reader's output, is written; not where that is closed.
    pub fn output(&self) -> Option<&End> {
        self.output.as_ref()
    }

    pub fn is_waiting(&self) -> bool {
        self.receiving.as_ref().is_some_and(Receiving::is_waiting)
    }

    pub fn kept(&self) -> usize {
        self.sending.as_ref().map_or(0, Sending::len)
    }

    pub fn is_linked(&self) -> bool {
        self.sending.as_ref().is_some_and(Sending::is_linked)
    }

    pub fn is_spilled(&self) -> bool {
        self.is_spilled
    }

    /// Whether something is to be tried again that no descriptor tells of.
    pub fn looks_again(&self) -> bool {
        self.sink.is_some() && self.kept() > 0
    }

    /// Whether nothing more is read here.
    pub fn reads_no_more(&self) -> bool {
        self.sending.as_ref().is_none_or(Sending::has_ended)
    }

    /// Whether everything was read, and the other side has yet to take it or its end.
    pub fn is_left(&self) -> bool {
        self.sink.is_none() && self.sending.as_ref().is_some_and(|sending| sending.has_ended() && !sending.is_done())
    }

    pub fn is_done(&self) -> bool {
        let sent = self.sending.as_ref().is_none_or(Sending::is_done);
        sent && self.receiving.as_ref().is_none_or(|one| one.is_closed() || one.has_ended())
    }

    pub fn read(&mut self) {
        let Some(sending) = &mut self.sending else { return };
        let mut buffer = [0; READ];
        match self.inputs.last_mut().map(|input| input.read(&mut buffer)) {
            Some(Ok(count)) if count > 0 => match &mut self.returns {
                Some(returns) => sending.push(&returns.remove(&buffer[..count])),
                None => sending.push(&buffer[..count]),
            },
            Some(Err(error)) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            // EIO is the end of a terminal.
            _ => self.end_input(),
        }
    }

    fn end_input(&mut self) {
        self.inputs.pop();
        if self.inputs.is_empty()
            && let Some(sending) = &mut self.sending
        {
            sending.end();
        }
        if self.is_both && self.source == Source::Container {
            self.close_output();
        }
    }

    pub fn close_output(&mut self) {
        self.output = None;
        if let Some(receiving) = &mut self.receiving {
            receiving.close();
        }
    }

    /// Output goes to a file from now on, what waits first.
    pub fn put_into(&mut self, path: &Path) -> io::Result<()> {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        self.sink = Some(Sink::End(End::appending(path)?));
        self.is_spilled = true;
        Ok(())
    }

    /// The other node has forgotten the relay: the container has ended there.
    pub fn forgotten(&mut self) {
        if let Some(sending) = &mut self.sending {
            sending.close();
        }
        self.inputs.clear();
        self.close_output();
    }

    /// Nothing follows from the other side.
    pub fn other_is_done(&mut self) {
        if let Some(sending) = &mut self.sending {
            sending.close();
        }
        self.inputs.clear();
        self.receiving.iter_mut().for_each(Receiving::end_here);
    }

    pub fn unlink(&mut self) {
        self.sending.iter_mut().for_each(Sending::unlink);
    }

    /// Says where this end is, when a link begins.
    pub fn begin_link(&mut self, at: u8, to: &mut Vec<u8>) {
        self.closed_told = false;
        if let Some(receiving) = &mut self.receiving {
            frames::put(to, Kind::State, at, receiving.link(), &[]);
        }
    }

    pub fn take_in(&mut self, frame: Frame) -> io::Result<()> {
        let Frame { kind, position, bytes, .. } = frame;
        match (kind, &mut self.sending, &mut self.receiving) {
            (Kind::State, Some(sending), _) if self.sink.is_none() => sending.resume(position),
            (Kind::Ack, Some(sending), _) if self.sink.is_none() => sending.acknowledge(position),
            (Kind::Closed, Some(sending), _) if self.sink.is_none() => {
                sending.close();
                self.inputs.clear();
            }
            (Kind::Data, _, Some(receiving)) => receiving.receive(position, &bytes).map_err(io::Error::other)?,
            (Kind::End, _, Some(receiving)) => receiving.end_at(position).map_err(io::Error::other)?,
            // The reader is not to wait for what goes elsewhere.
            (Kind::State, Some(_), _) => self.end_due = Some(position),
            // Of a direction that this end has not got, or that goes elsewhere by now.
            _ => {}
        }
        Ok(())
    }

    /// Writes what can be written.
    pub fn pass_on(&mut self, may_write: bool) {
        self.write_output(may_write);
        self.write_sink();
    }

    fn write_output(&mut self, may_write: bool) {
        let Some(receiving) = self.receiving.as_mut().filter(|_| may_write) else { return };
        while let Some(output) = self.output.as_mut().filter(|_| receiving.is_waiting()) {
            match output.write(receiving.first()) {
                Ok(count) => receiving.written(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.output = None;
                    receiving.close();
                }
            }
        }
        if receiving.has_ended() {
            self.finish();
        }
    }

    /// Everything was written, up to the end.
    fn finish(&mut self) {
        let Some(output) = self.output.take() else { return };
        // The container has closed its socket, which was one for both directions. The other end
        // sees that when no process has the node's socket any more.
        if matches!(output, End::Shared(_)) {
            self.inputs.clear();
            self.sending.iter_mut().for_each(Sending::close);
        }
        output.finish();
    }

    fn write_sink(&mut self) {
        let (Some(sink), Some(sending)) = (&mut self.sink, &mut self.sending) else { return };
        loop {
            let bytes = sending.first();
            let written = match (bytes.is_empty(), &mut *sink) {
                (true, _) => break,
                (_, Sink::Nowhere) => Ok(bytes.len()),
                (_, Sink::End(end) | Sink::Journal { end: Some(end), .. }) => end.write(bytes),
                (_, Sink::Journal { identifier, is_error, end }) => match End::journal(identifier, *is_error) {
                    Ok(again) => {
                        *end = Some(again);
                        continue;
                    }
                    Err(_) => break,
                },
            };
            match (written, &mut *sink) {
                (Ok(count), _) => sending.passed(count),
                (Err(error), Sink::Journal { end, .. }) if error.kind() != io::ErrorKind::WouldBlock => *end = None,
                (Err(_), _) => break,
            }
        }
        if sending.has_ended() {
            sending.passed(0);
        }
    }

    /// Puts frames into a link's buffer, as long as it has fewer than so many bytes.
    pub fn fill(&mut self, at: u8, to: &mut Vec<u8>, most: usize) {
        // Nor does an other end that sends and does not read make it longer.
        if to.len() >= most {
            return;
        }
        if let Some(receiving) = &mut self.receiving {
            if let Some(position) = receiving.acknowledgement() {
                frames::put(to, Kind::Ack, at, position, &[]);
            }
            if receiving.is_closed() && !std::mem::replace(&mut self.closed_told, true) {
                frames::put(to, Kind::Closed, at, 0, &[]);
            }
        }
        if let Some(position) = self.end_due.take() {
            frames::put(to, Kind::End, at, position, &[]);
        }
        let Some(sending) = self.sending.as_mut().filter(|_| self.sink.is_none()) else { return };
        while let Some((position, piece)) = (to.len() < most).then(|| sending.next()).flatten() {
            frames::put(to, Kind::Data, at, position, &piece);
        }
        if let Some(position) = sending.next_end() {
            frames::put(to, Kind::End, at, position, &[]);
        }
    }
}

/// What a terminal adds to the output of programs (`ONLCR` of termios(3)) is taken out again: the
/// terminal that the output goes to adds it itself. A program that has turned that off writes its
/// own, of which the last one before a new line is lost.
#[derive(Debug, Default)]
struct Returns {
    /// The last byte was a return.
    pending: bool,
}

impl Returns {
    fn remove(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut kept = Vec::with_capacity(bytes.len() + 1);
        for byte in bytes {
            if std::mem::take(&mut self.pending) && *byte != b'\n' {
                kept.push(b'\r');
            }
            match byte {
                b'\r' => self.pending = true,
                other => kept.push(*other),
            }
        }
        kept
    }
}

/// Two ends of a new socket pair or terminal.
fn pair(planned: &Planned) -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    if planned.stream.kind == StdioKind::Socket {
        return Ok(socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?);
    }
    let size = planned.stream.window.unwrap_or((24, 80));
    let size = nix::pty::Winsize { ws_row: size.0, ws_col: size.1, ws_xpixel: 0, ws_ypixel: 0 };
    let pair = nix::pty::openpty(Some(&size), None)?;
    super::own(&pair.slave, &planned.stream)?;
    Ok((pair.master, pair.slave))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_adds_is_taken_out_also_across_pieces() {
        let mut returns = Returns::default();
        let pieces = ["one\r\ntwo\r", "\n50%\r", "60%\r\r\n"];
        let kept: Vec<u8> = pieces.iter().flat_map(|piece| returns.remove(piece.as_bytes())).collect();
        assert_eq!(kept, b"one\ntwo\n50%\r60%\r\n");
    }
}
