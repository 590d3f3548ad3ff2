//! What engines, programs, files of the agent's and the kernel say.

use tranship_coordinator::fuzz as coordinator;
use tranship_criu::fuzz as criu;
use tranship_engine::fuzz as engine;
use tranship_memory::pager::fuzz as memory;
use tranship_network::fuzz as network;
use tranship_storage::fuzz as storage;
use tranship_sys::fuzz as sys;

use super::text;

/// The agent's configuration.
#[allow(dead_code, unused_imports, reason = "its text is read, and nothing is done with it")]
#[path = "../../crates/agent/src/config/mod.rs"]
mod config;
/// The agent's reader of CRIU's log.
#[allow(dead_code, unused_imports, reason = "a log is read, and not kept")]
#[path = "../../crates/agent/src/criu_log.rs"]
mod criu_log;
/// The preloaded library's readers. The library itself has functions in place of libc's.
#[allow(dead_code, reason = "records are read, and nothing is hidden")]
#[path = "../../crates/sys/preload/src/texts.rs"]
mod preload;

/// The agent's configuration, and CRIU's log.
pub fn agent_texts(data: &[u8]) {
    if let Ok(config) = config::Config::read(&text(data)) {
        assert_eq!(config.differences(&config), [""; 0]);
        assert!(config.peers.values().filter_map(|peer| peer.accept.as_ref()).all(|accept| accept.check().is_ok()));
    }
    let _ = criu_log::Cause::in_log(&text(data));
}

/// A group file, and an agent's answers to the command line.
pub fn command_line(data: &[u8]) {
    tranship_cli::fuzz::answer(data);
    tranship_cli::fuzz::texts(&text(data));
}

/// What the preloaded library reads: files in /proc, the agent's tables, its own records.
pub fn preloaded(data: &[u8]) {
    let text = text(data);
    let table = preload::Table::read(data);
    assert_eq!(table.ranges.len() + table.objects.len(), data.len() / 24);
    for resource in 0..16 {
        let _ = preload::limits_row(&text, resource);
    }
    let lines = text.lines().count();
    assert!(preload::segments(&text).count() <= lines && preload::without_file(&text).len() <= lines);
    assert!(preload::watched_files(&text).len() <= lines && preload::waits(&text).len() <= lines);
    assert!(preload::shared_objects(&text).len() <= lines);
    assert!(preload::zombies(&text).len() <= lines && preload::ends(&text).len() <= lines);
    let _ = preload::key_of(data);
}

/// The journal of a migration.
pub fn journal(data: &[u8]) {
    coordinator::journal(data);
}

/// A message to the pager.
pub fn pager_message(data: &[u8]) {
    memory::message(data);
}

/// CRIU's RPC, between an engine, the front and CRIU.
pub fn criu_rpc(data: &[u8]) {
    criu::rpc(data);
}

/// The table that the preloaded library reads, what CRIU says of itself, and the CPU.
pub fn criu_texts(data: &[u8]) {
    criu::table(&text(data));
    criu::preflight::zombies(&text(data));
    criu::system(&text(data));
}

/// containerd's messages.
pub fn containerd(data: &[u8]) {
    engine::containerd(data);
}

/// What runtimes say of themselves, files of `/etc`, tables of mounts.
pub fn engine_texts(data: &[u8]) {
    engine::texts(&text(data));
}

/// `/proc/PID/status`.
pub fn proc_status(data: &[u8]) {
    criu::preflight::status(&text(data));
}

/// `/proc/PID/fdinfo/FD`.
pub fn proc_fdinfo(data: &[u8]) {
    criu::preflight::fdinfo(&text(data));
}

/// `/proc/PID/maps` and `smaps`, for each of those who read them.
pub fn proc_maps(data: &[u8]) {
    criu::preflight::maps(&text(data));
    criu::smaps(data);
    memory::maps(&text(data));
    storage::copy::watched(data);
}

/// `/proc/PID/mountinfo`, for each of those who read it; `/proc/locks`.
pub fn proc_mountinfo(data: &[u8]) {
    criu::preflight::mountinfo(&text(data));
    storage::tables(data, &text(data));
    engine::texts(&text(data));
}

/// Other files of /proc and /sys.
pub fn proc_others(data: &[u8]) {
    criu::preflight::proc_others(data, &text(data));
    memory::segments(&text(data));
    sys::texts(data, &text(data));
    network::multicast(data, &text(data));
}

/// Entries of `/proc/PID/pagemap`.
pub fn pagemap(data: &[u8]) {
    sys::pagemap(data);
}

/// Records in rings of perf, BPF, fanotify and userfaultfd.
pub fn records(data: &[u8]) {
    sys::records(data);
    storage::copy::watched(data);
}

/// The kernel's description of its types.
pub fn btf(data: &[u8]) {
    sys::btf(data);
}

/// Netlink's frame.
pub fn netlink(data: &[u8]) {
    network::netlink(data);
}

/// Lists of rtnetlink.
pub fn rtnetlink(data: &[u8]) {
    network::rtnetlink(data);
}

/// Answers of sock_diag(7).
pub fn sock_diag(data: &[u8]) {
    criu::preflight::sock_diag(data);
    network::backlog(data);
}
