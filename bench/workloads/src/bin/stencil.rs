//! Computes a stencil over about 200 MB when it is told to.
//!
//! Besides what every program answers: `RUN ITERATIONS` (answered at the end: milliseconds and the result) and `DONE`
//! (iterations that are over).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use tranship_workloads::{Answer, PORT, Service, Stencil, serve};

/// Computes a stencil on a cube of cells.
#[derive(Parser)]
struct Arguments {
    /// Cells along each edge; memory is 16 times the cube of it
    #[arg(long, default_value_t = 232)]
    edge: usize,
    /// Threads, a divisor of the edge
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

struct Computer {
    stencil: Stencil,
    done: AtomicU64,
}

impl Service for Computer {
    fn answer(&self, command: &[String]) -> Option<Answer> {
        let command: Vec<_> = command.iter().map(String::as_str).collect();
        match command.as_slice() {
            ["DONE"] => Some(Answer::Integer(self.done.load(Ordering::Relaxed) as i64)),
            ["RUN", iterations] => Some(match iterations.parse() {
                Ok(iterations) => {
                    let start = Instant::now();
                    let result = self.stencil.run(iterations, &self.done);
                    Answer::Text(format!("{} {result:016x}", start.elapsed().as_secs_f64() * 1e3))
                }
                Err(_) => Answer::Refused(format!("{iterations:?} is no number of iterations")),
            }),
            _ => None,
        }
    }
}

fn main() -> Result<()> {
    let Arguments { edge, threads } = Arguments::parse();
    anyhow::ensure!(threads > 0 && edge.is_multiple_of(threads), "{threads} threads do not divide an edge of {edge}");
    let computer = Computer { stencil: Stencil { edge, threads }, done: AtomicU64::new(0) };
    serve(&Arc::new(computer)).with_context(|| format!("cannot listen on TCP port {PORT}"))
}
