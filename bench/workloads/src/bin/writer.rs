//! Rewrites pages of a large memory, or of a large file, drawn at random, at a given rate, with content that does not compress.
//!
//! Besides what every program answers: `WRITTEN` (pages rewritten so far) and `VERIFY` (an error if a page is wrong or has
//! an old version; the rewriting stands still meanwhile).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use tranship_lab::parse_size;
use tranship_workloads::{Answer, FilePages, PORT, Pages, Rewritten, Service, serve};

const PAGE: u64 = 4096;
const MEGABYTE: u64 = 1_000_000;
/// Between two bursts of writing.
const TICK: Duration = Duration::from_millis(1);
/// What is late by more than this is not made up for: a container that stood still does not write faster afterwards.
const MOST_BEHIND: Duration = Duration::from_millis(20);

/// Rewrites a large memory, or a large file, at a given rate.
#[derive(Parser)]
struct Arguments {
    /// Its size, like 4G
    #[arg(long, value_parser = |text: &str| parse_size(text).map_err(|e| e.to_string()))]
    size: u64,
    /// Megabytes (10^6 bytes) to rewrite in a second; 0 for none
    #[arg(long, default_value_t = 0)]
    rate: u64,
    /// A file to make and rewrite instead of memory
    #[arg(long)]
    file: Option<PathBuf>,
}

/// Asks the writing thread for its mismatches.
type Inspection = Sender<(u64, u64)>;

struct Writer {
    written: AtomicU64,
    inspections: Sender<Inspection>,
}

impl Service for Writer {
    fn answer(&self, command: &[String]) -> Option<Answer> {
        match command {
            [word] if word == "WRITTEN" => Some(Answer::Integer(self.written.load(Ordering::Relaxed) as i64)),
            [word] if word == "VERIFY" => {
                let (sender, result) = channel();
                let asked = self.inspections.send(sender).ok().and_then(|()| result.recv().ok());
                Some(match asked {
                    Some((0, 0)) => Answer::Text("OK".to_owned()),
                    Some((wrong, old)) => {
                        Answer::Refused(format!("{wrong} pages are wrong, and {old} versions are missing"))
                    }
                    None => Answer::Refused("the writing thread has ended".to_owned()),
                })
            }
            _ => None,
        }
    }
}

fn main() -> Result<()> {
    let Arguments { size, rate, file } = Arguments::parse();
    let (inspections, asked) = channel();
    let writer = Arc::new(Writer { written: AtomicU64::new(0), inspections });
    let shown = Arc::clone(&writer);
    // Filled before it listens, so that whoever can connect finds all of it there.
    let count = (size / PAGE) as usize;
    let pages: Box<dyn Rewritten> = match file {
        Some(file) => {
            let pages = FilePages::new(&file, count);
            Box::new(pages.with_context(|| format!("cannot make {}", file.display()))?)
        }
        None => Box::new(Pages::new(count)),
    };
    std::thread::spawn(move || {
        if let Err(error) = write(pages, rate * MEGABYTE / PAGE, &shown.written, &asked) {
            eprintln!("bench-writer: {error}");
            // A server that does not write any more would be taken for one that does.
            std::process::exit(1);
        }
    });
    serve(&writer).with_context(|| format!("cannot listen on TCP port {PORT}"))
}

/// Writes, so many pages a second, until nobody is there to ask any more.
fn write(
    mut pages: Box<dyn Rewritten>,
    rate: u64,
    written: &AtomicU64,
    asked: &Receiver<Inspection>,
) -> std::io::Result<()> {
    let time_of = |count: u64| Duration::from_nanos(count * 1_000_000_000 / rate.max(1));
    let (mut start, mut count) = (Instant::now(), 0);
    loop {
        let asked =
            if rate == 0 { asked.recv().map_err(|_| RecvTimeoutError::Disconnected) } else { asked.recv_timeout(TICK) };
        match asked {
            Ok(sender) => {
                // Who asked may have gone.
                let _ = sender.send(pages.mismatches()?);
                (start, count) = (Instant::now(), 0);
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if start.elapsed().saturating_sub(time_of(count)) > MOST_BEHIND {
            (start, count) = (Instant::now(), 0);
        }
        while rate > 0 && time_of(count + 1) <= start.elapsed() {
            pages.rewrite_one()?;
            count += 1;
        }
        written.store(pages.written(), Ordering::Relaxed);
    }
}
