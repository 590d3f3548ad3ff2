//! The pager's loop: one thread, faults before everything else.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SendTimeout;
use nix::sys::time::{TimeSpec, TimeVal, TimeValLike};
use tranship_sys::arena::View;
use tranship_sys::descriptor;
use tranship_sys::schedule::{self, Standing};
use tranship_sys::userfault::Userfault;
use tranship_types::{AddressSpaceId, PageRange};

use super::control::{self, BATCH, Message, Status, StoredExtent};
use super::newest::Newest;
use super::objects::Objects;
use super::remote::Remote;
use super::space::{Space, Work};
use super::{CONTROL_SOCKET, DRAINED_FILE, LAZY_SOCKET, SHARED_TABLE};
use crate::index::Index;
use crate::page_set::PageSet;

/// CRIU's word for "the restore is finished" on the lazy-pages socket.
const RESTORE_FINISHED: i32 = 0x5253_5446;
/// How long may be put in place between two looks for faults; then follows a rest of the same length, in which the tasks that
/// are on this processor run: a thread whose fault was answered is woken just here.
const FILL_TIME: Duration = Duration::from_micros(100);
/// Bytes put in place between two looks at the clock. A machine whose memory is cold, or that is virtual and has given it back to
/// its host, takes 50 times as long for a page as another.
const FILL_PIECE: u64 = 16 << 10;
/// How long nothing is put in place after an answer that has woken a thread: it runs on the same processor, most likely into its next
/// fault, and would wait for what is put in place before that.
const AFTER_FAULT: Duration = Duration::from_micros(100);
/// But no longer between two steps: to put many pages in place takes a fifth of the time in which the faults on them are answered.
const LONGEST_REST: Duration = Duration::from_micros(400);
/// For how long after the resume that is so. By then a program has most of what it works with; and for as long as pages follow it, it depends on
/// both hosts.
const BROWNOUT: Duration = Duration::from_millis(200);
/// Extents that are taken note of between two looks for faults.
const FEW: usize = 32;

/// How soon is tried again what failed because an address space was changing.
const RETRY: Duration = Duration::from_millis(1);

/// How long an agent may leave an answer unread, in whole.
const AGENT_PATIENCE: i64 = 2;

/// A pager that cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// Its sockets cannot be made.
    #[error("the pager cannot listen in {directory:?}: {source}")]
    Listen {
        /// Where.
        directory: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("the pager cannot supply pages: {0}")]
    Serve(#[from] io::Error),
}

/// Serves one migration: `directory` is its own, `work` is criu's work directory. Returns when every page is in place
/// (then `drained.json` is in `directory`), or when told to quit.
pub fn run(directory: &Path, work: &Path) -> Result<(), PagerError> {
    let listen = || -> io::Result<(OwnedFd, UnixListener)> {
        // CRIU's socket first: once the control socket is there, both are.
        let lazy = UnixListener::bind(work.join(LAZY_SOCKET))?;
        Ok((control::listen_at(&directory.join(CONTROL_SOCKET))?, lazy))
    };
    let (control, lazy) = listen().map_err(|source| PagerError::Listen { directory: directory.to_owned(), source })?;
    let mut pager = Pager::new(control, lazy);
    pager.objects = Objects::new(directory.join(SHARED_TABLE));
    while pager.turn()? {}
    if pager.status.drained {
        let text = serde_json::to_vec(&pager.status).map_err(io::Error::from)?;
        let path = directory.join(DRAINED_FILE);
        let nascent = path.with_extension("nascent");
        std::fs::write(&nascent, text)?;
        std::fs::rename(nascent, path)?;
        pager.tell_all();
    }
    Ok(())
}

struct Pager {
    control: OwnedFd,
    lazy: UnixListener,
    agents: Vec<OwnedFd>,
    /// Who is told what is wanted: one of the agents' sockets, taken from there.
    asked: Option<OwnedFd>,
    /// What is wanted and was not told yet.
    wanted: VecDeque<(AddressSpaceId, PageRange)>,
    criu: Option<UnixStream>,
    store: Option<View>,
    /// Bytes of the store that have been told of, from its beginning.
    used: u64,
    /// Everything that has come, by address space; kept whole until the tasks run.
    stored: HashMap<AddressSpaceId, Index>,
    /// Everything that has not come, likewise; where an older version of it has, that is still among what is stored.
    later: HashMap<AddressSpaceId, PageSet>,
    served: Vec<Space>,
    /// What came last, the newest at the end: what was written just before the freeze is what the tasks use first.
    newest: Newest,
    filling: bool,
    /// When the tasks were let go, as far as that was told.
    resumed: Option<Instant>,
    /// When the last step ended.
    filled: Instant,
    /// When the next one may begin.
    rested: Instant,
    /// The last attempt to fill put nothing in place: the address space is changing.
    stalled: bool,
    /// Places in the store of what is settled, which are to be given back.
    freed: PageSet,
    /// A forked child shares stored pages with its parent, so that none may be given back before the end.
    forked: bool,
    /// Memory that tasks share.
    objects: Objects,
    status: Status,
    /// What it has asked the scheduler for.
    standing: Standing,
}

impl Pager {
    fn new(control: OwnedFd, lazy: UnixListener) -> Self {
        Self {
            control,
            lazy,
            agents: Vec::new(),
            asked: None,
            wanted: VecDeque::new(),
            criu: None,
            store: None,
            used: 0,
            stored: HashMap::new(),
            later: HashMap::new(),
            served: Vec::new(),
            newest: Newest::default(),
            filling: false,
            resumed: None,
            filled: Instant::now(),
            rested: Instant::now(),
            stalled: false,
            freed: PageSet::default(),
            forked: false,
            objects: Objects::default(),
            status: Status::default(),
            standing: Standing::Ordinary,
        }
    }

    /// Waits for something to do and does it. Returns false when there is nothing more to come.
    fn turn(&mut self) -> Result<bool, PagerError> {
        // The newest pages are put in place while criu is still busy with letting the tasks go.
        let ahead = self.status.restored && self.status.named && !self.newest.is_empty();
        let busy = (self.filling || ahead) && self.served.iter().any(|s| !s.pending.is_empty());
        // To answer is short work; to fill a large store is not.
        let standing = if busy { Standing::Favoured } else { Standing::Realtime };
        if std::mem::replace(&mut self.standing, standing) != standing {
            schedule::stand(standing);
        }
        let read = |fd| PollFd::new(fd, PollFlags::POLLIN);
        // The faults come first; whoever is told what is wanted says nothing, but may have no room or be gone.
        let mut polled: Vec<PollFd<'_>> = self.served.iter().map(|s| read(s.userfault.as_fd())).collect();
        let first_agent = polled.len();
        polled.extend(self.agents.iter().map(|agent| read(agent.as_fd())));
        let first_other = polled.len();
        polled.extend([read(self.control.as_fd()), read(self.lazy.as_fd())]);
        polled.extend(self.criu.iter().map(|criu| read(criu.as_fd())));
        let room = if self.wanted.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        polled.extend(self.asked.iter().map(|asked| PollFd::new(asked.as_fd(), room)));
        let changing = self.served.iter().any(|space| space.changing);
        let timeout = match (busy && !self.stalled, busy || changing) {
            (true, _) => Some(self.rested.saturating_duration_since(Instant::now())),
            (_, true) => Some(RETRY),
            _ => None,
        };
        match ppoll(&mut polled, timeout.map(TimeSpec::from), None) {
            Err(nix::errno::Errno::EINTR) => return Ok(true),
            Err(error) => return Err(io::Error::from(error).into()),
            Ok(_) => {}
        }
        let ready: Vec<bool> = polled.iter().map(|fd| fd.revents().is_some_and(|r| !r.is_empty())).collect();
        let hung_up = self.asked.is_some()
            && polled
                .last()
                .is_some_and(|fd| fd.revents().is_some_and(|r| r.intersects(PollFlags::POLLIN | PollFlags::POLLHUP)));
        drop(polled);

        for (index, ready) in ready[..first_agent].iter().enumerate() {
            if *ready || self.served[index].changing {
                self.answer(index)?;
            }
        }
        let mut quit = false;
        for index in (0..first_other - first_agent).rev().filter(|index| ready[first_agent + index]) {
            quit |= self.hear(index)?;
        }
        if self.criu.is_some() && ready[first_other + 2] {
            self.hear_criu()?;
        }
        if ready[first_other + 1] {
            self.criu = Some(self.lazy.accept()?.0);
            // A restore that is done again starts with nothing in place.
            self.served.clear();
            self.freed = PageSet::default();
            self.status.restored = false;
        }
        if ready[first_other] {
            let agent = descriptor::accept(self.control.as_fd())?;
            // An agent that does not listen must not keep the tasks waiting.
            setsockopt(&agent, SendTimeout, &TimeVal::seconds(AGENT_PATIENCE)).map_err(io::Error::from)?;
            self.agents.push(agent);
        }
        if hung_up {
            self.asked = None;
        }
        self.ask();
        if busy && Instant::now() >= self.rested {
            self.fill()?;
        }
        self.served.retain(|space| !space.gone);
        if self.filling && self.status.named {
            self.served.retain(|space| !space.is_done());
            self.status.drained = self.served.is_empty();
        }
        Ok(!quit && !self.status.drained)
    }

    fn answer(&mut self, index: usize) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        let mut works = Vec::new();
        let space = &mut self.served[index];
        // All events that are there: a change of the address space must be read before a copy can succeed.
        while let Some(work) = space.answer(store, self.status.named)? {
            works.push(work);
        }
        let mut work = Work::default();
        space.retry(store, self.status.named, &mut work)?;
        works.push(work);
        works.into_iter().for_each(|work| self.account(work));
        Ok(())
    }

    fn account(&mut self, work: Work) {
        let woken = (work.faults > 0 && work.wanted.is_empty()) || !work.waited.is_empty();
        if woken && self.resumed.is_none_or(|resumed| resumed.elapsed() < BROWNOUT) {
            self.rested = self.rested.max((Instant::now() + AFTER_FAULT).min(self.filled + LONGEST_REST));
        }
        self.status.installed_bytes += work.installed;
        self.status.faults += work.faults;
        work.waited.iter().for_each(|waited| self.status.remote_faults.add(*waited));
        self.wanted.extend(work.wanted);
        if let Some(child) = work.child {
            self.forked = true;
            self.served.push(child);
        }
        work.freed.iter().for_each(|extent| self.freed.insert(extent.place()));
    }

    /// Gives memory of the store back, in large pieces: that takes longer than to put a page in place. What is left goes with the pager.
    fn give_back(&mut self) {
        let Some(store) = &self.store else { return };
        if self.filling && !self.forked {
            for blocks in self.freed.take_blocks() {
                // Memory that cannot be given back now goes with the pager, too.
                let _ = store.release(blocks.start, blocks.len());
            }
        }
    }

    /// Puts in place what nobody has asked for, for a while.
    fn fill(&mut self) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        // Where a thread waits for a page that has not come, it is looked for more often.
        let waited_for = self.served.iter().any(|space| !space.waiting.is_empty());
        let time = if waited_for { FILL_TIME / 4 } else { FILL_TIME };
        let mut work = Work::default();
        let begun = Instant::now();
        while begun.elapsed() < time {
            if let Some((id, range)) = self.newest.pop() {
                for space in self.served.iter_mut().filter(|space| space.origin == id) {
                    space.place(range, store, &mut work)?;
                }
                self.stalled = false;
                continue;
            }
            let space = self.served.iter_mut().find(|s| !s.pending.is_empty());
            let Some(space) = space.filter(|_| self.filling) else { break };
            self.stalled = !space.fill(FILL_PIECE, store, &mut work)?;
            if self.stalled {
                break;
            }
        }
        self.account(work);
        self.give_back();
        self.filled = Instant::now();
        self.rested = self.filled + (self.filled - begun);
        Ok(())
    }

    /// Tells what is wanted, as far as there is somebody to tell it to who has room.
    fn ask(&mut self) {
        while let (Some(asked), Some((space, range))) = (&self.asked, self.wanted.front()) {
            match descriptor::try_send(asked.as_fd(), &control::encode_ranges(*space, &[*range])) {
                Ok(true) => drop(self.wanted.pop_front()),
                Ok(false) => return,
                Err(_) => self.asked = None,
            }
        }
    }

    /// Deals with one message of an agent; returns whether to quit.
    fn hear(&mut self, index: usize) -> Result<bool, PagerError> {
        let Some(message) = control::receive(self.agents[index].as_fd()) else {
            self.agents.remove(index);
            return Ok(false);
        };
        match message {
            Message::Arena(file) => self.store = Some(View::new(file)?),
            Message::Extents(extents) => {
                for few in extents.chunks(FEW) {
                    self.take_in(few)?;
                    (0..self.served.len()).try_for_each(|index| self.answer(index))?;
                }
            }
            Message::Gone(id, range) => {
                if let Some(index) = self.stored.get_mut(&id) {
                    index.remove(range);
                }
                if let Some(later) = self.later.get_mut(&id) {
                    later.remove(range);
                }
                for space in self.served.iter_mut().filter(|space| space.origin == id) {
                    space.gone(range);
                }
                self.retry(id)?;
            }
            Message::Later(id, ranges) => {
                let later = self.later.entry(id).or_default();
                ranges.into_iter().for_each(|range| later.insert(range));
            }
            Message::Object(object, file) => self.objects.keep(object, file)?,
            Message::Named => {
                self.status.named = true;
                let ids: Vec<AddressSpaceId> = self.served.iter().map(|space| space.origin).collect();
                ids.into_iter().try_for_each(|id| self.retry(id))?;
            }
            Message::Fill => {
                if let Some(store) = &self.store {
                    self.status.peak_bytes = self.status.peak_bytes.max(store.resident()? + self.objects.resident());
                }
                self.filling = true;
                self.resumed.get_or_insert_with(Instant::now);
                (self.stored, self.later) = (HashMap::new(), HashMap::new());
            }
            Message::Status => self.tell(index),
            Message::Subscribe => {
                self.asked = Some(self.agents.remove(index));
                self.wanted.clear();
                let ids: Vec<AddressSpaceId> = self.served.iter().map(|space| space.origin).collect();
                self.served.iter_mut().for_each(Space::ask_again);
                ids.into_iter().try_for_each(|id| self.retry(id))?;
            }
            Message::Missing => self.tell_missing(index),
            Message::Reattach => {
                if let Some(store) = &self.store {
                    let _ = descriptor::send(self.agents[index].as_fd(), &self.used.to_le_bytes(), &[store.file()]);
                }
            }
            Message::Quit => return Ok(true),
        }
        Ok(false)
    }

    /// Takes note of pages that are in the store now. A task that is being served gets only those that it misses: what it
    /// has is newer, and what it threw away it does not want.
    fn take_in(&mut self, extents: &[StoredExtent]) -> Result<(), PagerError> {
        let mut touched = Vec::new();
        for StoredExtent { space: id, extent } in extents {
            self.used = self.used.max(extent.offset + extent.range.len());
            if !self.filling {
                self.stored.entry(*id).or_default().insert(*extent);
                self.newest.push(*id, extent.range);
                if let Some(later) = self.later.get_mut(id) {
                    later.remove(extent.range);
                }
            }
            let mut needed = !self.filling;
            for space in self.served.iter_mut().filter(|space| space.origin == *id) {
                space.arrived(*extent);
                needed = true;
            }
            if !needed {
                // Its tasks are gone, or have everything. What comes twice to one that has not may still be on its way from
                // just this place, and stays.
                self.freed.insert(extent.place());
            } else if !touched.contains(id) {
                touched.push(*id);
            }
        }
        touched.into_iter().try_for_each(|id| self.retry(id))
    }

    /// Tries again what the threads of these tasks wait for.
    fn retry(&mut self, id: AddressSpaceId) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        let mut work = Work::default();
        for space in self.served.iter_mut().filter(|space| space.origin == id && !space.waiting.is_empty()) {
            space.retry(store, self.status.named, &mut work)?;
        }
        self.account(work);
        Ok(())
    }

    /// Takes what criu hands over: for each task its pid and a userfaultfd (a zombie's pid is negative and brings
    /// nothing), at last the word that the restore is finished.
    fn hear_criu(&mut self) -> Result<(), PagerError> {
        let Some(criu) = &mut self.criu else { return Ok(()) };
        let mut word = [0; 4];
        if criu.read_exact(&mut word).is_err() {
            self.criu = None;
            return Ok(());
        }
        let word = i32::from_le_bytes(word);
        if word == RESTORE_FINISHED {
            self.status.restored = true;
        } else if word > 0 {
            let mut byte = [0; 1];
            let (_, descriptors) = descriptor::receive(criu.as_fd(), &mut byte)?;
            let Some(fd) = descriptors.into_iter().next() else {
                return Err(io::Error::other(format!("criu named task {word} but handed over no descriptor")).into());
            };
            let id = AddressSpaceId(word.unsigned_abs());
            let remote = self.later.get(&id).cloned().unwrap_or_default();
            let pending = self.stored.get(&id).cloned().unwrap_or_default();
            self.served.push(Space::new(id, Userfault::from(fd), pending, Remote::new(remote)));
        }
        Ok(())
    }

    fn tell(&mut self, index: usize) {
        self.status.pending_bytes = self.served.iter().map(|s| s.pending.bytes()).sum();
        self.status.remote_bytes = match self.filling {
            true => self.served.iter().map(|s| s.remote.bytes()).sum(),
            false => self.later.values().map(PageSet::bytes).sum(),
        };
        self.status.waiting = self.served.iter().map(|s| s.waiting.len() as u64).sum();
        if let Ok(text) = serde_json::to_vec(&self.status) {
            // An agent that does not listen is dropped when it hangs up.
            let _ = descriptor::send(self.agents[index].as_fd(), &text, &[]);
        }
    }

    fn tell_all(&mut self) {
        (0..self.agents.len()).for_each(|index| self.tell(index));
    }

    /// What has not come, by the source's addresses.
    fn missing(&self) -> Vec<(AddressSpaceId, Vec<PageRange>)> {
        if !self.filling {
            return self.later.iter().map(|(id, later)| (*id, later.all())).collect();
        }
        let mut all: HashMap<AddressSpaceId, PageSet> = HashMap::new();
        for space in &self.served {
            let missing = all.entry(space.origin).or_default();
            space.remote.at_source().into_iter().for_each(|range| missing.insert(range));
        }
        all.into_iter().map(|(id, missing)| (id, missing.all())).collect()
    }

    fn tell_missing(&self, index: usize) {
        let socket = self.agents[index].as_fd();
        for (id, ranges) in self.missing() {
            for batch in ranges.chunks(BATCH) {
                // An agent that does not listen asks again.
                let _ = descriptor::send(socket, &control::encode_ranges(id, batch), &[]);
            }
        }
        let _ = descriptor::send(socket, &control::encode_ranges(AddressSpaceId(0), &[]), &[]);
    }
}
