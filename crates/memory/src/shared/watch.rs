//! Which pages of shared memory were written through the mappings of the container's processes.
//!
//! Each process's mappings are watched by a userfaultfd of their own ([`WriteWatch`]). A page counts as written unless the
//! process's page table proves that it was not; so whatever is not watched (yet), was mapped anew, or was thrown out of the
//! page table, counts as written.
//!
//! What a page table cannot tell is what processes did that are gone, and that content was thrown away (MADV_REMOVE) and the
//! page read again. So the watch also tells of forks and of that: the kernel holds the process until it has been read, which
//! a thread of its own does at once. This thread waits for nothing else: what takes time, as ending a watch does, another
//! thread does. If the agent dies the kernel lets go whoever waits; only an agent that is stopped (by a debugger, say) keeps
//! the container's forks waiting.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tranship_sys::pagemap::Pagemap;
use tranship_sys::userfault::{Change, Event};
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

/// What takes time to end, handed to whoever has it.
type Ending = Sender<Box<dyn Send>>;

/// The watches over the processes of a container.
#[derive(Debug)]
pub(super) struct Watches {
    events: Arc<Mutex<Events>>,
    epoll: Arc<Epoll>,
    /// The reading thread ends when this is closed, and the one that ends things then.
    end: Option<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
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
        let (ending, ended) = channel::<Box<dyn Send>>();
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let reader = named("shared").spawn(move || {
            let _open = gone;
            read_events(&waited, &told, &ending);
        })?;
        let ender = named("shared-end").spawn(move || ended.into_iter().for_each(drop))?;
        Ok(Some(Self { events, epoll, end: Some(end.into()), threads: vec![reader, ender] }))
    }

    /// The processes that have forked, or thrown away pages, since this was asked last.
    pub fn take_unsure(&self) -> HashSet<u32> {
        std::mem::take(&mut lock(&self.events).unsure)
    }

    /// Watches the processes that are among `pids` and no others.
    pub fn keep(&self, pids: &HashSet<u32>) {
        // Ended when the lock is given back, which the reader must not wait for.
        let gone: Vec<_> = lock(&self.events).watches.extract_if(|pid, _| !pids.contains(pid)).collect();
        drop(gone);
    }

    /// Calls `found` with every run of addresses of a view that was written since it was armed. False: nothing is known.
    pub fn written(&self, view: &View, found: impl FnMut(u64, u64)) -> bool {
        let PageRange { start, end } = view.range;
        let look = |pagemap: Pagemap| match pagemap.is_watched(start, end) {
            true => pagemap.unproven(start, end, found),
            // The kernel may have ended the watch and left marks that prove nothing.
            false => Err(io::ErrorKind::NotFound.into()),
        };
        Pagemap::open(view.pid).and_then(look).is_ok()
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
        let Ok(watch) = WriteWatch::inject_telling_events(pid).map(Arc::new) else { return };
        let replaced = lock(&self.events).watches.insert(pid, Arc::clone(&watch));
        drop(replaced);
        match self.epoll.add(&*watch, EpollEvent::new(EpollFlags::EPOLLIN, u64::from(pid))) {
            // Nothing is told of before that.
            Ok(()) => drop(armed(&watch)),
            Err(_) => drop(forget(&self.events, pid)),
        }
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        // First the watches, which let go whoever is forking.
        self.keep(&HashSet::new());
        self.end = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Takes out the watch over a process: what is not watched counts as written.
fn forget(events: &Mutex<Events>, pid: u32) -> Option<Arc<WriteWatch>> {
    lock(events).watches.remove(&pid)
}

fn read_events(epoll: &Epoll, events: &Mutex<Events>, ending: &Ending) {
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
            // Nobody receives only if that thread could not go on, and then things end here.
            let _ = match watch.next_event() {
                // Not kept: a new process counts as having written everything.
                Ok(Some(Event::Changed(Change::Fork(child)))) => ending.send(Box::new(watch.child(child))),
                Ok(_) => ending.send(Box::new(watch)),
                // A process that waits for an event to be read, which cannot be (there is no descriptor for the child's watch
                // left), goes on when its own watch ends.
                Err(_) => {
                    let _ = epoll.delete(watch.as_fd());
                    ending.send(Box::new((watch, forget(events, pid))))
                }
            };
        }
    }
}
