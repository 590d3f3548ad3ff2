//! Which pages of shared memory were written through the mappings of the container's processes.
//!
//! Each process's mappings are watched by a userfaultfd of their own ([`WriteWatch`]). A page counts as written unless the
//! process's page table proves that it was not; so whatever is not watched (yet), was mapped anew, or was thrown out of the
//! page table, counts as written.
//!
//! What a page table cannot tell is what processes did that are gone, and that content was thrown away (MADV_REMOVE) and the
//! page read again. So the watch also tells of forks and of that: the kernel holds the process until it has been read, which
//! a thread of its own does at once.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tranship_sys::pagemap::Pagemap;
use tranship_sys::writes::WriteWatch;
use tranship_types::PageRange;

/// A shared mapping of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Pid on this node.
    pub pid: u32,
    /// Its addresses.
    pub range: PageRange,
    /// Where in the object the first one is.
    pub offset: u64,
}

impl View {
    /// Where in the object a run of its addresses is.
    pub fn inside(&self, start: u64, end: u64) -> PageRange {
        let offset = |address: u64| address - self.range.start + self.offset;
        PageRange { start: offset(start), end: offset(end) }
    }

    /// The addresses of what lies in `range` of the object.
    pub fn addresses(&self, range: PageRange) -> Option<PageRange> {
        let all = self.inside(self.range.start, self.range.end).intersection(&range)?;
        let address = |offset: u64| offset - self.offset + self.range.start;
        Some(PageRange { start: address(all.start), end: address(all.end) })
    }
}

/// What the thread that reads events shares with who wants to know of them.
#[derive(Debug, Default)]
struct Events {
    watches: HashMap<u32, Arc<WriteWatch>>,
    /// Processes of which more was told than their page tables do.
    unsure: HashSet<u32>,
}

/// The watches over the processes of a container.
#[derive(Debug)]
pub(super) struct Watches {
    events: Arc<Mutex<Events>>,
    epoll: Arc<Epoll>,
    /// The thread ends when this is closed.
    end: Option<OwnedFd>,
    reader: Option<JoinHandle<()>>,
}

/// What the thread is told by for its own end; no process has this pid.
const END: u64 = 0;

fn lock(events: &Mutex<Events>) -> MutexGuard<'_, Events> {
    events.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watches {
    /// None yet. `None`: this kernel does not tell enough.
    pub fn new() -> io::Result<Option<Self>> {
        if !WriteWatch::tells_of_shared_memory() {
            return Ok(None);
        }
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let (gone, end) = io::pipe()?;
        epoll.add(&gone, EpollEvent::new(EpollFlags::EPOLLIN, END))?;
        let events = Arc::new(Mutex::new(Events::default()));
        let (waited, told) = (Arc::clone(&epoll), Arc::clone(&events));
        let reader = std::thread::Builder::new().name("shared".into()).spawn(move || {
            let _open = gone;
            read_events(&waited, &told);
        })?;
        Ok(Some(Self { events, epoll, end: Some(end.into()), reader: Some(reader) }))
    }

    /// The processes that have forked, or thrown away pages, since this was asked last.
    pub fn take_unsure(&self) -> HashSet<u32> {
        std::mem::take(&mut lock(&self.events).unsure)
    }

    /// Watches the processes that are among `pids` and no others.
    pub fn keep(&self, pids: &HashSet<u32>) {
        lock(&self.events).watches.retain(|pid, _| pids.contains(pid));
    }

    /// Calls `found` with every run of addresses of a view that was written since it was armed. False: nothing is known.
    pub fn written(&self, view: &View, found: impl FnMut(u64, u64)) -> bool {
        let PageRange { start, end } = view.range;
        Pagemap::open(view.pid).and_then(|pagemap| pagemap.unproven(start, end, found)).is_ok()
    }

    /// From now on tells of writes to these addresses of a process. What cannot be watched goes on to count as written.
    pub fn arm(&self, pid: u32, ranges: &[PageRange]) {
        let armed = |watch: &WriteWatch| -> io::Result<()> {
            for range in ranges {
                if watch.watch(range.start, range.end)? {
                    watch.protect(range.start, range.end)?;
                }
            }
            Ok(())
        };
        let known = lock(&self.events).watches.get(&pid).cloned();
        if known.is_some_and(|watch| armed(&watch).is_ok()) {
            return;
        }
        // A new process, or one that has executed another program.
        if let Ok(watch) = WriteWatch::inject_telling_events(pid)
            && self.epoll.add(&watch, EpollEvent::new(EpollFlags::EPOLLIN, u64::from(pid))).is_ok()
        {
            let _ = armed(&watch);
            lock(&self.events).watches.insert(pid, Arc::new(watch));
        }
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        // First the watches, which let go whoever is forking.
        lock(&self.events).watches.clear();
        self.end = None;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read_events(epoll: &Epoll, events: &Mutex<Events>) {
    let mut ready = [EpollEvent::empty(); 16];
    loop {
        let count = match epoll.wait(&mut ready, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(nix::errno::Errno::EINTR) => continue,
            Err(_) => return,
        };
        for event in &ready[..count] {
            if event.data() == END {
                return;
            }
            let pid = event.data() as u32;
            let mut all = lock(events);
            all.unsure.insert(pid);
            let Some(watch) = all.watches.get(&pid).cloned() else { continue };
            drop(all);
            // The child's own descriptor is closed at once: a new process counts as having written everything.
            match watch.next_event() {
                Ok(_) => {}
                Err(_) => {
                    let _ = epoll.delete(watch.as_fd());
                }
            }
        }
    }
}
