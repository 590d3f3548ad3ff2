//! How long a decision takes to be on the disk: `decisions DIRECTORY [N]` makes N journals there, one after the other, and prints the
//! median, the 99th percentile and the longest.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use tranship_coordinator::{Journal, Record, SourceStep};
use tranship_types::{MigrationId, Side};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().ok_or("decisions DIRECTORY [N]")?);
    let count: usize = arguments.next().map_or(Ok(200), |text| text.parse())?;
    let mut took = Vec::new();
    for n in 0..count.max(1) {
        let id: MigrationId = format!("m-{n}").parse()?;
        let (container, peer) = ("c".to_owned(), "b".parse()?);
        let begin = Record::Begin { id: id.clone(), side: Side::Source, container, peer, context: Value::Null };
        let mut journal = Journal::create(&directory, &id, &begin)?;
        for step in SourceStep::BEFORE_COMMIT {
            journal.append(&Record::Step { step: step.to_string() })?;
        }
        // A move takes at least so long, and the disk is not still busy with how it began.
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        journal.decide(&Record::Commit)?;
        took.push(start.elapsed().as_secs_f64() * 1e3);
        journal.close()?;
    }
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((share * took.len() as f64).ceil() as usize).saturating_sub(1)];
    println!("{count} decisions: median {:.2} ms, p99 {:.2} ms, longest {:.2} ms", at(0.5), at(0.99), at(1.0));
    Ok(())
}
