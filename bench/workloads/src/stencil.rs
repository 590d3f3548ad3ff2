use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, RwLock};

/// A seven-point stencil on a cube of cells, by several threads that each own a slab and exchange its faces in every
/// iteration: the shape of the solvers of the NAS parallel benchmarks. Every iteration reads and writes all memory.
#[derive(Debug, Clone, Copy)]
pub struct Stencil {
    /// Cells along each edge.
    pub edge: usize,
    /// Threads; they divide the edge.
    pub threads: usize,
}

type Face = RwLock<Vec<f64>>;

impl Stencil {
    /// Bytes that an iteration reads and writes: both copies of the cells.
    pub fn bytes(&self) -> usize {
        2 * self.edge.pow(3) * size_of::<f64>()
    }

    /// Computes, counting the iterations that are over in `done`; returns a checksum over the bits of all cells,
    /// which does not depend on the number of threads.
    pub fn run(&self, iterations: u64, done: &AtomicU64) -> u64 {
        let plane = self.edge * self.edge;
        // For each thread its lowest and its highest plane, as the neighbours read them.
        let faces: Vec<[Face; 2]> =
            (0..self.threads).map(|_| [RwLock::new(vec![0.0; plane]), RwLock::new(vec![0.0; plane])]).collect();
        let barrier = Barrier::new(self.threads);
        let slabs: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let (faces, barrier) = (&faces, &barrier);
            let thread = |number| scope.spawn(move || self.slab(number, iterations, faces, barrier, done));
            let threads: Vec<_> = (0..self.threads).map(thread).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        // FNV-1a over the bits, without the planes that are the neighbours'.
        let own = slabs.iter().flat_map(|slab| &slab[plane..slab.len() - plane]);
        own.fold(0xcbf2_9ce4_8422_2325, |sum, cell| (sum ^ cell.to_bits()).wrapping_mul(0x0000_0100_0000_01b3))
    }

    fn slab(
        &self,
        number: usize,
        iterations: u64,
        faces: &[[Face; 2]],
        barrier: &Barrier,
        done: &AtomicU64,
    ) -> Vec<f64> {
        let (edge, plane, planes) = (self.edge, self.edge * self.edge, self.edge / self.threads);
        // A plane of the neighbours' cells below and above one's own.
        let heat = |i: usize| ((number * planes * plane + i).wrapping_mul(2_654_435_761) % 1_000_003) as f64 / 1000.0;
        let mut cells = vec![0.0; (planes + 2) * plane];
        cells[plane..][..planes * plane].iter_mut().enumerate().for_each(|(i, cell)| *cell = heat(i));
        let mut next = cells.clone();
        let locked = "no thread of the stencil panics";
        for iteration in 0..iterations {
            faces[number][0].write().expect(locked).copy_from_slice(&cells[plane..][..plane]);
            faces[number][1].write().expect(locked).copy_from_slice(&cells[planes * plane..][..plane]);
            barrier.wait();
            if number > 0 {
                cells[..plane].copy_from_slice(&faces[number - 1][1].read().expect(locked));
            }
            if number + 1 < self.threads {
                cells[(planes + 1) * plane..].copy_from_slice(&faces[number + 1][0].read().expect(locked));
            }
            sweep(&cells, &mut next, edge, planes);
            std::mem::swap(&mut cells, &mut next);
            barrier.wait();
            if number == 0 {
                done.store(iteration + 1, Ordering::Relaxed);
            }
        }
        cells
    }
}

/// One iteration over a slab; what lies beyond the cube's sides is its outermost cells again.
fn sweep(cells: &[f64], next: &mut [f64], edge: usize, planes: usize) {
    let plane = edge * edge;
    for z in 1..=planes {
        for y in 0..edge {
            let at = z * plane + y * edge;
            let (north, south) = (if y == 0 { at } else { at - edge }, if y + 1 == edge { at } else { at + edge });
            let row = |start: usize| &cells[start..start + edge];
            let (own, north, south) = (row(at), row(north), row(south));
            let (below, above) = (row(at - plane), row(at + plane));
            let out = &mut next[at..at + edge];
            for x in 0..edge {
                let (west, east) = (own[x.saturating_sub(1)], own[(x + 1).min(edge - 1)]);
                out[x] = own[x] * 0.4 + (west + east + north[x] + south[x] + below[x] + above[x]) * 0.1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(threads: usize, iterations: u64) -> u64 {
        Stencil { edge: 8, threads }.run(iterations, &AtomicU64::new(0))
    }

    #[test]
    fn the_result_depends_on_the_iterations_but_not_on_the_threads() {
        assert_eq!(sum(1, 20), sum(2, 20));
        assert_eq!(sum(1, 20), sum(4, 20));
        assert_ne!(sum(2, 20), sum(2, 21));
    }

    #[test]
    fn iterations_are_counted() {
        let done = AtomicU64::new(0);
        Stencil { edge: 4, threads: 2 }.run(9, &done);
        assert_eq!(done.into_inner(), 9);
    }
}
