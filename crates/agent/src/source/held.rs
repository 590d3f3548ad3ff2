//! Packets that reached the closed gate.

use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_network::{Backlog, HeldFrame, Injector, NetworkError};
use tranship_wire::message::Request;

use super::SourceRun;

/// Bytes of packets in one message: as text they are a third longer, and a message holds 1 MiB.
const HELD_MESSAGE: usize = 512 << 10;

/// How long programs may take to accept the connections, and read the datagrams, that have come before the freeze.
const ACCEPT: Duration = Duration::from_millis(50);
/// How long connections that programs have closed may take to send what is left: while the container runs, and in the freeze.
const FINISH: Duration = Duration::from_secs(1);
const FINISH_FROZEN: Duration = Duration::from_millis(10);

impl SourceRun {
    /// Lets the kernel bring to their end the connections that programs have closed, while the container runs: nobody has
    /// them, so that CRIU does not carry them, and their peers would wait for the rest for ever. Where there is always one,
    /// those that are left in the freeze are few.
    pub(super) fn let_closed_connections_finish(&mut self) {
        let Some((path, _)) = self.inspection.as_ref().and_then(|(_, offer)| offer.network.clone()) else { return };
        match Backlog::prepare(&path) {
            Ok(backlog) => self.backlog = Some(backlog),
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "what waits between programs and the network is not looked at");
                return;
            }
        }
        self.unfinished_after(FINISH, Duration::from_millis(1));
    }

    /// The same in the freeze, before the gate is closed: programs close no more of them.
    pub(super) fn let_last_connections_finish(&mut self) {
        let left = self.unfinished_after(FINISH_FROZEN, Duration::from_micros(100));
        if left > 0 {
            self.report.change(|r| {
                r.ways.push(format!(
                    "network: {left} connections that programs have closed had not sent all; what they had left is lost"
                ));
            });
        }
    }

    /// How many of them there still are when there are none, or after so long a time; `look` lies between two looks.
    fn unfinished_after(&mut self, patience: Duration, look: Duration) -> u32 {
        let Some(backlog) = &mut self.backlog else { return 0 };
        let deadline = Instant::now() + patience;
        loop {
            match backlog.unfinished() {
                Ok(0) => return 0,
                Ok(left) if Instant::now() >= deadline => return left,
                Ok(_) => std::thread::sleep(look),
                Err(error) => {
                    tracing::warn!(id = %self.id, %error, "connections that programs have closed are not looked at");
                    return 0;
                }
            }
        }
    }

    /// Keeps new connections and datagrams waiting at the gate until programs have taken those that are there already: CRIU
    /// can carry neither what waits to be accepted nor unread datagrams. An idle container is not kept waiting.
    pub(super) fn let_backlog_drain(&mut self) {
        let (Some(hold), Some(gate), Some(backlog)) = (&mut self.hold, &mut self.gate, &mut self.backlog) else {
            return;
        };
        let deadline = Instant::now() + ACCEPT;
        let held = &mut self.held;
        let mut drain = || -> Result<u32, NetworkError> {
            hold.begin()?;
            gate.close_to_newcomers()?;
            loop {
                // What passes meanwhile must not fill the hold.
                held.extend(hold.take());
                match backlog.waiting()? {
                    0 => return Ok(0),
                    left if Instant::now() >= deadline => return Ok(left),
                    _ => std::thread::sleep(Duration::from_micros(200)),
                }
            }
        };
        match drain() {
            Ok(0) => {}
            Ok(left) => self.report.change(|r| {
                r.ways.push(format!("network: {left} connections and sockets with datagrams that no program took in time; what waits there is lost"));
            }),
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "what waits to be accepted or read is not looked at");
            }
        }
    }

    /// Delivers the held packets to the original, which goes on here after all.
    pub(super) fn deliver_here(&mut self) {
        let Some(mut hold) = self.hold.take() else { return };
        self.held.extend(hold.take());
        let frames = std::mem::take(&mut self.held);
        let network = self.inspection.as_ref().and_then(|(_, offer)| offer.network.as_ref());
        if let Some((path, identity)) = network
            && !frames.is_empty()
            && let Err(error) = Injector::prepare(path, identity).and_then(|mut way_in| way_in.inject(&frames))
        {
            tracing::warn!(id = %self.id, %error, "held packets could not be delivered; they will be sent again");
        }
    }

    /// Sends the packets that were held since the last time to where the container is now.
    pub(super) fn forward_held(&mut self) -> Result<(), Failure> {
        if let Some(hold) = &mut self.hold {
            self.held.extend(hold.take());
        }
        while !self.held.is_empty() {
            let mut bytes = 0;
            let fits = |frame: &&HeldFrame| {
                bytes += frame.bytes.len();
                bytes <= HELD_MESSAGE
            };
            let count = self.held.iter().take_while(fits).count().max(1);
            let frames = serde_json::to_value(&self.held[..count]).unwrap_or_default();
            self.say(&Request::Held { frames })?;
            self.held.drain(..count);
        }
        Ok(())
    }
}
