//! A long computation by several threads that tells its progress, and at last its result, to everybody who connects.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use tranship_e2e::{Computation, Progress};

/// Computes with several threads and tells the progress, and at last the result, over TCP.
#[derive(Parser)]
struct Arguments {
    /// Number of threads
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Number of cells, a multiple of the threads
    #[arg(long, default_value_t = 1 << 18)]
    cells: usize,
    /// Number of rounds
    #[arg(long)]
    rounds: u64,
    /// TCP port
    #[arg(long, default_value_t = 7001)]
    port: u16,
}

fn main() -> Result<()> {
    let Arguments { threads, cells, rounds, port } = Arguments::parse();
    let progress = Arc::new(Progress::default());
    let result = Arc::new(OnceLock::new());
    let listener = TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("cannot listen on TCP port {port}"))?;
    let (shown, told) = (Arc::clone(&progress), Arc::clone(&result));
    std::thread::spawn(move || {
        for guest in listener.incoming().flatten() {
            let (shown, told) = (Arc::clone(&shown), Arc::clone(&told));
            std::thread::spawn(move || tell(guest, &shown, &told));
        }
    });
    let sum = Computation { threads, cells, rounds }.run(&progress);
    result.get_or_init(|| sum);
    // The result is told for as long as somebody may ask.
    loop {
        std::thread::park();
    }
}

/// Sends a line `round N` every 50 ms, and at last `result SUM`.
fn tell(mut guest: TcpStream, progress: &Progress, result: &OnceLock<u64>) {
    loop {
        let (line, last) = match result.get() {
            Some(sum) => (format!("result {sum:016x}\n"), true),
            None => (format!("round {}\n", progress.rounds.load(Ordering::Relaxed)), false),
        };
        if guest.write_all(line.as_bytes()).is_err() || last {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
