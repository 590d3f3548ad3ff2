//! The content of tmpfs mounts, on a link of its own.
//!
//! ```text
//!  source                                     destination
//!  Leaving::begin ── link, purpose Files ───▶ Arriving::receive     into tmpfs mounts that Arriving::open has made
//!  pass ══════ operations, content ═════════▶
//!        ── Sync ───────────────────────────▶
//!        ◀─────────────────────── Done ─────  or Failed: then CRIU carries the mounts, as if there were none of this
//!  ── freeze ──
//!  decide: which mounts criu leaves alone
//!  finish ════ the rest ═════ End ══════════▶ Arriving::wait, and criu binds the mounts into the container
//! ```
//!
//! Up to the freeze nothing depends on this: whatever fails, the mounts stay with CRIU, and the report says so.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_criu::rpc::ExternalMount;
use tranship_engine::Container;
use tranship_storage::tmpfs::{self, Moved, Op, Replica, Sink, Source, TmpfsMount};
use tranship_sys::clock::monotonic_ns;
use tranship_transport::{Connection, Link};
use tranship_types::{MigrationId, NodeName};
use tranship_wire::message::Offer;
use tranship_wire::{FrameHeader, Purpose, ReadError};

use crate::layout::Layout;
use crate::node::{Node, failed};
use crate::timeline::Timeline;

/// Most mounts of one container.
const MOUNTS: usize = 256;
/// How long the destination may take for what a pass has sent.
const SYNC: Duration = Duration::from_secs(60);

/// What a source says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    Op(Op),
    /// Say when everything so far is done.
    Sync,
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

/// What a source offers: for [`Offer::tmpfs`].
pub fn offered(container: &Container) -> Result<serde_json::Value, Failure> {
    let mut found = find(container)?;
    found.truncate(MOUNTS);
    Ok(serde_json::to_value(found).unwrap_or_default())
}

/// The mounts that are the container's own: all but what the engine binds into it. (Paths that it masks are either bound from
/// /dev/null, which is no whole filesystem, or are an empty tmpfs of the container's own.)
fn find(container: &Container) -> Result<Vec<TmpfsMount>, Failure> {
    let binds: Vec<_> = container.bind_mounts().into_iter().map(|(_, destination)| destination).collect();
    tmpfs::find(container.init, &binds).map_err(failed)
}

fn mounts(offer: &Offer) -> Result<Vec<TmpfsMount>, Failure> {
    if offer.tmpfs.is_null() {
        return Ok(Vec::new());
    }
    let mounts: Vec<TmpfsMount> = serde_json::from_value(offer.tmpfs.clone())
        .map_err(|e| Failure::new(format!("the offered tmpfs mounts cannot be read: {e}; update both agents")))?;
    match mounts.len() > MOUNTS {
        true => {
            Err(Failure::new(format!("{} tmpfs mounts are more than the {MOUNTS} that are possible", mounts.len())))
        }
        false => Ok(mounts),
    }
}

/// Bytes of files in the offered mounts.
pub fn bytes(offer: &Offer) -> u64 {
    mounts(offer).unwrap_or_default().iter().fold(0, |sum, mount| sum.saturating_add(mount.bytes))
}

/// What CRIU's images call a mount.
fn key(index: usize) -> String {
    format!("tranship-tmpfs-{index}")
}

/// What criu is told for a restore; images that do not name such a mount do not care.
pub fn for_restore(layout: &Layout, offer: &Offer) -> Result<Vec<ExternalMount>, Failure> {
    let path = |index: usize| layout.tmpfs().join(index.to_string()).to_string_lossy().into_owned();
    let made = |index: &usize| Path::new(&path(*index)).exists();
    let external = |index| ExternalMount { key: key(index), val: path(index) };
    Ok((0..mounts(offer)?.len()).filter(made).map(external).collect())
}

/// The link as a sink.
struct Sending<'a>(&'a mut Connection);

impl Sink for Sending<'_> {
    fn op(&mut self, op: &Op) -> io::Result<()> {
        tranship_wire::queue_message(self.0, &Said::Op(op.clone())).map_err(io::Error::other)
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        tranship_wire::write_file_data(self.0, offset, bytes).map_err(io::Error::other)
    }
}

/// The content of a container's tmpfs mounts, on the node that it leaves.
pub struct Leaving {
    at_work: Result<(Source, Connection), String>,
    external: Vec<ExternalMount>,
    ahead: Moved,
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

impl Leaving {
    /// Opens the link and the mounts; `None` if there are none.
    pub fn begin(node: &Node, peer: &NodeName, id: &MigrationId, container: &Container, offer: &Offer) -> Option<Self> {
        let offered = mounts(offer).unwrap_or_default();
        if offered.is_empty() {
            return None;
        }
        let begin = || -> Result<(Source, Connection), String> {
            // What was offered, with what identifies it here.
            let found = find(container).map_err(|e| e.to_string())?;
            let same = |mount: &TmpfsMount| found.iter().find(|m| m.is_as_offered(mount)).unwrap_or(mount).clone();
            let found: Vec<TmpfsMount> = offered.iter().map(same).collect();
            let mut link = node.dial(peer, Purpose::Files, Some(id)).map_err(|e| e.to_string())?;
            link.set_timeout(Some(SYNC)).map_err(|e| e.to_string())?;
            Ok((Source::open(container.init, &found), link))
        };
        Some(Self { at_work: begin(), external: Vec::new(), ahead: Moved::default() })
    }

    /// Bounds what the link takes, in bytes a second.
    pub fn set_pace(&mut self, pace: Option<u64>) -> Result<(), Failure> {
        match &mut self.at_work {
            Ok((_, link)) => link.set_pace(pace).map_err(failed),
            Err(_) => Ok(()),
        }
    }

    /// Copies what the destination does not have yet, while the processes `pids` run. Returns how many bytes of content that
    /// was: none, too, if it failed, which leaves the mounts to criu.
    pub fn pass(&mut self, pids: &[u32]) -> u64 {
        let Ok((source, link)) = &mut self.at_work else { return 0 };
        match synced(source, link, pids) {
            Ok(moved) => {
                self.ahead.bytes += moved.bytes;
                self.ahead.files += moved.files;
                moved.bytes
            }
            Err(why) => {
                tracing::warn!(why, "the content of tmpfs mounts is left to criu");
                self.at_work = Err(why);
                0
            }
        }
    }

    /// Decides which mounts criu leaves alone, with the processes `pids` frozen. Returns the other ones, for the report.
    pub fn decide(&mut self, pids: &[u32]) -> Result<Vec<String>, Failure> {
        let (source, _) = match &mut self.at_work {
            Ok(at_work) => at_work,
            Err(why) => return Ok(vec![format!("tmpfs: by criu, {why}")]),
        };
        let decision = source.decide(pids).map_err(failed)?;
        let external = |(index, point): (usize, String)| ExternalMount { key: point, val: key(index) };
        self.external = decision.external.into_iter().map(external).collect();
        Ok(decision.left.into_iter().map(|left| format!("tmpfs: by criu, {left}")).collect())
    }

    /// What criu is told for the dump.
    pub fn external(&self) -> Vec<ExternalMount> {
        self.external.clone()
    }

    /// Sends the rest of the mounts that were decided on. Nothing, if there are none. The watch over the mounts is kept: to end it
    /// takes tens of milliseconds, which the freeze has not got.
    pub fn finish(&mut self) -> Result<Left, Failure> {
        let start_ns = monotonic_ns();
        let (mut moved, mut wire_bytes) = (Moved::default(), 0);
        if let Ok((source, link)) = &mut self.at_work {
            moved = source.finish(&mut Sending(link)).map_err(failed)?;
            tranship_wire::write_message(link, &Said::End).map_err(failed)?;
            wire_bytes = link.bytes_sent();
        }
        let way = format!(
            "tmpfs: {} mounts, {} bytes ahead of the freeze and {} in it",
            self.external.len(),
            self.ahead.bytes,
            moved.bytes
        );
        Ok(Left { start_ns, end_ns: monotonic_ns(), wire_bytes, way })
    }
}

/// One pass that the destination has dealt with when it returns.
fn synced(source: &mut Source, link: &mut Connection, pids: &[u32]) -> Result<Moved, String> {
    let sent = source.pass(pids, &mut Sending(link));
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
    peer: Option<NodeName>,
    /// Until the link comes.
    replica: Option<Replica>,
    /// The source counts on it.
    expected: bool,
    ended: Option<Result<(), Failure>>,
}

/// The content of a container's tmpfs mounts, on the node that it comes to.
#[derive(Default)]
pub struct Arriving {
    state: Mutex<State>,
    changed: Condvar,
}

impl Arriving {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Mounts what was offered, and lets the link come.
    pub fn open(&self, layout: &Layout, offer: &Offer, peer: &NodeName) -> Result<(), Failure> {
        let mounts = mounts(offer)?;
        if mounts.is_empty() {
            return Ok(());
        }
        let replica = tmpfs::make(&layout.tmpfs(), &mounts).map_err(failed)?;
        *self.state() = State { peer: Some(peer.clone()), replica: Some(replica), ..State::default() };
        Ok(())
    }

    /// Nothing more is wanted.
    pub fn close(&self) {
        self.state().replica = None;
        self.fail(&Failure::new("the migration was undone"));
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
    pub fn wait(&self, timeout: Duration, timeline: &mut Timeline) -> Result<(), Failure> {
        let start = monotonic_ns();
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        if !state.expected {
            return Ok(());
        }
        loop {
            if let Some(ended) = &state.ended {
                timeline.note("tmpfs: last changes", start, monotonic_ns());
                return ended.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(format!("the content of tmpfs mounts did not arrive within {timeout:?}")));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes in what the source sends until it ends.
    pub fn receive(&self, link: &mut Connection) -> Result<(), Failure> {
        let replica = {
            let mut state = self.state();
            if state.peer.as_ref() != Some(link.peer()) {
                return Err(Failure::new(format!("node {} has no files to send", link.peer())));
            }
            state.replica.take().ok_or_else(|| failed("the files have a link already"))?
        };
        let result = apply(replica, link);
        self.state().ended.get_or_insert_with(|| result.clone());
        self.changed.notify_all();
        result
    }
}

/// Applies everything up to the end. After a failure it listens on, so that the source hears of it when it asks.
fn apply<L: Read + Write>(mut replica: Replica, link: &mut L) -> Result<(), Failure> {
    let mut failure: Option<Failure> = None;
    let mut buffer = Vec::new();
    loop {
        let header = tranship_wire::read_header(link).map_err(failed)?;
        let done = match header {
            FrameHeader::Message { .. } => match tranship_wire::read_message_after(&header, link).map_err(failed)? {
                Said::Op(op) if failure.is_none() => replica.apply(op).map_err(failed),
                Said::Op(_) => Ok(()),
                Said::Sync => {
                    let heard = match &failure {
                        Some(failure) => Heard::Failed { message: failure.message.clone() },
                        None => Heard::Done,
                    };
                    tranship_wire::write_message(link, &heard).map_err(failed)
                }
                Said::End => return failure.map_or(Ok(()), Err),
            },
            FrameHeader::FileData { offset, length } => {
                buffer.resize(length as usize, 0);
                link.read_exact(&mut buffer).map_err(|e| failed(ReadError::Io(e)))?;
                if failure.is_none() { replica.data(offset, &buffer).map_err(failed) } else { Ok(()) }
            }
            other => return Err(Failure::new(format!("a frame of kind {} on the link for files", other.kind()))),
        };
        if let Err(error) = done {
            failure.get_or_insert(error);
        }
    }
}
