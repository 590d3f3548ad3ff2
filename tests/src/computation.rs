use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};

/// A computation by several threads that depend on each other in every round: heat that spreads in a ring of cells, in
/// floating point, so that a wrong bit anywhere, or a thread that misses a round, shows in the result.
#[derive(Debug, Clone, Copy)]
pub struct Computation {
    /// How many threads share the work.
    pub threads: usize,
    /// How many cells there are, a multiple of the threads.
    pub cells: usize,
    /// How many rounds there are.
    pub rounds: u64,
}

/// How far a computation is; read by others while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Rounds that are over.
    pub rounds: AtomicU64,
}

impl Computation {
    /// Computes, and returns a checksum over the bits of all cells.
    pub fn run(&self, progress: &Progress) -> u64 {
        let share = self.cells / self.threads;
        // Each thread owns a share of the cells; neighbours exchange their outermost cells between rounds.
        let borders: Vec<Mutex<(f64, f64)>> = (0..self.threads).map(|_| Mutex::default()).collect();
        let barrier = Barrier::new(self.threads);
        let lock = |n: usize| borders[n % self.threads].lock().unwrap_or_else(PoisonError::into_inner);
        let work = |thread: usize| {
            let heat = |i: usize| ((thread * share + i).wrapping_mul(2_654_435_761) % 1_000_003) as f64 / 1000.0;
            let mut cells: Vec<f64> = (0..share).map(heat).collect();
            let mut next = cells.clone();
            for _ in 0..self.rounds {
                *lock(thread) = (cells[0], cells[share - 1]);
                barrier.wait();
                let left = lock(thread + self.threads - 1).1;
                let right = lock(thread + 1).0;
                for i in 0..share {
                    let before = if i == 0 { left } else { cells[i - 1] };
                    let after = if i == share - 1 { right } else { cells[i + 1] };
                    next[i] = cells[i] * 0.613 + before * 0.201 + after * 0.186;
                }
                std::mem::swap(&mut cells, &mut next);
                barrier.wait();
                if thread == 0 {
                    progress.rounds.fetch_add(1, Ordering::Relaxed);
                }
            }
            // FNV-1a over the bits.
            let mix = |sum: u64, cell: &f64| (sum ^ cell.to_bits()).wrapping_mul(0x0000_0100_0000_01b3);
            cells.iter().fold(0xcbf2_9ce4_8422_2325, mix)
        };
        let sums: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|n| scope.spawn(move || work(n))).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        sums.into_iter().fold(0, |sum: u64, part| sum.rotate_left(7) ^ part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_depends_on_every_round_but_not_on_the_number_of_threads() {
        let run = |threads, rounds| Computation { threads, cells: 64, rounds }.run(&Progress::default());
        assert_eq!(run(1, 50), run(1, 50));
        assert_eq!(run(4, 50), run(4, 50));
        assert_ne!(run(4, 50), run(4, 51));
    }
}
