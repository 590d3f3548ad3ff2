//! Which pages of shared memory were written through the mappings of the container's processes.
//!
//! Each process's mappings are watched by a userfaultfd of their own ([`WriteWatch`]). A page counts as written unless the
//! process's page table proves that it was not; so whatever is not watched (yet), was mapped anew, or was thrown out of the
//! page table, counts as written.
//!
//! A page table loses its evidence when a process unmaps pages, moves them or throws away their content, and a process that has
//! been forked has one that nobody watches. So userfaultfd also reports these ([`Doubt`]): the kernel holds the process until the
//! event has been read, which a thread of its own does at once. This thread waits for nothing else: another one ends watches,
//! which takes time. If the agent dies the kernel releases the waiting process; only an agent that is stopped (by a debugger,
//! say) keeps the container's forks and unmaps waiting.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tranship_sys::pagemap::Pagemap;
use tranship_sys::userfault::{Change, Event};
use tranship_sys::writes::WriteWatch;
use tranship_types::PageRange;

use crate::maps::Mapping;
use crate::page_set::PageSet;
use crate::register;

/// A shared mapping of an object, or a private one in reserved huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Pid on this node.
    pub pid: u32,
    /// The object's.
    pub inode: u64,
    /// Its addresses.
    pub range: PageRange,
    /// Where in the object the first one is.
    pub offset: u64,
    /// It consists of reserved huge pages.
    pub huge: bool,
    /// It is a private one.
    pub private: bool,
}

impl View {
    /// Where the object's first byte is, or would be if all of it were mapped; the same for each part of a mapping, and before and after
    /// it grows or shrinks.
    pub fn base(&self) -> u64 {
        self.range.start.wrapping_sub(self.offset)
    }

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

/// What a process did of which its page table tells nothing.
#[derive(Debug, Default, Clone)]
pub(super) struct Doubt {
    /// It forked, or moved mappings: it, or its child, may have written to any object that it has.
    everything: bool,
    /// It moved mappings, perhaps after they were listed for a look that has not come yet: that look tells nothing either.
    next_look: bool,
    /// What it unmapped, or whose content it threw away.
    dropped: PageSet,
}

impl Doubt {
    fn add(&mut self, change: &Change) {
        match *change {
            Change::Fork(_) => self.everything = true,
            Change::Remap { .. } => (self.everything, self.next_look) = (true, true),
            Change::Remove { start, end } | Change::Unmap { start, end } => {
                self.dropped.insert(PageRange { start, end });
            }
        }
    }

    /// What was unmapped, or whose content was thrown away; `None`: more than that was done.
    pub fn dropped(&self) -> Option<&PageSet> {
        (!self.everything).then_some(&self.dropped)
    }

    /// Whether it concerns an object of `size` bytes whose first byte would be at `base`.
    pub fn concerns(&self, base: u64, size: u64) -> bool {
        let range = base.checked_add(size).map(|end| PageRange { start: base, end });
        // It wraps around where an object is mapped in part, below the address that its length would need.
        let dropped = range.map_or(!self.dropped.is_empty(), |range| !self.dropped.within(range).is_empty());
        self.everything || dropped
    }
}

/// What the thread that reads events shares with who wants to know of them.
#[derive(Debug, Default)]
struct Events {
    watches: HashMap<u32, Arc<WriteWatch>>,
    /// By process.
    doubts: HashMap<u32, Doubt>,
}

/// What takes time to end, handed to whoever has it.
type Ending = Sender<Box<dyn Send>>;

/// What a look at a view has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// It is not registered as a whole.
    Unwatched,
    /// All that was written was told.
    Written,
    Unknown,
}

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

    /// What processes did since this was asked last.
    pub fn take_doubts(&self) -> HashMap<u32, Doubt> {
        let mut events = lock(&self.events);
        let doubts = std::mem::take(&mut events.doubts);
        let moved = doubts.iter().filter(|(_, doubt)| doubt.next_look);
        events.doubts = moved.map(|(pid, _)| (*pid, Doubt { everything: true, ..Doubt::default() })).collect();
        doubts
    }

    /// Watches the processes that are among `pids` and no others.
    pub fn keep(&self, pids: &HashSet<u32>) {
        // Ended when the lock is given back, which the reader must not wait for.
        let gone: Vec<_> = lock(&self.events).watches.extract_if(|pid, _| !pids.contains(pid)).collect();
        drop(gone);
    }

    /// Whether the whole of a view is registered.
    pub fn is_watched(&self, view: &View) -> bool {
        Pagemap::open(view.pid).is_ok_and(|pagemap| pagemap.is_watched(view.range.start, view.range.end))
    }

    /// Calls `found` with every run of addresses of a view that was written since it was armed, if it is `asked` for that.
    pub fn written(&self, view: &View, asked: bool, found: impl FnMut(u64, u64)) -> Seen {
        let PageRange { start, end } = view.range;
        match Pagemap::open(view.pid) {
            // The kernel may have ended the watch and left marks that prove nothing.
            Ok(pagemap) if !pagemap.is_watched(start, end) => Seen::Unwatched,
            Ok(pagemap) if asked => {
                let told = if view.huge {
                    pagemap.unproven_huge(start, end, found)
                } else {
                    pagemap.unproven(start, end, found)
                };
                told.map_or(Seen::Unknown, |()| Seen::Written)
            }
            _ => Seen::Unknown,
        }
    }

    /// Registers views of one process, which must be armed then. `pids`: the processes that may have its memory.
    pub fn register(&self, pid: u32, pids: &[u32], views: &[View]) {
        let wanted = |mapping: &Mapping| {
            let same = |view: &View| view.base() == mapping.range.start.wrapping_sub(mapping.offset);
            let is = |view: &&View| view.inode == mapping.inode && view.private == mapping.private && same(view);
            views.iter().filter(is).any(|view| view.range.intersection(&mapping.range).is_some())
        };
        let known = lock(&self.events).watches.get(&pid).cloned();
        let registered = known.map(|watch| register::whole_mappings(&watch, pid, pids, wanted));
        let is_gone = |error: &io::Error| error.raw_os_error() == Some(Errno::ESRCH as i32);
        if registered.is_some_and(|registered| !registered.is_err_and(|error| is_gone(&error))) {
            return;
        }
        // A new process, or one that has executed another program.
        let Ok(watch) = WriteWatch::inject_telling_events(pid).map(Arc::new) else { return };
        let replaced = lock(&self.events).watches.insert(pid, Arc::clone(&watch));
        drop(replaced);
        match self.epoll.add(&*watch, EpollEvent::new(EpollFlags::EPOLLIN, u64::from(pid))) {
            // There are no events before that.
            Ok(()) => drop(register::whole_mappings(&watch, pid, pids, wanted)),
            Err(_) => drop(forget(&self.events, pid)),
        }
    }

    /// Protects addresses of a process: what is written to them from now on is found. What is not registered goes on to count as written.
    pub fn arm(&self, pid: u32, ranges: &[PageRange]) {
        let Some(watch) = lock(&self.events).watches.get(&pid).cloned() else { return };
        ranges.iter().for_each(|range| drop(watch.protect(range.start, range.end)));
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
            Err(Errno::EINTR) => continue,
            Err(_) => return,
        };
        for event in &ready[..count] {
            if event.data() == END {
                return;
            }
            let pid = event.data() as u32;
            let mut all = lock(events);
            let Some(watch) = all.watches.get(&pid).cloned() else { continue };
            // The process goes on when the event has been read: whoever takes the doubts after that finds this one.
            let event = watch.next_event();
            match &event {
                Ok(Some(Event::Changed(change))) => all.doubts.entry(pid).or_default().add(change),
                Ok(_) => {}
                Err(_) => all.doubts.entry(pid).or_default().everything = true,
            }
            drop(all);
            // Nobody receives only if that thread could not go on, and then things end here.
            let _ = match event {
                // Not kept: a new process counts as having written everything.
                Ok(Some(Event::Changed(Change::Fork(child)))) => {
                    // SAFETY: of the event that was just read, of this watch.
                    let child = unsafe { watch.child(child) };
                    ending.send(Box::new((watch, child)))
                }
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
