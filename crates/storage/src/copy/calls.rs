//! Which chunks of files in tmpfs were written by calls, by the kernel's own account ([`CallLog`]).

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tranship_sys::call_log::{CallLog, Called};

use super::chunks::Chunks;
use super::content::CHUNK;
use super::reader::Reader;
use super::suspects::Device;
use super::trail::Part;

/// Files that are too many to be noted between two looks: what was written is lost then.
const TOO_MANY: usize = 100_000;

/// What is known of one filesystem.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// What of each file calls have written.
    pub parts: HashMap<u64, Part>,
    /// Files whose times tasks outside of the container have changed: they have begun to change the file, and nobody tells when they have done
    /// so, or have only read it.
    pub begun: HashSet<u64>,
    /// That could be any file.
    pub all_begun: bool,
}

impl Written {
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.begun.is_empty() && !self.all_begun
    }

    fn add(&mut self, Called { ino, start, end, begins, .. }: Called) {
        if begins {
            self.begun.insert(ino);
            return;
        }
        let part = self.parts.entry(ino).or_insert_with(|| Part::Chunks(Chunks::default()));
        match part {
            _ if end == u64::MAX => *part = Part::Whole,
            Part::Chunks(chunks) => chunks.add(start / CHUNK..end.div_ceil(CHUNK)),
            Part::Whole => {}
        }
    }

    /// Notes no more than it has room for. False: what of files was written is lost.
    fn limit(&mut self) -> bool {
        if self.begun.len() > TOO_MANY {
            self.begun.clear();
            self.all_begun = true;
        }
        let all = self.parts.len() <= TOO_MANY;
        if !all {
            self.parts.clear();
        }
        all
    }
}

#[derive(Debug)]
struct State {
    log: CallLog,
    /// Since it was taken last.
    files: HashMap<Device, Written>,
    /// How often not everything was told.
    losses: u64,
}

impl State {
    fn read(&mut self) {
        let Self { log, files, losses } = self;
        let mut complete = log.read(|called| {
            if let Some(written) = files.get_mut(&called.device) {
                written.add(called);
            }
        });
        for written in files.values_mut() {
            complete &= written.limit();
        }
        *losses += u64::from(!complete);
    }
}

/// Follows what is written to some filesystems, from its start on.
#[derive(Debug)]
pub(crate) struct Calls {
    state: Arc<Mutex<State>>,
    _reader: Reader,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Calls {
    /// Begins to follow what is written in these filesystems, which are those of the container whose first process is `init`.
    ///
    /// # Errors
    /// If the kernel does not tell, or there is no thread to be had.
    pub fn start(init: u32, devices: impl Iterator<Item = Device>) -> io::Result<Self> {
        let namespace = std::fs::metadata(format!("/proc/{init}/ns/mnt"))?.ino();
        let log = CallLog::start(u32::try_from(namespace).map_err(io::Error::other)?)?;
        let files = devices.map(|device| (device, Written::default())).collect();
        let state = Arc::new(Mutex::new(State { log, files, losses: 0 }));
        let shared = Arc::clone(&state);
        let reader = Reader::start("tmpfs calls", lock(&state).log.descriptors(), move || lock(&shared).read())?;
        Ok(Self { state, _reader: reader })
    }

    /// Whether there is nothing to take of a filesystem, if nothing more was lost than so often.
    pub(super) fn is_quiet(&self, device: Device, losses: u64) -> bool {
        let mut state = lock(&self.state);
        state.read();
        state.losses == losses && state.files.get(&device).is_none_or(Written::is_empty)
    }

    /// What calls that have ended since it was taken last have written in a filesystem, and how often something was lost so far.
    pub(super) fn take(&self, device: Device) -> (u64, Written) {
        let mut state = lock(&self.state);
        state.read();
        (state.losses, state.files.get_mut(&device).map(std::mem::take).unwrap_or_default())
    }

    /// Nothing is followed any more: calls go their usual way.
    pub(crate) fn end(&self) {
        lock(&self.state).log.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_noted_than_there_is_room_for() {
        let (mut begun, mut written) = <(Written, Written)>::default();
        for ino in 0..=TOO_MANY as u64 {
            assert!(begun.limit() && written.limit() && !begun.all_begun);
            let called = Called { device: (0, 1), ino, start: 0, end: u64::MAX, begins: true };
            begun.add(called);
            written.add(Called { begins: false, ..called });
        }
        assert!(begun.limit(), "what calls have written is known");
        assert!(begun.begun.is_empty() && begun.all_begun && !begun.is_empty());
        assert!(!written.limit());
        assert!(written.is_empty());
    }
}
