//! The fuzz targets of `fuzz/`, run for a moment each on their seeds and on changed ones, with the compiler that builds the product.
//!
//! A target must not panic, nor take long, nor more memory than the limit of this program. `TRANSHIP_FUZZ_SECONDS` is a time for all
//! targets together in place of a number of inputs, `TRANSHIP_SEED` the number that the changes follow from.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};

#[path = "fuzz_targets/change.rs"]
mod change;
#[path = "fuzz_targets/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/src/lib.rs"]
mod targets;

use change::Changes;
use targets::{TARGETS, Target};

/// Changed inputs of each target, so that each run tries the same ones.
const INPUTS: usize = 3000;
/// Longest input, in bytes: many times that of the seeds.
const LONGEST: usize = 64 << 10;
/// Memory of this program: what a parser allocates for what is announced and does not come shows here.
const MEMORY: u64 = 2 << 30;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// The seeds of a target, by their names.
fn seeds_of(name: &str) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(directory().join("seeds").join(name)).into_iter().flatten().flatten();
    files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect()
}

/// Runs a target once; names the input if it fails.
fn run(target: Target, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| targets::run(target, input))).is_err() {
        let name = target.0;
        let kept = std::env::temp_dir().join(format!("tranship-fuzz-{name}"));
        std::fs::write(&kept, input).unwrap();
        panic!("the target {name} failed with the input {}: {:?}", kept.display(), input.escape_ascii().to_string());
    }
}

#[test]
fn every_target_has_seeds_and_a_line_in_the_list() {
    let list = std::fs::read_to_string(directory().join("README.md")).unwrap();
    let mut all = 0;
    for (name, _) in TARGETS {
        assert!(list.contains(&format!("`{name}`")), "fuzz/README.md lacks {name}");
        let seeds = seeds_of(name);
        assert!(!seeds.is_empty(), "{name} has no seeds");
        all += seeds.values().map(Vec::len).sum::<usize>();
    }
    assert!(all < 300_000, "the seeds have {all} bytes");
    let directories = std::fs::read_dir(directory().join("seeds")).unwrap().count();
    assert_eq!(directories, TARGETS.len(), "seeds without a target");
}

#[test]
fn seeds_of_messages_are_read() {
    seeds::are_read(&directory().join("seeds"));
}

#[test]
fn no_input_makes_a_parser_panic_or_take_long() {
    setrlimit(Resource::RLIMIT_AS, MEMORY, MEMORY).unwrap();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<f64>().ok());
    let each = number("TRANSHIP_FUZZ_SECONDS").map(|all| Duration::from_secs_f64(all / TARGETS.len() as f64));
    let seed = number("TRANSHIP_SEED").unwrap_or(1.0) as u64;
    for &target @ (name, _) in TARGETS {
        // Not by a macro, whose text would be kept back: a program that lacks memory ends at once.
        let _ = writeln!(std::io::stderr(), "fuzz target {name}, seed {seed}");
        let seeds: Vec<Vec<u8>> = seeds_of(name).into_values().collect();
        let start = Instant::now();
        for seed in &seeds {
            run(target, seed);
            // What takes time with the square of the length shows here.
            let times = LONGEST / seed.len().max(1);
            run(target, &seed.repeat(times));
        }
        let mut changes = Changes::new(seed, &seeds);
        for tried in 0.. {
            if each.map_or(tried == INPUTS, |each| start.elapsed() > each) {
                break;
            }
            run(target, changes.next(LONGEST));
        }
    }
}

/// The seeds are made anew by this, with real kernel objects: `cargo test -p tranship-agent --test fuzz_targets -- --ignored`. Needs root.
#[test]
#[ignore = "writes into the source tree"]
fn make_seeds() {
    seeds::make(&directory().join("seeds"));
    // Those that a parser refuses at once are worth little; they are looked at by hand.
    every_target_has_seeds_and_a_line_in_the_list();
}
