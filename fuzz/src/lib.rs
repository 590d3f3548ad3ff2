//! Fuzz targets: one function for each parser of bytes that come from a peer, a container, an engine or the kernel.
//! `README.md` beside this has the list. A test of `crates/agent` includes this file and runs the same functions on the corpora
//! and on changed inputs, so that the targets are exercised also where no nightly compiler is.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

pub mod local;
pub mod peer;
pub mod wire;

/// A target: its name, which is also that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// CPU time that one input may take. They take less than a hundredth of it.
pub const LIMIT: Duration = Duration::from_secs(1);

/// Runs a target once. Panics if the parser does, or if it takes more CPU time than [`LIMIT`].
pub fn run((name, target): Target, input: &[u8]) {
    let cpu = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock of this thread"));
    let start = cpu();
    target(input);
    let took = cpu().saturating_sub(start);
    assert!(took < LIMIT, "the target {name} took {took:?} for {} bytes", input.len());
}

/// All targets.
pub const TARGETS: &[Target] = &[
    // From a peer, on a link.
    ("frame_header", wire::frame_header),
    ("hello", wire::hello),
    ("welcome", wire::welcome),
    ("stream", wire::stream),
    ("packed", wire::packed),
    ("runs", wire::runs),
    ("file", wire::file),
    ("message", peer::message),
    ("tree_op", peer::tree_op),
    ("offered", peer::offered),
    ("oci", peer::oci),
    ("parameters", peer::parameters),
    ("ruleset", peer::ruleset),
    ("conntrack", peer::conntrack),
    ("held", peer::held),
    ("criu_images", peer::criu_images),
    ("certificate", peer::certificate),
    ("archive", peer::archive),
    // From the agent's users, and from its own files.
    ("api", peer::api),
    ("journal", local::journal),
    ("pager_message", local::pager_message),
    ("criu_rpc", local::criu_rpc),
    ("criu_texts", local::criu_texts),
    ("agent_texts", local::agent_texts),
    ("command_line", local::command_line),
    ("preloaded", local::preloaded),
    // From engines.
    ("containerd", local::containerd),
    ("engine_texts", local::engine_texts),
    // From the kernel, about containers.
    ("proc_status", local::proc_status),
    ("proc_fdinfo", local::proc_fdinfo),
    ("proc_maps", local::proc_maps),
    ("proc_mountinfo", local::proc_mountinfo),
    ("proc_others", local::proc_others),
    ("pagemap", local::pagemap),
    ("records", local::records),
    ("btf", local::btf),
    ("netlink", local::netlink),
    ("rtnetlink", local::rtnetlink),
    ("sock_diag", local::sock_diag),
];

/// Input as text: what is not UTF-8 is replaced, as readers of /proc do.
fn text(data: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(data)
}
