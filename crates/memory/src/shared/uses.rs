//! Whether an object was used since it was last looked at, as far as that cannot be seen in page tables.
//!
//! Page tables tell what was written through a mapping for as long as it is there. Whoever has an object open, or may attach
//! it, can also write to it without one, or map it, write and unmap it between two looks. The kernel notes when:
//!
//! - of a file, when it was last read or mapped (atime: its own tmpfs is mounted without `relatime`) and when it was last
//!   written or resized (ctime). Writes through mappings count here, too. Only who opens it with `O_NOATIME`, as we do, can
//!   map it unnoticed;
//! - of a segment, when it was last attached, which a fork does too, and when it was last detached, in seconds.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::time::{ClockId, clock_gettime};
use tranship_sys::segment;

/// How late the clock may be that these times are taken from, in nanoseconds: it goes on when the timer interrupts, at the
/// least each 10 ms.
const LATE: i64 = 20_000_000;
/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;

/// A moment, in nanoseconds since 1970: no use of an object after it has an earlier time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment(i64);

impl Moment {
    /// This one.
    pub fn now() -> io::Result<Self> {
        let now = clock_gettime(ClockId::CLOCK_REALTIME)?;
        Ok(Self(now.tv_sec() * SECOND + now.tv_nsec() - LATE))
    }
}

/// When an object was last used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Uses {
    /// In nanoseconds since 1970.
    times: [i64; 2],
    /// A use after the moment from which on it is watched has no time before this one.
    since: i64,
}

impl Uses {
    /// Those of a file until now, which is watched from `since` on.
    pub fn of_file(file: &File, since: Moment) -> io::Result<Self> {
        let found = file.metadata()?;
        let time = |seconds: i64, nanoseconds| seconds * SECOND + nanoseconds;
        let times = [time(found.atime(), found.atime_nsec()), time(found.ctime(), found.ctime_nsec())];
        Ok(Self { times, since: since.0 })
    }

    /// Those of the segments in a process's IPC namespace, with their numbers.
    pub fn of_segments(pid: u32, since: Moment) -> io::Result<Vec<(u64, Self)>> {
        let since = since.0 - since.0.rem_euclid(SECOND);
        Ok(Self::listed(&segment::list(pid)?, since))
    }

    pub fn listed(list: &str, since: i64) -> Vec<(u64, Self)> {
        let read = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let field = |number: usize| fields.get(number)?.parse::<i64>().ok();
            let times = [field(11)?, field(12)?].map(|seconds| seconds.saturating_mul(SECOND));
            Some((field(1)?.try_into().ok()?, Self { times, since }))
        };
        list.lines().filter_map(read).collect()
    }

    /// Whether nobody mapped a file between the moment from which `before` watched and now, as [`Self::none_since`] tells it.
    pub fn not_mapped_since(&self, before: &Self) -> bool {
        self.times[0] == before.times[0] && before.times[0] < before.since
    }

    /// Whether there was no use between the moment from which `before` watched and now. Where the clock cannot tell, there was.
    pub fn none_since(&self, before: &Self) -> bool {
        self.times == before.times && before.times.iter().all(|time| *time < before.since)
    }
}
