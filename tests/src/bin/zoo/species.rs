use std::path::Path;

use anyhow::{Result, bail};

use crate::{
    channels, files, limits, locks, memory, network, processes, sharing, signals, sysv, terminals, threads, timers,
    unix,
};

/// Looks once whether an animal is still what it was; an error is a complaint.
pub type Check = Box<dyn FnMut() -> Result<()>>;

/// A kind of animal: its name, the process that it lives in, and how it is set up. It gets an empty directory of its own.
pub struct Species {
    pub name: &'static str,
    pub cage: &'static str,
    pub settle: fn(&Path) -> Result<Check>,
    /// What CRIU does with it, where it cannot carry it. Such animals are wild: they run only when they are named.
    pub wild: Option<&'static str>,
}

const fn species(cage: &'static str, name: &'static str, settle: fn(&Path) -> Result<Check>) -> Species {
    Species { name, cage, settle, wild: None }
}

const fn wild(
    cage: &'static str,
    name: &'static str,
    settle: fn(&Path) -> Result<Check>,
    why: &'static str,
) -> Species {
    Species { name, cage, settle, wild: Some(why) }
}

/// Every animal. In one cage those that fork come before those that start threads.
pub const ALL: &[Species] = &[
    species("channels", "pipe", channels::pipe),
    species("channels", "fifo", channels::fifo),
    species("channels", "eventfd", channels::eventfd),
    species("channels", "epoll", channels::epoll),
    species("unix", "socketpair_stream", unix::stream),
    species("unix", "socketpair_datagram", unix::datagram),
    species("unix", "socketpair_seqpacket", unix::seqpacket),
    species("unix", "fd_in_flight", unix::descriptor_in_flight),
    species("unix", "unix_listener", unix::listener),
    species("unix", "unix_abstract_listener", unix::abstract_listener),
    species("unix", "unix_pending_connection", unix::pending_connection),
    species("terminals", "controlling_terminal", terminals::controlling),
    species("terminals", "pty", terminals::pty),
    species("terminals", "pty_processed_output", terminals::processed_output),
    species("files", "file_position", files::position),
    species("files", "deleted_file", files::deleted),
    species("files", "inotify", files::inotify),
    species("locks", "flock", locks::flock),
    species("locks", "posix_lock", locks::posix),
    species("locks", "ofd_lock", locks::open_file_description),
    species("network", "udp", network::udp),
    species("network", "udp_unread", network::unread),
    species("network", "multicast", network::multicast),
    species("network", "socket_options", network::uncarried_options),
    species("network", "tcp_listener", network::listener),
    species("network", "tcp_queued_data", network::queued_data),
    species("network", "tcp_half_closed", network::half_closed),
    species("network", "tcp_delayed_acknowledgements", network::delayed_acknowledgements),
    species("network", "tcp_full_window", network::full_window),
    species("network", "tcp_options", network::options),
    species("signals", "signals_pending", signals::pending),
    species("signals", "signal_dispositions", signals::dispositions),
    species("signals", "signalfd", signals::signalfd),
    species("timers", "timerfd", timers::timerfd),
    species("timers", "timerfd_expired", timers::expired),
    species("timers", "posix_timer", timers::posix),
    species("timers", "interval_timer", timers::interval),
    species("processes", "process_tree", processes::tree),
    species("processes", "forked_child", processes::forked_child),
    species("processes", "shared_anonymous", processes::shared_anonymous),
    species("processes", "zombies", processes::zombies),
    species("processes", "stopped_child", processes::stopped_child),
    species("processes", "sigchld", processes::child_signals),
    species("processes", "seccomp", processes::seccomp),
    species("processes", "capabilities", processes::capabilities),
    species("sysv", "sysv_shm", sysv::shared_memory),
    species("sysv", "sysv_shm_transient", sysv::transient),
    species("sysv", "sysv_sem", sysv::semaphores),
    species("sysv", "sysv_msg", sysv::messages),
    species("limits", "rlimits", limits::resource_limits),
    species("limits", "umask", limits::umask),
    species("limits", "cwd", limits::working_directory),
    species("limits", "environment", limits::environment),
    species("limits", "nice", limits::nice),
    species("limits", "identity", limits::identity),
    species("limits", "affinity", limits::affinity),
    species("memory", "brk_heap", memory::heap),
    species("memory", "prot_none", memory::inaccessible),
    species("memory", "read_only", memory::read_only),
    species("memory", "mlocked", memory::locked),
    species("memory", "sparse", memory::sparse),
    species("memory", "reserved_8t", memory::reserved),
    species("memory", "memfd", memory::memfd),
    species("memory", "file_map_private", memory::file_private),
    species("memory", "file_map_rewritten", memory::file_rewritten),
    species("memory", "file_map_shared", memory::file_shared),
    species("memory", "deleted_file_map", memory::deleted_file),
    species("memory", "rewritten_64m", memory::rewritten),
    species("memory", "memfd_written", memory::memfd_written),
    species("sharing", "shared_rewritten", sharing::rewritten),
    species("threads", "deep_stack", threads::deep_stack),
    species("threads", "thread_local", threads::thread_local),
    species("threads", "futex", threads::futex),
    wild("channels", "eventfd_semaphore", channels::eventfd_semaphore, "becomes a plain counter"),
    wild("channels", "io_uring", channels::io_uring, "refused: an io_uring"),
    wild("unix", "unix_pending_data", unix::pending_data, "refused: data sent before the accept"),
    wild("files", "inotify_unread", files::inotify_unread, "events that wait unread are dropped"),
    wild("files", "thread_file", threads::proc_file, "restore fails: an open file of /proc that belongs to a thread"),
    wild("network", "tcp_pending", network::pending, "refused: a TCP connection that waits to be accepted"),
];

/// Notices when something that should go on has stopped: complains after so many looks at the same value. Looks, not
/// seconds, so that time spent frozen does not count.
pub struct Watch {
    what: &'static str,
    last: u64,
    same: u32,
}

impl Watch {
    /// At least twenty seconds' worth of checks: a busy machine may let others of its processes run for seconds.
    const PATIENCE: u32 = 1000;

    pub fn new(what: &'static str) -> Self {
        Self { what, last: 0, same: 0 }
    }

    pub fn look(&mut self, value: u64) -> Result<()> {
        if value < self.last {
            bail!("{} went back from {} to {value}", self.what, self.last);
        }
        self.same = if value == self.last { self.same + 1 } else { 0 };
        self.last = value;
        if self.same >= Self::PATIENCE {
            self.same = 0;
            bail!("{} stands still at {value}", self.what);
        }
        Ok(())
    }
}

/// A value for each place that no other place has (the finaliser of SplitMix64).
pub fn pattern(place: u64) -> u64 {
    let mut z = place.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `length` bytes of the pattern that begins at `seed`.
pub fn pattern_bytes(seed: u64, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8) as u64).flat_map(|i| pattern(seed.wrapping_add(i)).to_le_bytes()).take(length).collect()
}

/// A small file of `/proc`, read by one system call: were it read in parts, a move between two of them would put together
/// what does not belong together.
pub fn read_proc(path: &str) -> Result<String> {
    let mut buffer = vec![0; 16 << 10];
    let length = std::io::Read::read(&mut std::fs::File::open(path)?, &mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// The value of a line `Key:\tvalue` of `/proc/self/status`.
pub fn status_line(key: &str) -> Result<String> {
    let text = read_proc("/proc/self/status")?;
    match text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':')) {
        Some(value) => Ok(value.trim().to_owned()),
        None => bail!("/proc/self/status has no line {key}"),
    }
}
