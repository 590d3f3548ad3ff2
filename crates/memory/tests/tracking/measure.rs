//! What each way costs: `cargo test --release -p tranship-memory --test tracking -- measure [MIB]`.

use std::time::Instant;

use tranship_memory::tracker::Method;

use crate::mirror::Mirror;
use crate::raw::PAGE;
use crate::subject::Subject;

/// What it is called with.
pub const ARGUMENT: &str = "measure";
const TIMES: usize = 5;

/// Prints medians in ms, for so many MiB in pages of 4 KiB, each of which is written once between two looks.
pub fn main(mib: usize) {
    let pages = (mib << 20) / PAGE;
    println!("ms for {mib} MiB       first look  idle look  look, all written  bytes left  write all pages");
    let mut subject = Subject::start();
    let start = subject.fills(pages, 1);
    let untracked = median(|| ms(|| subject.writes(start, pages, 2)));
    println!("{:16} {:>65.1}", "not tracked", untracked);
    for method in Method::ALL.into_iter().filter(|method| method.available().is_ok()) {
        let pids = [subject.pid()];
        let mut mirror = Mirror::new(method);
        let first = ms(|| drop(mirror.look(&pids)));
        let idle = median(|| ms(|| drop(mirror.look(&pids))));
        let left = median(|| ms(|| assert_eq!(mirror.left(&pids) >> 20, 0)));
        let (mut looks, mut value) = (Vec::new(), 2);
        let written = median(|| {
            value += 1;
            let written = ms(|| subject.writes(start, pages, value));
            looks.push(ms(|| drop(mirror.look(&pids))));
            written
        });
        looks.sort_by(f64::total_cmp);
        let look = looks[TIMES / 2];
        println!("{:16} {first:14.1} {idle:10.1} {look:18.1} {left:11.1} {written:16.1}", method.to_string());
    }
}

fn ms(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64() * 1e3
}

fn median(mut work: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..TIMES).map(|_| work()).collect();
    all.sort_by(f64::total_cmp);
    all[TIMES / 2]
}
