//! Runs the fuzz target that the environment variable `TARGET` names under libFuzzer: `scripts/fuzz`.
#![no_main]

use std::sync::LazyLock;

use tranship_fuzz::{TARGETS, Target, run};

/// The target of this process.
static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("TARGET").unwrap_or_default();
    TARGETS.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("TARGET={name} is none of the targets"))
});

libfuzzer_sys::fuzz_target!(
    // libfuzzer_sys ends the process at each panic, also at those of a dependency that the parser catches. Others it notices all the same.
    init: drop(std::panic::take_hook()),
    |data: &[u8]| run(**CHOSEN, data)
);
