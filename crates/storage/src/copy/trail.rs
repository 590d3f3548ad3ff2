//! Which chunks of the files that interest us were written, by the kernel's own account.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tranship_sys::dirty_log::{DirtyLog, Written};

use super::content::CHUNK;

/// How often the kernel's rings are emptied, however little is in them, in ms.
const READ_EVERY: u16 = 100;

#[derive(Debug)]
struct State {
    log: DirtyLog,
    /// Files that are looked after, and what was written of them.
    files: HashMap<u64, BTreeSet<u64>>,
    /// How often not everything was told.
    losses: u64,
}

impl State {
    fn read(&mut self) {
        let files = &mut self.files;
        let complete = self.log.read(|Written { ino, start, end }| {
            if let Some(chunks) = files.get_mut(&ino) {
                chunks.extend(start / CHUNK..end.div_ceil(CHUNK));
            }
        });
        self.losses += u64::from(!complete);
    }
}

/// Follows what is written, from its start on.
#[derive(Debug)]
pub(crate) struct Trail {
    state: Arc<Mutex<State>>,
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trail {
    /// Begins to follow.
    pub fn start() -> io::Result<Self> {
        let log = DirtyLog::start()?;
        let events: Vec<OwnedFd> = log.descriptors().map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
        let state = Arc::new(Mutex::new(State { log, files: HashMap::new(), losses: 0 }));
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let shared = Arc::clone(&state);
        let thread = std::thread::Builder::new().name("file trail".into()).spawn(move || {
            loop {
                let mut fds: Vec<PollFd<'_>> = [&stopped]
                    .into_iter()
                    .chain(&events)
                    .map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN))
                    .collect();
                match poll(&mut fds, PollTimeout::from(READ_EVERY)) {
                    Err(Errno::EINTR) => {}
                    Err(_) => return,
                    Ok(_) if fds[0].any() != Some(false) => return,
                    Ok(_) => lock(&shared).read(),
                }
            }
        })?;
        Ok(Self { state, stop: Some(stop), thread: Some(thread) })
    }

    /// Looks after these files, too.
    pub fn follow(&self, files: impl Iterator<Item = u64>) {
        let mut state = lock(&self.state);
        for ino in files {
            state.files.entry(ino).or_default();
        }
    }

    /// What was written of these files since it was taken last, and how often something was lost so far.
    pub fn take(&self, of: &HashSet<u64>) -> (u64, HashMap<u64, BTreeSet<u64>>) {
        let mut state = lock(&self.state);
        state.read();
        let losses = state.losses;
        let written = state.files.iter_mut().filter(|(ino, chunks)| !chunks.is_empty() && of.contains(ino));
        (losses, written.map(|(ino, chunks)| (*ino, std::mem::take(chunks))).collect())
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
