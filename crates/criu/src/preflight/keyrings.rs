//! Rules about kernel keyrings (keyrings(7)), of which CRIU knows nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::OnceLock;

use tranship_sys::keyrings::{Keyring, KeyringKind, KeyringReader};

use super::Look;
use super::container::{Container, Task};

/// Loaded once: the kernel's description of its types is large.
static READER: OnceLock<Option<KeyringReader>> = OnceLock::new();

/// Refuses containers with keys. A session keyring that is not theirs alone does not count: it is what the engine was started with.
pub(super) fn check(container: &Container, look: &mut Look) {
    let Some(reader) = READER.get_or_init(|| KeyringReader::load().ok()) else {
        look.note(
            "kernel keyrings cannot be looked at on this kernel: keys that programs have added would be lost"
                .to_owned(),
        );
        return;
    };
    // Without those of the engine, more is refused.
    let engine = reader.read(container.first().status.ppid).unwrap_or_default();
    let engine: HashSet<i32> = engine.iter().map(|ring| ring.serial).collect();
    let mut found: BTreeMap<i32, (&Task, Keyring)> = BTreeMap::new();
    for task in container.tasks.values().chain(container.entered.values()).filter(|task| !task.zombie()) {
        let rings = reader.read(task.pid).unwrap_or_else(|error| {
            look.block_unread(task, &error);
            Vec::new()
        });
        for ring in rings.into_iter().filter(|ring| ring.has_keys && !engine.contains(&ring.serial)) {
            found.entry(ring.serial).or_insert((task, ring));
        }
    }
    for (task, ring) in found.into_values() {
        let kind = match ring.kind {
            KeyringKind::Session => "session",
            KeyringKind::Process => "process",
            KeyringKind::Thread => "thread",
        };
        let what = format!("has keys in its {kind} keyring (add_key), which would be lost");
        let remedy = "have the program remove them (keyctl clear)";
        look.block(task.blocker(&what, remedy).allowable("keyrings"));
    }
}
