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
//! Nothing of it is kept in memory. What was loaded stays, also if the move fails.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tranship_coordinator::Failure;
use tranship_engine::{Engine, MissingImage};
use tranship_transport::{Connection, Link};
use tranship_types::{EngineName, MigrationId, NodeName};
use tranship_wire::message::Offer;
use tranship_wire::{FrameHeader, MAX_FILE_DATA, Purpose};

use crate::node::{Node, failed};
use crate::registry::LiveReport;

/// How long an engine may take to pack or unpack a layer.
const PATIENCE: Duration = Duration::from_secs(600);

/// What a source says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    Wanted { engine: EngineName, container: String, parameters: serde_json::Value },
    End,
}

/// What a destination says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Heard {
    There,
    Lacking(MissingImage),
    Loaded,
    Failed { message: String },
}

/// The archive, on its way out.
struct Outgoing<'a> {
    link: &'a mut Connection,
    report: &'a LiveReport,
    sent: u64,
}

impl Write for Outgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(MAX_FILE_DATA as usize)];
        if !piece.is_empty() {
            tranship_wire::write_file_data(self.link, self.sent, piece).map_err(io::Error::other)?;
            self.sent += piece.len() as u64;
            let sent = self.link.bytes_sent();
            self.report.change(|r| r.progress.wire_bytes = sent);
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.flush()
    }
}

/// Sends the image of the offered container, if the destination lacks it. Returns the bytes that its link took, and what there is
/// to say about it.
pub fn send(
    node: &Node,
    (peer, id): (&NodeName, &MigrationId),
    (engine, offer): (&dyn Engine, &Offer),
    (report, pace): (&LiveReport, Option<u64>),
) -> Result<Option<(u64, String)>, Failure> {
    let mut link = node.dial(peer, Purpose::Image, Some(id))?;
    link.set_timeout(Some(PATIENCE)).and_then(|()| link.set_pace(pace)).map_err(failed)?;
    let broke = |e: &dyn std::fmt::Display| Failure::new(format!("the image could not be sent to node {peer}: {e}"));
    let (container, parameters) = (offer.container.clone(), offer.parameters.clone());
    let wanted = Said::Wanted { engine: engine.name(), container, parameters };
    tranship_wire::write_message(&mut link, &wanted).map_err(|e| broke(&e))?;
    let lacking = match tranship_wire::read_message(&mut link).map_err(|e| broke(&e))? {
        Heard::Lacking(lacking) => lacking,
        Heard::Failed { message } => return Err(Failure::new(message)),
        Heard::There | Heard::Loaded => return Ok(None),
    };
    let mut outgoing = Outgoing { link: &mut link, report, sent: 0 };
    let mut pieces = io::BufWriter::with_capacity(MAX_FILE_DATA as usize, &mut outgoing);
    let saved = engine.save_image(&offer.parameters, &lacking, &mut pieces).map_err(failed);
    let saved = saved.and_then(|()| pieces.flush().map_err(|e| broke(&e)));
    drop(pieces);
    let sent = outgoing.sent;
    let ended = saved.and_then(|()| tranship_wire::write_message(&mut link, &Said::End).map_err(|e| broke(&e)));
    // Without its end nobody takes what has come for all of it.
    ended?;
    match tranship_wire::read_message(&mut link).map_err(|e| broke(&e))? {
        Heard::Loaded => {}
        Heard::Failed { message } => return Err(Failure::new(message)),
        Heard::There | Heard::Lacking(_) => return Err(broke(&"an answer that does not fit")),
    }
    let (name, known, layers) = (&lacking.name, lacking.known_layers, lacking.layers);
    let way = format!("image: {name} was sent, {} MiB; {known} of its {layers} layers were there", sent >> 20);
    Ok(Some((link.bytes_sent(), way)))
}

/// The archive, as it comes in.
struct Incoming<'a> {
    link: &'a mut Connection,
    piece: io::Cursor<Vec<u8>>,
    ended: bool,
}

impl Read for Incoming<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !self.ended && self.piece.position() == self.piece.get_ref().len() as u64 {
            match tranship_wire::read_header(self.link).map_err(io::Error::other)? {
                FrameHeader::FileData { length, .. } => {
                    let mut buffer = std::mem::take(self.piece.get_mut());
                    buffer.resize(length as usize, 0);
                    self.link.read_exact(&mut buffer)?;
                    self.piece = io::Cursor::new(buffer);
                }
                header => match tranship_wire::read_message_after(&header, self.link).map_err(io::Error::other)? {
                    Said::End => self.ended = true,
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
    let engine = node.engine(engine);
    // Where there is no such engine, the offer is refused for that.
    let lacking = match engine.is_present() {
        true => engine.missing_image(&container, &parameters),
        false => Ok(None),
    };
    let heard = match lacking {
        Ok(None) => Heard::There,
        Ok(Some(lacking)) => {
            tracing::info!(%container, image = %lacking.name, "an image comes");
            tranship_wire::write_message(link, &Heard::Lacking(lacking)).map_err(failed)?;
            let mut incoming = Incoming { link: &mut *link, piece: io::Cursor::default(), ended: false };
            match engine.load_image(&container, &parameters, &mut incoming) {
                Ok(()) => Heard::Loaded,
                Err(error) => {
                    // The source listens when it has said everything.
                    let _ = io::copy(&mut incoming, &mut io::sink());
                    Heard::Failed { message: format!("{error} (on node {here})") }
                }
            }
        }
        Err(error) => Heard::Failed { message: format!("{error} (on node {here})") },
    };
    tranship_wire::write_message(link, &heard).map_err(failed)
}

/// What there is to say of an image that would have to come.
pub fn note(node: &Node, offer: &Offer) -> Option<String> {
    let engine = node.engine(offer.engine.parse().ok()?);
    let lacking = engine.missing_image(&offer.container, &offer.parameters).ok()??;
    Some(format!(
        "the image {} (up to {} MiB) is not on node {} and would be sent there; {} of its {} layers are there",
        lacking.name,
        lacking.bytes >> 20,
        node.config.node,
        lacking.known_layers,
        lacking.layers
    ))
}
