use std::collections::VecDeque;

use crate::HeldFrame;

/// What a frame takes besides its bytes: its entry, the name of its interface, and the allocator's own for both.
const BESIDES: usize = size_of::<HeldFrame>() + 48;

/// Held frames in the order of their arrival, within a bound. Beyond it the oldest are dropped: a receiver wants the newest datagrams, and TCP has the
/// peer send again at once what is lacking ahead of segments that have arrived, and only after its timeout what is lacking behind them.
#[derive(Debug, Default)]
pub struct Queue {
    frames: VecDeque<HeldFrame>,
    bytes: usize,
    dropped: u64,
}

impl Queue {
    /// Puts a frame behind the others, and drops the first ones as long as all occupy more than `bound` bytes.
    pub fn push(&mut self, frame: HeldFrame, bound: usize) {
        self.bytes += occupied(&frame);
        self.frames.push_back(frame);
        while self.bytes > bound
            && let Some(oldest) = self.frames.pop_front()
        {
            self.bytes -= occupied(&oldest);
            self.dropped += 1;
        }
    }

    /// The frames, the oldest first.
    pub fn frames(&self) -> impl Iterator<Item = &HeldFrame> {
        self.frames.iter()
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Takes those out that are wanted.
    pub(crate) fn take(&mut self, is_wanted: impl FnMut(&HeldFrame) -> bool) -> Vec<HeldFrame> {
        let (taken, left): (VecDeque<_>, _) = std::mem::take(&mut self.frames).into_iter().partition(is_wanted);
        self.frames = left;
        self.bytes = self.frames.iter().map(occupied).sum();
        taken.into()
    }

    /// How many were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

fn occupied(frame: &HeldFrame) -> usize {
    frame.bytes.len() + BESIDES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_the_oldest_go() {
        let frame = |number: u8| HeldFrame { interface: "eth0".into(), bytes: vec![number; 100] };
        let numbers = |queue: &Queue| queue.frames().map(|frame| frame.bytes[0]).collect::<Vec<_>>();
        let bound = 4 * (100 + BESIDES);
        let mut queue = Queue::default();
        (0..4).for_each(|number| queue.push(frame(number), bound));
        assert_eq!((numbers(&queue), queue.dropped()), (vec![0, 1, 2, 3], 0));
        (4..6).for_each(|number| queue.push(frame(number), bound));
        assert_eq!((numbers(&queue), queue.dropped()), (vec![2, 3, 4, 5], 2));
        // What is taken makes room.
        assert_eq!(queue.take(|frame| frame.bytes[0] % 2 == 0), [frame(2), frame(4)]);
        (6..8).for_each(|number| queue.push(frame(number), bound));
        assert_eq!((numbers(&queue), queue.dropped()), (vec![3, 5, 6, 7], 2));
    }
}
