//! Measuring the link to another node, at both its ends.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_memory::probe::{self, Sink};
use tranship_transport::Link;
use tranship_types::NodeName;
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, ReadError};

use crate::node::Node;

/// How long one trial may take, at either end.
const TRIAL: Duration = Duration::from_secs(10);
/// Round trips whose shortest counts.
const TRIPS: usize = 8;
/// Links that may be probed at a time on this node, 16 MiB of memory each.
const AT_A_TIME: usize = 8;

/// What a link carries.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Bytes of pages a second.
    pub rate: f64,
    pub round_trip: Duration,
}

/// Measures the way to a peer's memory over as many links as a move would use.
pub fn measure(node: &Arc<Node>, peer: &NodeName, streams: u8) -> Result<Measured, Failure> {
    measure_until(node, peer, streams, None)
}

/// The same; a link that carries `enough` bytes a second is not looked at for longer.
pub fn measure_until(node: &Arc<Node>, peer: &NodeName, streams: u8, enough: Option<f64>) -> Result<Measured, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::new(e.to_string());
    let mut links = Vec::new();
    for _ in 0..streams {
        let mut link = node.dial(peer, Purpose::Control, None)?;
        link.set_timeout(Some(TRIAL)).map_err(|e| failed(&e))?;
        links.push(link);
    }
    let first = links.first_mut().ok_or_else(|| Failure::new("a move has at least one stream"))?;
    let mut round_trip = TRIAL;
    for _ in 0..TRIPS {
        let start = Instant::now();
        tranship_wire::write_message(first, &Request::Clock).map_err(|e| failed(&e))?;
        let _: Response = tranship_wire::read_message(first).map_err(|e| failed(&e))?;
        round_trip = round_trip.min(start.elapsed());
    }
    Ok(Measured { rate: probe::measure(&mut links, enough).map_err(|e| failed(&e))?, round_trip })
}

/// Links that are being probed now.
static PROBED: AtomicUsize = AtomicUsize::new(0);

/// The other end: what has been received for the probes of one link. Its memory is taken with the first one.
#[derive(Default)]
pub struct Probed(Option<Sink>);

impl Probed {
    /// Receives a trial. After an error the link is of no use any more.
    pub fn receive<L: Link + Read>(&mut self, link: &mut L, bytes: u64) -> Result<(), ReadError> {
        let refuse = |why: &str| Err(ReadError::Io(io::Error::other(why.to_owned())));
        if bytes > probe::MOST {
            return refuse("a probe of so many bytes is not believable");
        }
        let sink = match &mut self.0 {
            Some(sink) => sink,
            None => {
                if PROBED.fetch_add(1, Ordering::Relaxed) >= AT_A_TIME {
                    PROBED.fetch_sub(1, Ordering::Relaxed);
                    return refuse("too many links are being probed");
                }
                match Sink::new() {
                    Ok(sink) => self.0.insert(sink),
                    Err(error) => {
                        PROBED.fetch_sub(1, Ordering::Relaxed);
                        return Err(ReadError::Io(error));
                    }
                }
            }
        };
        link.set_timeout(Some(TRIAL)).map_err(ReadError::Io)?;
        sink.receive(link, bytes)
    }
}

impl Drop for Probed {
    fn drop(&mut self) {
        if self.0.is_some() {
            PROBED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
