//! Memory that somebody is going to take, and the system counts as free until then.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that this process has promised, and that have not been taken yet.
static PROMISED: AtomicU64 = AtomicU64::new(0);

/// Memory that is still to be taken, by all who were promised some, in bytes.
pub fn promised() -> u64 {
    PROMISED.load(Ordering::Relaxed)
}

/// What one of them has been promised. It ends with this value.
#[derive(Debug, Default)]
pub struct Promise(AtomicU64);

impl Promise {
    /// Promises so many bytes more.
    pub fn add(&self, bytes: u64) {
        // Never less than the parts.
        PROMISED.fetch_add(bytes, Ordering::Relaxed);
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes of it have been taken: at most what is left of it.
    pub fn keep(&self, bytes: u64) {
        let less = |left: u64| Some(left.saturating_sub(bytes));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or_default();
        PROMISED.fetch_sub(bytes.min(before), Ordering::Relaxed);
    }

    /// Bytes of it that have not been taken.
    pub fn left(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Nothing more will be taken.
    pub fn end(&self) {
        self.keep(u64::MAX);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_has_been_promised_another_does_not_count_on() {
        // Other tests promise, too, but nothing as large.
        const LARGE: u64 = 1 << 50;
        let (one, other) = (Promise::default(), Promise::default());
        one.add(LARGE);
        other.add(2 * LARGE);
        assert!((3 * LARGE..4 * LARGE).contains(&promised()));
        one.keep(LARGE / 2);
        assert_eq!(one.left(), LARGE / 2);
        assert!((2 * LARGE..3 * LARGE).contains(&promised()));
        // No more than it had.
        one.keep(LARGE);
        drop(other);
        assert!(promised() < LARGE);
    }
}
