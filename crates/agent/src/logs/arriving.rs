//! The log of a container, on the node that it comes to.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_coordinator::{self as coordinator, Failure};
use tranship_engine::{Engine, LogFiles};
use tranship_storage::carried;
use tranship_sys::clock::monotonic_ns;
use tranship_transport::{Connection, Link};
use tranship_types::{MigrationId, NodeName};
use tranship_wire::message::Offer;
use tranship_wire::{FrameHeader, ReadError};

use super::{Heard, Part, Said, gzip};
use crate::node::{Node, failed};
use crate::timeline::Timeline;

/// Most files of one log.
const FILES: usize = 1000;
/// Bytes of the filesystem that a log which grows during the move leaves to others.
const SPARE: u64 = 64 << 20;
/// How many bytes come until the room is looked at again.
const LOOK: u64 = 16 << 20;

#[derive(Default)]
struct State {
    /// The files of the copy's log, and who may send, until a link has come.
    awaited: Option<(LogFiles, NodeName)>,
    /// The restore depends on it.
    expected: bool,
    complete: Option<Result<(), Failure>>,
}

/// What comes of a log for one container.
#[derive(Default)]
pub struct Arriving {
    state: Mutex<State>,
    changed: Condvar,
}

impl Arriving {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the link come, if a log was offered, once the engine has opened that of the copy.
    pub fn open(&self, files: Option<LogFiles>, peer: &NodeName) {
        if let Some(files) = files {
            *self.state() = State { awaited: Some((files, peer.clone())), expected: true, complete: None };
        }
    }

    /// Nothing more is wanted.
    pub fn close(&self) {
        self.state().awaited = None;
        self.fail(&Failure::new("the migration was undone"));
    }

    /// Whoever waits shall not go on waiting.
    pub fn fail(&self, failure: &Failure) {
        self.complete(Err(failure.clone()));
    }

    fn complete(&self, result: Result<(), Failure>) {
        self.state().complete.get_or_insert(result);
        self.changed.notify_all();
    }

    /// Waits until all has come that the container had logged when it was frozen.
    pub fn wait(&self, timeout: Duration, timeline: &mut Timeline) -> Result<(), Failure> {
        let (start, deadline) = (monotonic_ns(), Instant::now() + timeout);
        let mut state = self.state();
        while state.expected && state.complete.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(format!("the end of the log did not arrive within {timeout:?}")));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match &state.complete {
            Some(complete) if state.expected => {
                timeline.note("log: its end", start, monotonic_ns());
                complete.clone()
            }
            _ => Ok(()),
        }
    }

    /// Takes in what the source sends until it ends.
    fn receive(&self, link: &mut Connection, here: &NodeName) -> Result<(), Failure> {
        let awaited = self.state().awaited.take_if(|(_, peer)| peer == link.peer());
        let Some((files, peer)) = awaited else {
            return Err(Failure::new(format!("node {} has no log to send, or has a link for it", link.peer())));
        };
        tracing::debug!(%peer, log = %files.current.display(), "a log comes");
        let mut files = Files::new(files);
        // The source listens when it has sent everything.
        let mut failure: Option<Failure> = None;
        let mut buffer = Vec::new();
        loop {
            let header = tranship_wire::read_header(link).map_err(failed)?;
            let said = match header {
                FrameHeader::Message { .. } => Some(tranship_wire::read_message_after(&header, link).map_err(failed)?),
                FrameHeader::FileData { length, .. } => {
                    buffer.resize(length as usize, 0);
                    link.read_exact(&mut buffer).map_err(|e| failed(ReadError::Io(e)))?;
                    None
                }
                other => return Err(Failure::new(format!("a frame of kind {} on the link for a log", other.kind()))),
            };
            let told = |failure: &Option<Failure>, otherwise| match failure {
                Some(failure) => Heard::Failed { message: failure.message.clone() },
                None => otherwise,
            };
            let (mut answer, mut ended) = (None, false);
            let done = match said {
                Some(Said::Begin { files: parts }) => files.begin(parts).map(|skipped| {
                    answer = Some(Heard::Begun { skipped });
                }),
                Some(Said::Sync) => {
                    answer = Some(told(&failure, Heard::Done));
                    Ok(())
                }
                Some(Said::Complete) => {
                    let named = failure.clone().map_or_else(|| files.name(), Err);
                    self.complete(named.clone());
                    named
                }
                Some(Said::End) => {
                    (answer, ended) = (Some(told(&failure, Heard::Done)), true);
                    Ok(())
                }
                _ if failure.is_some() => Ok(()),
                Some(Said::Next) => files.next(),
                None => files.append(&buffer),
            };
            if let Err(error) = done {
                let error = Failure::new(format!("the log cannot be taken in on node {here}: {error}"));
                answer = answer.or_else(|| files.is_empty().then(|| told(&Some(error.clone()), Heard::Done)));
                failure.get_or_insert(error);
            }
            if let Some(answer) = answer {
                tranship_wire::write_message(link, &answer).map_err(failed)?;
            }
            if ended {
                return failure.map_or(Ok(()), Err);
            }
        }
    }
}

/// The files of the copy's log, once the engine has made the copy; `None` if none was offered.
pub fn place(engine: &dyn Engine, offer: &Offer) -> Result<Option<LogFiles>, Failure> {
    let Some(log) = &offer.log else { return Ok(None) };
    let files = engine.log(&offer.container).map_err(failed)?.filter(|files| files.driver == log.driver);
    files.map(Some).ok_or_else(|| {
        let (container, driver) = (&offer.container, &log.driver);
        Failure::new(format!(
            "{} has given container {container} another log than one of the driver {driver}; leave its log behind (--logs none)",
            engine.name()
        ))
    })
}

/// Takes in the log of an arriving container.
pub fn receive(node: &Arc<Node>, id: &MigrationId, link: &mut Connection, patience: Duration) {
    let Some(inbox) = node.arrivals.inbox(id) else { return };
    let received = link
        .set_timeout(Some(patience))
        .map_err(failed)
        .and_then(|()| coordinator::caught("the receipt of a log", || inbox.log.receive(link, &node.config.node)));
    if let Err(failure) = received {
        tracing::warn!(%id, %failure, "a log did not arrive, or not its end");
        inbox.log.fail(&failure);
    }
}

/// Where one file that comes is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Which rotated file; 0 for the file that the engine writes to.
    number: usize,
    /// Whether that is one of gzip.
    compressed: bool,
    /// Whether what comes is to be put into gzip.
    packed: bool,
}

/// Where the files of a log go whose engine reads `files`, and how many of the oldest have no place.
///
/// Rotated files are one older than on the source, since the copy has a new current one. Where that would be one too
/// many, the newest two become one if they are no larger than a file may be; else the oldest ends, as by a rotation.
fn places(parts: &[Part], files: &LogFiles) -> (usize, Vec<Place>) {
    let slots = files.most.saturating_sub(1);
    if slots == 0 {
        return (0, vec![Place { number: 0, compressed: false, packed: false }; parts.len()]);
    }
    let fits = |bytes: u64| files.max_bytes.is_none_or(|most| bytes <= most);
    let is_joined = match parts {
        [.., before, last] if parts.len() > slots && !files.compressed && !before.compressed => {
            fits(before.bytes + last.bytes)
        }
        _ => false,
    };
    let number = |at: usize| (parts.len() - at - usize::from(is_joined)).max(1);
    let place = |(at, part): (usize, &Part)| Place {
        number: number(at),
        compressed: part.compressed || files.compressed,
        packed: files.compressed && !part.compressed,
    };
    let all: Vec<Place> = parts.iter().enumerate().map(place).collect();
    let skipped = all.iter().filter(|place| place.number > slots).count();
    (skipped, all[skipped..].to_vec())
}

/// The files that come.
struct Files {
    log: LogFiles,
    parts: Vec<Part>,
    places: Vec<Place>,
    /// Which of these comes now, and how many bytes of it have come.
    at: usize,
    bytes: u64,
    /// What it is written to, once something has come.
    to: Option<File>,
    /// Names that files have until all of them have come, and those that they will have.
    staged: BTreeMap<PathBuf, PathBuf>,
    named: bool,
    /// Bytes that may come until the room is looked at.
    room: u64,
}

impl Files {
    fn new(log: LogFiles) -> Self {
        let (parts, places, staged) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { log, parts, places, at: 0, bytes: 0, to: None, staged, named: false, room: 0 }
    }

    fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns how many of the oldest files are not to come.
    fn begin(&mut self, mut parts: Vec<Part>) -> Result<usize, Failure> {
        let compressed = parts.last().is_none_or(|last| last.compressed);
        if !self.is_empty() || parts.len() > FILES || compressed {
            return Err(Failure::new(format!("a log of {} files is not believable", parts.len())));
        }
        if self.log.most < 2 && parts.iter().any(|part| part.compressed) {
            return Err(Failure::new("its engine reads no compressed files"));
        }
        let (skipped, places) = places(&parts, &self.log);
        (self.parts, self.places) = (parts.split_off(skipped), places);
        Ok(skipped)
    }

    fn is_last(&self) -> bool {
        self.at + 1 == self.parts.len()
    }

    fn next(&mut self) -> Result<(), Failure> {
        if self.is_empty() || self.is_last() {
            return Err(Failure::new("more files come than were announced"));
        }
        (self.at, self.bytes, self.to) = (self.at + 1, 0, None);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(part) = self.parts.get(self.at) else { return Err(Failure::new("content of no file")) };
        self.bytes += bytes.len() as u64;
        if !self.is_last() && self.bytes > part.bytes {
            return Err(Failure::new("a file is longer than was announced"));
        }
        self.look_for_room(bytes.len() as u64)?;
        let place = self.places[self.at];
        if self.to.is_none() {
            self.to = Some(self.open(place).map_err(|error| self.unwritten(&error))?);
        }
        let Some(to) = &mut self.to else { return Ok(()) };
        let written = if place.packed { gzip::append(to, bytes) } else { to.write_all(bytes) };
        written.map_err(|error| self.unwritten(&error))
    }

    fn look_for_room(&mut self, bytes: u64) -> Result<(), Failure> {
        if self.room < bytes {
            let found = carried::room(self.log.directory()).map_err(failed)?;
            let directory = self.log.directory().display();
            if found.bytes < SPARE + LOOK {
                let have = found.bytes >> 20;
                return Err(Failure::new(format!(
                    "the filesystem of {directory} has only {have} MiB left; free some there, or leave the log behind (--logs none)"
                )));
            }
            self.room = LOOK;
        }
        self.room = self.room.saturating_sub(bytes);
        Ok(())
    }

    /// Opens what a file is written to: in the directory that the engine has made for this container's log alone.
    fn open(&mut self, place: Place) -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        options.append(true).custom_flags(nix::libc::O_NOFOLLOW);
        if place.number == 0 {
            return options.open(&self.log.current);
        }
        let path = self.log.rotated(place.number, place.compressed);
        if self.named {
            return readable(options.create(true).open(path)?);
        }
        let mut staged = path.clone().into_os_string();
        staged.push(".tranship");
        let staged = PathBuf::from(staged);
        let is_new = self.staged.insert(staged.clone(), path).is_none();
        readable(options.create_new(is_new).open(staged)?)
    }

    /// Gives the files their names: all has come that was logged until the freeze.
    fn name(&mut self) -> Result<(), Failure> {
        if self.is_empty() || !self.is_last() {
            return Err(Failure::new("files that were announced did not come"));
        }
        for (staged, path) in std::mem::take(&mut self.staged) {
            std::fs::rename(staged, path).map_err(|error| self.unwritten(&error))?;
        }
        self.named = true;
        Ok(())
    }

    fn unwritten(&self, error: &std::io::Error) -> Failure {
        Failure::new(format!("{} cannot be written: {error}", self.log.directory().display()))
    }
}

/// Gives a file the mode that engines give to logs, whatever the umask is.
fn readable(file: File) -> std::io::Result<File> {
    file.set_permissions(Permissions::from_mode(0o640))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(most: usize, max_bytes: Option<u64>, compressed: bool) -> LogFiles {
        LogFiles { driver: "json-file".into(), current: "/none/log".into(), most, max_bytes, compressed }
    }

    fn plain(sizes: &[u64]) -> Vec<Part> {
        sizes.iter().map(|&bytes| Part { bytes, compressed: false }).collect()
    }

    fn numbers(parts: &[Part], log: &LogFiles) -> (usize, Vec<usize>) {
        let (skipped, places) = places(parts, log);
        (skipped, places.iter().map(|place| place.number).collect())
    }

    #[test]
    fn files_become_one_older() {
        assert_eq!(numbers(&plain(&[5]), &log(2, None, false)), (0, vec![1]));
        assert_eq!(numbers(&plain(&[5, 5]), &log(5, Some(5), false)), (0, vec![2, 1]));
        // Podman reads no rotated files.
        assert_eq!(numbers(&plain(&[5]), &log(1, None, false)), (0, vec![0]));
    }

    #[test]
    fn one_file_too_many_is_joined_if_it_fits_and_else_ends() {
        assert_eq!(numbers(&plain(&[9, 5]), &log(2, None, false)), (0, vec![1, 1]));
        assert_eq!(numbers(&plain(&[9, 9, 1]), &log(3, Some(10), false)), (0, vec![2, 1, 1]));
        assert_eq!(numbers(&plain(&[9, 9, 5]), &log(3, Some(10), false)), (1, vec![2, 1]));
        let compressed: Vec<Part> = [true, false].map(|compressed| Part { bytes: 1, compressed }).into();
        let (skipped, places) = places(&compressed, &log(2, Some(10), true));
        assert_eq!((skipped, places), (1, vec![Place { number: 1, compressed: true, packed: true }]));
    }

    #[test]
    fn files_are_named_when_all_have_come_and_what_comes_late_follows() {
        let directory = std::env::temp_dir().join(format!("tranship-arriving-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let log = LogFiles { current: directory.join("log"), ..log(3, None, false) };
        let read = |number| std::fs::read_to_string(log.rotated(number, false)).ok();
        let mut files = Files::new(log.clone());
        assert!(files.append(b"x").is_err() && files.name().is_err());
        assert_eq!(files.begin(plain(&[2, 2])).unwrap(), 0);
        assert!(files.begin(plain(&[2])).is_err());
        files.append(b"1 ").unwrap();
        assert!(files.name().is_err());
        files.next().unwrap();
        files.append(b"2 ").unwrap();
        files.append(b"3 ").unwrap();
        assert!(files.next().is_err());
        assert_eq!((read(1), read(2)), (None, None));
        files.name().unwrap();
        files.append(b"4").unwrap();
        assert_eq!((read(1).as_deref(), read(2).as_deref()), (Some("2 3 4"), Some("1 ")));
        assert_eq!(log.rotated(1, false).metadata().unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn no_more_comes_than_was_announced() {
        let mut files = Files::new(log(3, None, false));
        files.begin(plain(&[2, 2])).unwrap();
        assert!(files.append(b"123").is_err());
        assert!(Files::new(log(3, None, false)).begin(Vec::new()).is_err());
        assert!(Files::new(log(3, None, false)).begin(plain(&[0; FILES + 1])).is_err());
    }
}
