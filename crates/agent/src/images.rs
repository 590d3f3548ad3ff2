//! The image of a container that the destination does not have: sent ahead of everything else, on a link of its own.
//!
//! ```text
//!  source                                     destination
//!        ── Wanted? (parameters) ───────────▶ what does the engine lack?
//!        ◀────────────── There, or Lacking ── the layers that it has
//!  engine ══════ archive, in pieces ════════▶ engine
//!        ── End ────────────────────────────▶
//!        ◀────────────── Loaded, or Failed ──
//! ```
//!
//! Whoever has an engine pack or unpack meanwhile says every few seconds that it is at work: who says nothing for longer is gone.
//!
//! Nothing of it is kept in memory. What was loaded stays, also if the move fails.

use std::cell::OnceCell;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_engine::{Engine, EngineError, MissingImage};
use tranship_sys::threads;
use tranship_transport::{Connection, Link};
use tranship_types::{EngineName, ImageToSend, MigrationId, NodeName};
use tranship_wire::message::Offer;
use tranship_wire::{FrameHeader, MAX_FILE_DATA, Purpose};

use crate::node::{Node, failed};
use crate::policy;
use crate::registry::LiveReport;

/// How long the other side may say nothing, and take nothing.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a side whose engine is at work says so.
const PULSE: Duration = Duration::from_secs(5);

/// What a source says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    Wanted { engine: EngineName, container: String, parameters: serde_json::Value },
    Working,
    End,
}

/// What a destination says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Heard {
    There,
    Working,
    Lacking(MissingImage),
    Loaded,
    Failed { message: String },
}

/// A link that is used by whoever works and by whoever says that this goes on.
struct Shared<'a> {
    link: Mutex<&'a mut Connection>,
    /// Whether the other side listens.
    heard: AtomicBool,
}

impl<'a> Shared<'a> {
    fn new(link: &'a mut Connection, heard: bool) -> Self {
        Self { link: Mutex::new(link), heard: AtomicBool::new(heard) }
    }

    fn link(&self) -> MutexGuard<'_, &'a mut Connection> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something that takes its time, and says `word` meanwhile.
    fn during<T>(&self, word: &(impl Serialize + Sync), work: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            let (done, goes_on) = channel::<()>();
            let pulse = move || {
                while goes_on.recv_timeout(PULSE) == Err(RecvTimeoutError::Timeout) {
                    if !self.heard.load(Ordering::Acquire) {
                        continue;
                    }
                    // Where the link is in use, it need not be said; where it is broken, its user finds out.
                    if let Ok(mut link) = self.link.try_lock() {
                        let _ = tranship_wire::write_message(&mut **link, word)
                            .and_then(|()| link.flush().map_err(Into::into));
                    }
                }
            };
            if let Err(error) = threads::start_within(scope, "pulse", pulse) {
                tracing::warn!(%error, "the other side does not hear that it goes on");
            }
            let result = work();
            drop(done);
            result
        })
    }
}

/// The archive, on its way out.
struct Outgoing<'a> {
    link: &'a Shared<'a>,
    report: &'a LiveReport,
    sent: u64,
    /// Why nothing can be sent any more: the first cause.
    broken: &'a OnceCell<String>,
}

impl Write for Outgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(MAX_FILE_DATA as usize)];
        if !piece.is_empty() {
            let mut link = self.link.link();
            tranship_wire::write_file_data(&mut **link, self.sent, piece).map_err(|error| {
                self.broken.get_or_init(|| in_full(&error));
                io::Error::other(error)
            })?;
            self.sent += piece.len() as u64;
            let sent = link.bytes_sent();
            self.report.change(|r| r.progress.wire_bytes = sent);
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.link().flush()
    }
}

/// An error with its causes.
fn in_full(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// What the destination says next, but for that it is at work.
fn answer(link: &mut Connection) -> Result<Heard, tranship_wire::ReadError> {
    loop {
        match tranship_wire::read_message(link)? {
            Heard::Working => {}
            answer => return Ok(answer),
        }
    }
}

/// Sends the image of the offered container, if the destination lacks it. Returns the bytes that its link took, and what there is
/// to say about it.
pub fn send(
    node: &Node,
    (peer, id): (&NodeName, &MigrationId),
    (engine, own, offer): (&dyn Engine, &serde_json::Value, &Offer),
    (report, pace): (&LiveReport, Option<u64>),
) -> Result<Option<(u64, String)>, Failure> {
    let mut link = node.dial(peer, Purpose::Image, Some(id))?;
    link.set_timeout(Some(PATIENCE)).and_then(|()| link.set_pace(pace)).map_err(failed)?;
    let broke = |e: &dyn std::fmt::Display| Failure::new(format!("the image could not be sent to node {peer}: {e}"));
    let (container, parameters) = (offer.container.clone(), offer.parameters.clone());
    let theirs = offer.engine.parse().unwrap_or(engine.name());
    let wanted = Said::Wanted { engine: theirs, container, parameters };
    tranship_wire::write_message(&mut link, &wanted).map_err(|e| broke(&e))?;
    let lacking = match answer(&mut link).map_err(|e| broke(&in_full(&e)))? {
        Heard::Lacking(lacking) => lacking,
        Heard::Failed { message } => return Err(Failure::new(message)),
        Heard::There | Heard::Loaded | Heard::Working => return Ok(None),
    };
    let shared = Shared::new(&mut link, true);
    let broken = OnceCell::new();
    let sent = shared.during(&Said::Working, || -> Result<u64, Failure> {
        let mut pieces = io::BufWriter::with_capacity(
            MAX_FILE_DATA as usize,
            Outgoing { link: &shared, report, sent: 0, broken: &broken },
        );
        let saved = engine.save_image(own, &lacking, &mut pieces);
        // Whoever packs it takes a link that breaks for its own trouble.
        saved.map_err(|error| broken.get().map_or_else(|| failed(error), |cause| broke(cause)))?;
        let outgoing = pieces.into_inner().map_err(|e| broke(e.error()))?;
        Ok(outgoing.sent)
    });
    // Without its end nobody takes what has come for all of it.
    let sent = sent?;
    tranship_wire::write_message(&mut link, &Said::End).map_err(|e| broke(&in_full(&e)))?;
    match answer(&mut link).map_err(|e| broke(&in_full(&e)))? {
        Heard::Loaded => {}
        Heard::Failed { message } => return Err(Failure::new(message)),
        Heard::There | Heard::Lacking(_) | Heard::Working => return Err(broke(&"an answer that does not fit")),
    }
    let (name, known, layers) = (&lacking.name, lacking.known_layers, lacking.layers);
    let way = format!("image: {name} was sent, {} MiB; {known} of its {layers} layers were there", sent >> 20);
    Ok(Some((link.bytes_sent(), way)))
}

/// The archive, as it comes in.
struct Incoming<'a> {
    link: &'a Shared<'a>,
    piece: io::Cursor<Vec<u8>>,
    ended: bool,
}

impl Read for Incoming<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !self.ended && self.piece.position() == self.piece.get_ref().len() as u64 {
            let mut link = self.link.link();
            match tranship_wire::read_header(&mut **link).map_err(io::Error::other)? {
                FrameHeader::FileData { length, .. } => {
                    let mut buffer = std::mem::take(self.piece.get_mut());
                    buffer.resize(length as usize, 0);
                    link.read_exact(&mut buffer)?;
                    self.piece = io::Cursor::new(buffer);
                }
                header => match tranship_wire::read_message_after(&header, &mut **link).map_err(io::Error::other)? {
                    Said::Working => {}
                    Said::End => {
                        // From now on the source waits for an answer.
                        self.ended = true;
                        self.link.heard.store(true, Ordering::Release);
                    }
                    Said::Wanted { .. } => return Err(io::Error::other("a question in the middle of an image")),
                },
            }
        }
        if self.ended { Ok(0) } else { self.piece.read(into) }
    }
}

/// Takes in an image, if this node lacks it.
pub fn receive(node: &Arc<Node>, link: &mut Connection) -> Result<(), Failure> {
    link.set_timeout(Some(PATIENCE)).map_err(failed)?;
    let Said::Wanted { engine, container, parameters } = tranship_wire::read_message(link).map_err(failed)? else {
        return Err(failed("an image that nobody has asked about"));
    };
    let here = &node.config.node;
    let may_come = policy::may_send(node, link.peer(), engine, &container);
    let engine = node.engine(engine);
    let shared = Shared::new(link, true);
    let heard = shared.during(&Heard::Working, || -> Result<Heard, Failure> {
        // Where there is no such engine, or it does not answer, or the peer may send no such
        // container, the offer is refused for that.
        let lacking = match engine.is_present() && may_come {
            true => engine.missing_image(&container, &parameters),
            false => Ok(None),
        };
        let refused = |error: &dyn std::fmt::Display| Heard::Failed { message: format!("{error} (on node {here})") };
        match lacking {
            Ok(None) | Err(EngineError::Silent { .. }) => Ok(Heard::There),
            Ok(Some(lacking)) => {
                tracing::info!(%container, image = %lacking.name, "an image comes");
                shared.heard.store(false, Ordering::Release);
                tranship_wire::write_message(&mut **shared.link(), &Heard::Lacking(lacking)).map_err(failed)?;
                let mut incoming = Incoming { link: &shared, piece: io::Cursor::default(), ended: false };
                let loaded = engine.load_image(&container, &parameters, &mut incoming);
                // The source listens when it has said everything.
                let _ = io::copy(&mut incoming, &mut io::sink());
                Ok(loaded.map_or_else(|error| refused(&error), |()| Heard::Loaded))
            }
            Err(error) => Ok(refused(&error)),
        }
    })?;
    tranship_wire::write_message(link, &heard).map_err(failed)
}

/// The image that a move would send to this node.
pub fn to_send(node: &Node, offer: &Offer) -> Option<ImageToSend> {
    let engine = node.engine(offer.engine.parse().ok()?);
    let lacking = engine.missing_image(&offer.container, &offer.parameters).ok()??;
    let (layers, known_layers) = (lacking.layers as u64, lacking.known_layers as u64);
    Some(ImageToSend { name: lacking.name, bytes: lacking.bytes, layers, known_layers })
}
