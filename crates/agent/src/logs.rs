//! The log of a container (`docker logs`), which moves with it on a link of its own.
//!
//! ```text
//!  source                                        destination
//!        ── Begin: sizes, oldest file first ───▶ Arriving::receive, into files beside the log of the copy,
//!        ◀──────────────────── Begun: skipped ── which its engine has started; the oldest may have no place
//!  pass ═══ files; from then on what is added ═▶
//!        ── Sync ──────────────────────────────▶
//!        ◀─────────────────────────────── Done ── or Failed, with the reason
//!  ── freeze ──
//!  finish ══ the rest ═════════════ Complete ══▶ the files get their names; then the restore begins
//!  ── the destination runs, the original is killed ──
//!  end ═════ what the engine wrote late ══ End ═▶
//!        ◀─────────────────────────────── Done ──
//! ```
//!
//! The copy's engine writes to a file of its own meanwhile, of which it knows what it has written. So what comes from
//! the source is the newest of the rotated files, unless the engine reads none (Podman): then it is put at the
//! beginning of the engine's file, which is empty until the resume.

mod arriving;
mod gzip;
mod original;

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_engine::{Container, Engine};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::schedule::{self, Standing};
use tranship_transport::{Connection, Link};
use tranship_types::{EngineName, Logs, MigrationId, MoveOptions, NodeName};
use tranship_wire::message::CarriedLog;
use tranship_wire::{MAX_FILE_DATA, Purpose};

pub use self::arriving::{Arriving, place, receive};
use self::original::Original;
use crate::copying::{Left, SYNC};
use crate::node::{Node, failed};

/// How long the engine may have written nothing until its log is complete: by then it has read the pipes of a
/// How long an engine may go on writing in the freeze: a process outside of the container may have its output.
const IN_FREEZE: Duration = Duration::from_millis(200);
/// container that is frozen.
const QUIET: Duration = Duration::from_millis(10);
/// How long the engine may take to write the last line of a container that was killed.
const LAST_LINE: Duration = Duration::from_secs(2);
/// How long the end of the log may take once the container runs on the destination.
const END: Duration = Duration::from_secs(5);

/// One file of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    /// Its size. The last one grows.
    bytes: u64,
    /// Whether it is compressed (gzip).
    compressed: bool,
}

/// What a source sends, besides the content of files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    /// The files, the oldest first.
    Begin { files: Vec<Part> },
    /// The content of the next file follows.
    Next,
    /// Answer when everything so far is written.
    Sync,
    /// All has come that the container had logged when it was frozen.
    Complete,
    /// Nothing more comes; answer when everything is written.
    End,
}

/// What a destination answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Heard {
    /// To `Begin`: so many of the oldest files are not to be sent.
    Begun {
        skipped: usize,
    },
    Done,
    Failed {
        message: String,
    },
}

/// Whether a container's log moves with it.
#[derive(Default)]
pub struct Choice {
    pub log: Option<CarriedLog>,
    /// What there is to say about it.
    pub words: Option<String>,
}

/// Decides it, and has the parameters of the copy fit.
pub fn choose(
    engine: &dyn Engine,
    container: &Container,
    (to, parameters): (EngineName, &mut serde_json::Value),
    options: &MoveOptions,
) -> Result<Choice, Failure> {
    let kept = options.logs == Logs::Keep && to == engine.name();
    let files = if kept { engine.log(&container.name).map_err(failed)? } else { None };
    let Some(files) = files.filter(original::is_there) else {
        return Ok(Choice { log: None, words: engine.log_left(container) });
    };
    engine.show_rotated_log(parameters);
    Ok(Choice { log: Some(CarriedLog { bytes: files.bytes(), driver: files.driver }), words: None })
}

/// The log of a container, on the node that it leaves.
pub struct Leaving {
    link: Connection,
    original: Original,
    /// Bytes that were sent ahead of the freeze.
    ahead: u64,
}

impl Leaving {
    /// Opens the log and the link.
    pub fn begin(
        (node, peer): (&Node, &NodeName),
        id: &MigrationId,
        engine: &dyn Engine,
        name: &str,
    ) -> Result<Self, Failure> {
        let files = engine.log(name).map_err(failed)?;
        let files = files.ok_or_else(|| Failure::new(format!("container {name} has no log any more; try again")))?;
        let original = Original::open(files).map_err(|error| unread(name, &error))?;
        let mut link = node.dial(peer, Purpose::Log, Some(id))?;
        link.set_timeout(Some(SYNC)).map_err(failed)?;
        let mut leaving = Self { link, original, ahead: 0 };
        let begin = Said::Begin { files: leaving.original.parts().map_err(|error| unread(name, &error))? };
        match leaving.ask(&begin)? {
            Heard::Begun { skipped } => leaving.original.skip(skipped),
            Heard::Failed { message } => return Err(Failure::new(message)),
            Heard::Done => {
                return Err(Failure::new(format!("node {peer} gave an answer about a log that does not fit")));
            }
        }
        Ok(leaving)
    }

    /// Bounds what the link takes, in bytes a second.
    pub fn set_pace(&mut self, pace: Option<u64>) -> Result<(), Failure> {
        self.link.set_pace(pace).map_err(failed)
    }

    fn ask(&mut self, said: &Said) -> Result<Heard, Failure> {
        tranship_wire::write_message(&mut self.link, said).map_err(failed)?;
        tranship_wire::read_message(&mut self.link).map_err(failed)
    }

    /// Sends what the destination does not have yet. Returns how many bytes that was.
    pub fn pass(&mut self) -> Result<u64, Failure> {
        let sent = self.send();
        // If the link broke, the destination has the cause.
        match (self.ask(&Said::Sync), sent) {
            (Ok(Heard::Failed { message }), _) => Err(Failure::new(message)),
            (_, Err(error)) => Err(failed(format!("the log could not be sent: {error}"))),
            (Err(failure), _) => Err(failure),
            (Ok(_), Ok(sent)) => {
                self.ahead += sent;
                Ok(sent)
            }
        }
    }

    fn send(&mut self) -> io::Result<u64> {
        self.original.send(&mut Sending { link: &mut self.link, at: 0 })
    }

    /// Sends until the engine has written nothing for a while, or for so long. Returns how many bytes that was.
    fn send_until_quiet(&mut self, patience: Duration) -> io::Result<u64> {
        let (mut sent, mut quiet, deadline) = (0, Instant::now(), Instant::now() + patience);
        loop {
            match self.send()? {
                0 if quiet.elapsed() >= QUIET => return Ok(sent),
                _ if Instant::now() >= deadline => return Ok(sent),
                0 => {}
                more => {
                    sent += more;
                    quiet = Instant::now();
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends the rest of what the frozen container had logged.
    pub fn finish(&mut self) -> Result<Left, Failure> {
        let start_ns = monotonic_ns();
        schedule::stand(Standing::Favoured);
        let sent =
            self.send_until_quiet(IN_FREEZE).map_err(|error| failed(format!("the log could not be sent: {error}")))?;
        tranship_wire::write_message(&mut self.link, &Said::Complete).map_err(failed)?;
        let mut way = format!("logs: {} bytes ahead of the freeze, {sent} bytes in it", self.ahead);
        let skipped = self.original.skipped_bytes();
        if skipped > 0 {
            way += &format!("; the oldest rotated files, {skipped} bytes, end with the move, as by a rotation");
        }
        if self.original.missed() {
            way += "; it was rotated so fast that some of it was removed unread, or is not known to have been read";
        }
        Ok(Left { start_ns, end_ns: monotonic_ns(), wire_bytes: 0, way })
    }

    /// Sends what the engine wrote since, once the original has been killed. Returns what the link took, and what
    /// there is to say.
    pub fn end(mut self, peer: &NodeName, engine: &dyn Engine, name: &str) -> (u64, Option<String>) {
        let deadline = Instant::now() + LAST_LINE;
        while matches!(engine.log_has_ended(name), Ok(false)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = self.link.set_timeout(Some(END)).and_then(|()| self.send_until_quiet(END));
        let words = match (ended, self.ask(&Said::End)) {
            (Ok(0), _) => None,
            (Ok(late), Ok(Heard::Done)) => {
                Some(format!("logs: {late} bytes that were written after the freeze followed"))
            }
            (Ok(late), _) => {
                Some(format!("logs: {late} bytes that were written after the freeze did not reach node {peer}"))
            }
            (Err(error), _) => {
                Some(format!("logs: what was written after the freeze did not reach node {peer}: {error}"))
            }
        };
        (self.link.bytes_sent(), words)
    }
}

/// The link, as where the content of a log goes.
struct Sending<'a> {
    link: &'a mut Connection,
    /// Bytes since the last message.
    at: u64,
}

impl Sending<'_> {
    fn next(&mut self) -> io::Result<()> {
        tranship_wire::queue_message(self.link, &Said::Next).map_err(io::Error::other)
    }
}

impl Write for Sending<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(MAX_FILE_DATA as usize)];
        tranship_wire::write_file_data(self.link, self.at, piece).map_err(io::Error::other)?;
        self.at += piece.len() as u64;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.flush()
    }
}

fn unread(name: &str, error: &io::Error) -> Failure {
    Failure::new(format!("the log of container {name} cannot be read: {error}"))
}

/// Reads as much as there is, up to the length of the buffer.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}
