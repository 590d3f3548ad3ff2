//! How the content of trees travels, on a link of its own: of tmpfs mounts (`tmpfs`), and of directory trees on disk (`trees`).
//!
//! ```text
//!  source                                     destination
//!        ── link ───────────────────────────▶ Arriving::receive     into trees that Arriving::open was given
//!  pass ══════ operations, content ═════════▶
//!        ── Sync ───────────────────────────▶
//!        ◀─────────────────────── Done ─────  or Failed, with the reason
//!  ── freeze ──
//!  finish ════ the rest ════ Digests?, End ═▶ Arriving::wait, and the restore begins
//! ```

use std::io::{self, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_storage::carried::{self, Digests};
use tranship_storage::copy::{CopyError, Moved, Op, Replica, Sink};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::promise::Promise;
use tranship_transport::{Connection, Link};
use tranship_types::NodeName;
use tranship_wire::{FrameHeader, ReadError};

use crate::node::failed;
use crate::timeline::Timeline;

/// How long the destination may take for what a pass has sent.
pub const SYNC: Duration = Duration::from_secs(60);

/// What a source says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    Op(Op),
    /// Say when everything so far is done.
    Sync,
    /// What tree number `index` must be equal to by now.
    Digests {
        index: usize,
        digests: Digests,
    },
    /// Everything was said.
    End,
}

/// What a destination says to `Sync`.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Heard {
    Done,
    Failed { message: String },
}

/// The link as a sink.
pub struct Sending<'a>(pub &'a mut Connection);

impl Sink for Sending<'_> {
    fn op(&mut self, op: &Op) -> io::Result<()> {
        tranship_wire::queue_message(self.0, &Said::Op(op.clone())).map_err(io::Error::other)
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        tranship_wire::write_file_data(self.0, offset, bytes).map_err(io::Error::other)
    }
}

/// What the end of it was.
pub struct Left {
    /// When the last pass began and ended, ns.
    pub start_ns: u64,
    pub end_ns: u64,
    pub wire_bytes: u64,
    /// For the report.
    pub way: String,
}

/// One pass that the destination has dealt with when it returns.
pub fn synced(
    link: &mut Connection,
    pass: impl FnOnce(&mut Sending<'_>) -> Result<Moved, CopyError>,
) -> Result<Moved, String> {
    let sent = pass(&mut Sending(link));
    let said = tranship_wire::write_message(link, &Said::Sync).map_err(|e| e.to_string());
    // If it broke, the destination's own words are the better ones.
    match (tranship_wire::read_message(link), sent, said) {
        (Ok(Heard::Done), Ok(moved), Ok(())) => Ok(moved),
        (Ok(Heard::Failed { message }), ..) => Err(message),
        (_, Err(e), _) => Err(e.to_string()),
        (_, _, Err(why)) => Err(why),
        (Err(e), ..) => Err(e.to_string()),
    }
}

#[derive(Default)]
struct State {
    /// Whose link may come, until it has.
    peer: Option<NodeName>,
    /// The source counts on it.
    expected: bool,
    ended: Option<Result<(), Failure>>,
}

/// The content of some of a container's trees, on the node that it comes to.
#[derive(Default)]
pub struct Arriving {
    state: Mutex<State>,
    changed: Condvar,
    /// The trees, for as long as they are wanted. Whoever works on them holds the lock.
    replica: Mutex<Option<Replica>>,
    /// Memory that what is still to come will take.
    to_come: Promise,
}

impl Arriving {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the link come that fills these trees. `expected`: the restore depends on it in any case.
    pub fn open(&self, replica: Replica, peer: &NodeName, expected: bool) {
        *self.replica() = Some(replica);
        *self.state() = State { peer: Some(peer.clone()), expected, ended: None };
    }

    fn replica(&self) -> MutexGuard<'_, Option<Replica>> {
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing more is wanted, and nothing is written any more.
    pub fn close(&self) {
        *self.replica() = None;
        self.to_come.end();
        self.fail(&Failure::new("the migration was undone"));
    }

    /// Gives files their flags, once criu has opened them.
    pub fn set_flags(&self) -> Result<(), Failure> {
        self.replica().as_mut().map_or(Ok(()), |replica| replica.set_flags().map_err(failed))
    }

    /// So many bytes of memory are promised for what is to come.
    pub fn promise(&self, memory: u64) {
        self.to_come.add(memory);
    }

    /// Bytes of that which have not come.
    pub fn to_come(&self) -> u64 {
        self.to_come.left()
    }

    /// The restore depends on it.
    pub fn expect(&self) {
        self.state().expected = true;
    }

    /// Whoever waits shall not go on waiting.
    pub fn fail(&self, failure: &Failure) {
        self.state().ended.get_or_insert_with(|| Err(failure.clone()));
        self.changed.notify_all();
    }

    /// Waits until everything has come that the source counts on.
    pub fn wait(&self, what: &str, timeout: Duration, timeline: &mut Timeline) -> Result<(), Failure> {
        let start = monotonic_ns();
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        if !state.expected {
            // Nothing will come.
            self.to_come.end();
            return Ok(());
        }
        loop {
            if let Some(ended) = &state.ended {
                timeline.note(format!("{what}: last changes"), start, monotonic_ns());
                return ended.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(format!("{what}: the last changes did not arrive within {timeout:?}")));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes in what the source sends until it ends.
    pub fn receive(&self, link: &mut Connection, here: &NodeName) -> Result<(), Failure> {
        if self.state().peer.take_if(|peer| peer == link.peer()).is_none() {
            return Err(Failure::new(format!("node {} has no files to send, or has a link for them", link.peer())));
        }
        let result = self.apply(link, here);
        self.to_come.end();
        self.state().ended.get_or_insert_with(|| result.clone());
        self.changed.notify_all();
        result
    }

    /// Applies everything up to the end. After a failure it listens on, so that the source hears of it when it asks.
    fn apply<L: Read + Write>(&self, link: &mut L, here: &NodeName) -> Result<(), Failure> {
        let mut failure: Option<Failure> = None;
        let mut buffer = Vec::new();
        loop {
            let header = tranship_wire::read_header(link).map_err(failed)?;
            let said = match header {
                FrameHeader::Message { .. } => Some(tranship_wire::read_message_after(&header, link).map_err(failed)?),
                FrameHeader::FileData { length, .. } => {
                    buffer.resize(length as usize, 0);
                    link.read_exact(&mut buffer).map_err(|e| failed(ReadError::Io(e)))?;
                    self.to_come.keep(length.into());
                    None
                }
                other => return Err(Failure::new(format!("a frame of kind {} on the link for files", other.kind()))),
            };
            let mut wanted = self.replica();
            let replica = wanted.as_mut().ok_or_else(|| failed("the migration was undone"))?;
            let done = match (said, &failure, header) {
                (Some(Said::End), ..) => return failure.map_or(Ok(()), Err),
                (Some(Said::Sync), ..) => {
                    replica.flush();
                    let heard = match &failure {
                        Some(failure) => Heard::Failed { message: failure.message.clone() },
                        None => Heard::Done,
                    };
                    tranship_wire::write_message(link, &heard).map_err(failed)
                }
                (_, Some(_), _) => Ok(()),
                (Some(Said::Op(op)), ..) => replica.apply(op).map_err(failed),
                (Some(Said::Digests { index, digests }), ..) => verify(replica, index, &digests),
                (None, _, FrameHeader::FileData { offset, .. }) => replica.data(offset, &buffer).map_err(failed),
                (None, ..) => Ok(()),
            };
            if let Err(error) = done {
                failure.get_or_insert_with(|| Failure::new(format!("{error} (on node {here})")));
            }
        }
    }
}

/// Compares a tree with what it must be.
fn verify(replica: &Replica, index: usize, theirs: &Digests) -> Result<(), Failure> {
    let ours = replica.digests(index).map_err(failed)?;
    match carried::difference(theirs, &ours) {
        None => Ok(()),
        Some(name) => Err(Failure::new(format!(
            "the files that arrived are not those that left: {name} differs; move again, and report this as a bug"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn memory_is_promised_for_what_has_not_come() {
        let arriving = Arriving::default();
        arriving.open(
            tranship_storage::tmpfs::make(&std::env::temp_dir(), &[]).unwrap(),
            &"node-a".parse().unwrap(),
            false,
        );
        arriving.promise(10_000);
        let mut wire = Vec::new();
        tranship_wire::write_file_data(&mut wire, 0, &[1; 3000]).unwrap();
        // Then the link breaks.
        assert!(arriving.apply(&mut Cursor::new(wire), &"node-b".parse().unwrap()).is_err());
        assert_eq!(arriving.to_come.left(), 7000);
        arriving.wait("tmpfs", Duration::ZERO, &mut Timeline::default()).unwrap();
        assert_eq!(arriving.to_come.left(), 0);
    }
}
