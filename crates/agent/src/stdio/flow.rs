//! One direction of a stream at its two ends: what was read on one node and not yet written on the
//! other.
//!
//! The sender keeps what the receiver has not acknowledged, and sends it again over the next link.
//! The receiver acknowledges what it has written. So no byte is lost or doubled, whenever a link
//! breaks.

use std::collections::VecDeque;

use super::frames::MOST;

/// Most bytes that are read and not acknowledged while there is no link.
pub const UNLINKED: usize = 16 << 20;
/// Most bytes that are read at once.
pub const READ: usize = 64 << 10;
/// Most bytes that a sender keeps: it reads while it has fewer than [`UNLINKED`].
const MOST_KEPT: usize = UNLINKED + READ;

/// The end at which bytes are read.
#[derive(Debug, Default)]
pub struct Sending {
    /// Position of the first byte that is kept.
    base: u64,
    kept: VecDeque<u8>,
    /// Position of what is sent next; `None` until the receiver has told where it is.
    next: Option<u64>,
    ended: bool,
    end_sent: bool,
    done: bool,
}

impl Sending {
    /// Bytes that are kept.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.kept.extend(bytes);
    }

    /// There is no more to read.
    pub fn end(&mut self) {
        self.ended = true;
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Everything was passed on, or nobody takes it any more.
    pub fn is_done(&self) -> bool {
        self.done
    }

    fn last(&self) -> u64 {
        self.base + self.kept.len() as u64
    }

    /// The link is lost.
    pub fn unlink(&mut self) {
        (self.next, self.end_sent) = (None, false);
    }

    pub fn is_linked(&self) -> bool {
        self.next.is_some()
    }

    /// The receiver tells, over a new link, up to where it has passed everything on. One that has
    /// gone on without this sender, which has been started anew, decides where this one begins.
    pub fn resume(&mut self, position: u64) {
        if position > self.last() + u64::from(self.ended) {
            (self.base, self.kept) = (position, VecDeque::new());
        }
        self.acknowledge(position);
        (self.next, self.end_sent) = (Some(self.base), false);
    }

    pub fn acknowledge(&mut self, position: u64) {
        if self.ended && position > self.last() {
            self.done = true;
        }
        let passed = position.saturating_sub(self.base).min(self.kept.len() as u64);
        self.kept.drain(..usize::try_from(passed).unwrap_or(usize::MAX));
        self.base += passed;
        self.next = self.next.map(|next| next.max(self.base));
    }

    /// Nobody takes anything any more.
    pub fn close(&mut self) {
        (self.ended, self.done) = (true, true);
        self.kept.clear();
    }

    /// The next piece to send, with its position.
    pub fn next(&mut self) -> Option<(u64, Vec<u8>)> {
        let next = self.next?;
        let begin = usize::try_from(next.checked_sub(self.base)?).ok()?;
        let piece: Vec<u8> = self.kept.range(begin.min(self.kept.len())..).take(MOST).copied().collect();
        if piece.is_empty() {
            return None;
        }
        self.next = Some(next + piece.len() as u64);
        Some((next, piece))
    }

    /// The position of the end, if that is to be sent now: once on each link.
    pub fn next_end(&mut self) -> Option<u64> {
        let due = self.ended && !self.end_sent && !self.done && self.next == Some(self.last());
        self.end_sent |= due;
        due.then(|| self.last())
    }

    /// The first bytes that are kept, for who passes them on here.
    pub fn first(&self) -> &[u8] {
        self.kept.as_slices().0
    }

    /// So many of them have been passed on.
    pub fn passed(&mut self, count: usize) {
        self.acknowledge(self.base + count as u64);
        if self.ended && self.kept.is_empty() {
            self.done = true;
        }
    }
}

/// The end at which bytes are written.
#[derive(Debug, Default)]
pub struct Receiving {
    /// Position of what comes next.
    next: u64,
    waiting: VecDeque<u8>,
    end_has_come: bool,
    closed: bool,
    /// What was acknowledged last on this link.
    acknowledged: Option<u64>,
}

/// Bytes have come that no sender sends.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    #[error("bytes of a stream are missing")]
    Gap,
    #[error("more bytes of a stream have come than its sender may keep")]
    TooMany,
}

impl Receiving {
    /// Takes in what has come. What came before is left out.
    pub fn receive(&mut self, position: u64, bytes: &[u8]) -> Result<(), Wrong> {
        let known = self.next.checked_sub(position).ok_or(Wrong::Gap)?;
        let new = bytes.get(usize::try_from(known).unwrap_or(usize::MAX)..).unwrap_or_default();
        if !self.closed && !self.end_has_come {
            if self.waiting.len() + new.len() > MOST_KEPT {
                return Err(Wrong::TooMany);
            }
            self.waiting.extend(new);
        }
        self.next += new.len() as u64;
        Ok(())
    }

    /// The end comes at a position. One before the last byte is that of a sender that has put what
    /// was not acknowledged elsewhere: nothing follows what has come.
    pub fn end_at(&mut self, position: u64) -> Result<(), Wrong> {
        if position > self.next && !self.end_has_come {
            return Err(Wrong::Gap);
        }
        self.end_has_come = true;
        Ok(())
    }

    /// Nothing will come any more.
    pub fn end_here(&mut self) {
        self.end_has_come = true;
    }

    /// What is to be written next.
    pub fn first(&self) -> &[u8] {
        self.waiting.as_slices().0
    }

    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub fn written(&mut self, count: usize) {
        self.waiting.drain(..count.min(self.waiting.len()));
    }

    /// Everything was written, up to the end.
    pub fn has_ended(&self) -> bool {
        self.end_has_come && self.waiting.is_empty()
    }

    /// Nobody reads any more.
    pub fn close(&mut self) {
        self.closed = true;
        self.waiting.clear();
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Up to where everything is written; the end counts as a byte.
    pub fn position(&self) -> u64 {
        self.next - self.waiting.len() as u64 + u64::from(self.has_ended())
    }

    /// What is to be acknowledged now, if that is new.
    pub fn acknowledgement(&mut self) -> Option<u64> {
        let position = self.position();
        let is_new = self.acknowledged.is_some_and(|before| before < position);
        self.acknowledged = self.acknowledged.map(|_| position);
        is_new.then_some(position)
    }

    /// A link begins: the position that it begins with.
    pub fn link(&mut self) -> u64 {
        self.acknowledged = Some(self.position());
        self.position()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sends what can be sent; `lost` drops what is on its way, and the link with it.
    fn exchange(sending: &mut Sending, receiving: &mut Receiving, lost: bool) {
        let pieces: Vec<_> = std::iter::from_fn(|| sending.next()).collect();
        let end = sending.next_end();
        if lost {
            sending.unlink();
            return;
        }
        pieces.iter().for_each(|(at, bytes)| receiving.receive(*at, bytes).unwrap());
        end.into_iter().for_each(|at| receiving.end_at(at).unwrap());
    }

    proptest! {
        #[test]
        fn every_byte_arrives_once_and_in_order(
            steps in proptest::collection::vec((0usize..50_000, 0usize..50_000, any::<bool>(), any::<bool>()), 1..30)
        ) {
            let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
            let (mut said, mut heard, mut number) = (Vec::new(), Vec::new(), 0u32);
            for (read, written, lost, silent) in steps {
                let bytes: Vec<u8> = (0..read).map(|_| { number += 1; (number % 251) as u8 }).collect();
                sending.push(&bytes);
                said.extend(bytes);
                if !sending.is_linked() {
                    let position = receiving.link();
                    sending.resume(position);
                }
                exchange(&mut sending, &mut receiving, lost);
                let count = receiving.first().len().min(written);
                heard.extend_from_slice(&receiving.first()[..count]);
                receiving.written(count);
                // An acknowledgement may be lost, too.
                receiving.acknowledgement().filter(|_| !silent).into_iter().for_each(|at| sending.acknowledge(at));
            }
            sending.end();
            sending.resume(receiving.link());
            while !sending.is_done() {
                exchange(&mut sending, &mut receiving, false);
                let count = receiving.first().len();
                heard.extend_from_slice(receiving.first());
                receiving.written(count);
                receiving.acknowledgement().into_iter().for_each(|at| sending.acknowledge(at));
            }
            prop_assert!(said == heard && receiving.has_ended());
        }
    }

    #[test]
    fn a_gap_is_an_error() {
        let mut receiving = Receiving::default();
        receiving.receive(0, b"abc").unwrap();
        receiving.receive(1, b"bcd").unwrap();
        assert_eq!(receiving.first(), b"abcd");
        assert_eq!(receiving.receive(5, b"f"), Err(Wrong::Gap));
        assert_eq!(receiving.end_at(5), Err(Wrong::Gap));
    }

    #[test]
    fn more_than_a_sender_keeps_is_an_error_until_some_is_written() {
        let (mut receiving, piece) = (Receiving::default(), vec![0; MOST]);
        let pieces = (MOST_KEPT / MOST) as u64;
        (0..pieces).for_each(|n| receiving.receive(n * MOST as u64, &piece).unwrap());
        let next = pieces * MOST as u64;
        assert_eq!(receiving.receive(next, &piece), Err(Wrong::TooMany));
        assert_eq!(receiving.link(), 0);
        receiving.written(receiving.first().len());
        receiving.written(receiving.first().len());
        receiving.receive(next, &piece).unwrap();
    }

    #[test]
    fn a_sender_that_has_put_the_rest_elsewhere_ends_what_has_come() {
        let mut receiving = Receiving::default();
        receiving.receive(0, b"abc").unwrap();
        let position = receiving.link();
        receiving.end_at(position).unwrap();
        assert!(!receiving.has_ended());
        receiving.written(3);
        assert!(receiving.has_ended());
        // Over the next link, the end counts as a byte.
        let position = receiving.link();
        assert_eq!(position, 4);
        receiving.end_at(position).unwrap();
    }
}
