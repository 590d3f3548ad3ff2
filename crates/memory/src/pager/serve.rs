//! The pager's loop: one thread, faults before everything else.

use std::collections::{HashMap, VecDeque};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tranship_sys::arena::View;
use tranship_sys::descriptor;
use tranship_sys::guard_log::GuardLog;
use tranship_sys::journal::Journal;
use tranship_sys::schedule::{self, Standing};
use tranship_types::{AddressSpaceId, PageRange};

use super::control::{self, Status};
use super::guards::Guards;
use super::newest::Newest;
use super::objects::Objects;
use super::space::{Space, Work};
use super::takeover::{DONE, UNSUBSCRIBED};
use super::{CONTROL_SOCKET, DRAINED_FILE, LAZY_SOCKET, SHARED_TABLE, keeper};
use crate::index::Index;
use crate::page_set::PageSet;

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
/// How soon is tried again what failed because an address space was changing.
const RETRY: Duration = Duration::from_millis(1);
/// How soon a file that could not be written is written again.
const WRITE_AGAIN: Duration = Duration::from_millis(200);
/// Bytes that are reserved for [`DRAINED_FILE`] from the beginning: more than a status has.
const RESERVED: usize = 16 << 10;

/// A pager that cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// Its sockets cannot be made.
    #[error("the pager cannot listen in {directory:?}: {source}")]
    Listen {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("the pager cannot supply pages: {0}")]
    Serve(#[from] io::Error),
}

/// Serves one migration: `directory` is its own, `work` is criu's work directory. Returns when every page is in place
/// (then `drained.json` is in `directory`), or when told to quit. When this process is killed, pages that are missing become zeros: see [`super::keep`].
pub fn run(directory: &Path, work: &Path) -> Result<(), PagerError> {
    Pager::new(&Context::listen(directory, work)?, None).serve()
}

/// What a pager and those that follow it have in common.
pub(super) struct Context {
    directory: PathBuf,
    pub control: OwnedFd,
    pub lazy: UnixListener,
    pub journal: Journal,
    /// Tells what becomes guards, where the kernel can.
    pub guards: Option<GuardLog>,
}

impl Context {
    /// Makes the sockets.
    pub fn listen(directory: &Path, work: &Path) -> Result<Self, PagerError> {
        let listen = || -> io::Result<Self> {
            let journal = Journal::new()?;
            // The filesystem may be full by the time that this is written. If it is full now, it may have room then.
            let _ = std::fs::write(nascent(directory), [0; RESERVED]);
            // CRIU's socket first: once the control socket is there, both are.
            let lazy = UnixListener::bind(work.join(LAZY_SOCKET))?;
            let control = control::listen_at(&directory.join(CONTROL_SOCKET))?;
            let guards = GuardLog::new().ok();
            Ok(Self { directory: directory.to_owned(), control, lazy, journal, guards })
        };
        listen().map_err(|source| PagerError::Listen { directory: directory.to_owned(), source })
    }
}

/// Where [`DRAINED_FILE`] is written before it gets its name.
fn nascent(directory: &Path) -> PathBuf {
    directory.join(DRAINED_FILE).with_extension("nascent")
}

/// Writes a file in the place of one that is there, whose memory it takes where it is not longer.
fn overwrite(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

pub(super) struct Pager<'a> {
    pub context: &'a Context,
    /// The keeper, where there is one.
    keeper: Option<OwnedFd>,
    /// It goes through what another pager has done; nothing is put in place meanwhile.
    pub replaying: bool,
    pub agents: Vec<OwnedFd>,
    /// Who is told what is wanted: one of the agents' sockets, taken from there.
    pub asked: Option<OwnedFd>,
    /// What is wanted and was not told yet.
    pub wanted: VecDeque<(AddressSpaceId, PageRange)>,
    pub criu: Option<UnixStream>,
    pub store: Option<View>,
    /// Bytes of the store that have been told of, from its beginning.
    pub used: u64,
    /// Everything that has come, by address space; kept whole until the tasks run.
    pub stored: HashMap<AddressSpaceId, Index>,
    /// Everything that has not come, likewise; where an older version of it has, that is still among what is stored.
    pub later: HashMap<AddressSpaceId, PageSet>,
    /// What became guards, in tasks that run.
    pub guards: Guards,
    pub served: Vec<Space>,
    /// What came last, the newest at the end: what was written just before the freeze is what the tasks use first.
    pub newest: Newest,
    pub filling: bool,
    /// When the tasks were let go, as far as that was told.
    pub resumed: Option<Instant>,
    /// When the last step ended.
    filled: Instant,
    /// When the next one may begin.
    rested: Instant,
    /// The last attempt to fill put nothing in place: the address space is changing.
    stalled: bool,
    /// Places in the store of what is settled, which are to be given back.
    pub freed: PageSet,
    /// A forked child shares stored pages with its parent, so that none may be given back before the end.
    forked: bool,
    /// Memory that tasks share.
    pub objects: Objects,
    /// When their table was last written, or tried to be.
    table_tried: Option<Instant>,
    pub status: Status,
    /// What it has asked the scheduler for.
    standing: Standing,
    /// How many address spaces there have been.
    spaces: u64,
}

impl<'a> Pager<'a> {
    pub fn new(context: &'a Context, keeper: Option<OwnedFd>) -> Self {
        Self {
            context,
            keeper,
            replaying: false,
            agents: Vec::new(),
            asked: None,
            wanted: VecDeque::new(),
            criu: None,
            store: None,
            used: 0,
            stored: HashMap::new(),
            later: HashMap::new(),
            guards: Guards::default(),
            served: Vec::new(),
            newest: Newest::default(),
            filling: false,
            resumed: None,
            filled: Instant::now(),
            rested: Instant::now(),
            stalled: false,
            freed: PageSet::default(),
            forked: false,
            objects: Objects::new(context.directory.join(SHARED_TABLE)),
            table_tried: None,
            status: Status::default(),
            standing: Standing::Ordinary,
            spaces: 0,
        }
    }

    /// Works until nothing is left to be done, or until told to quit.
    pub fn serve(&mut self) -> Result<(), PagerError> {
        while self.turn()? {}
        if !self.status.drained {
            return Ok(());
        }
        self.count();
        let directory = &self.context.directory;
        loop {
            let status = Status { trouble: None, ..self.status.clone() };
            let text = serde_json::to_vec(&status).map_err(io::Error::from)?;
            let written = overwrite(&nascent(directory), &text)
                .and_then(|()| std::fs::rename(nascent(directory), directory.join(DRAINED_FILE)));
            match written {
                // Whoever has removed the directory knows that nothing is lacking.
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => self.status.trouble = Some(format!("{DRAINED_FILE} cannot be written: {error}")),
                Ok(()) => {
                    self.status.trouble = None;
                    break;
                }
            }
            // An agent that hears it now needs no file.
            self.tell_all();
            if !self.attend(WRITE_AGAIN)? {
                return Ok(());
            }
        }
        self.tell_all();
        Ok(())
    }

    /// Answers agents for a while, where nothing else is left to be done. False when one says that it is over.
    fn attend(&mut self, time: Duration) -> Result<bool, PagerError> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let read = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut polled: Vec<PollFd<'_>> = self.agents.iter().map(|agent| read(agent.as_fd())).collect();
            polled.push(read(self.context.control.as_fd()));
            match ppoll(&mut polled, Some(TimeSpec::from(left)), None) {
                Ok(0) => return Ok(true),
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(io::Error::from(error).into()),
                Ok(_) => {}
            }
            let ready: Vec<bool> = polled.iter().map(|fd| fd.revents().is_some_and(|r| !r.is_empty())).collect();
            drop(polled);
            let agents = self.agents.len();
            for index in (0..agents).rev().filter(|index| ready[*index]) {
                if self.hear(index)? {
                    return Ok(false);
                }
            }
            if ready[agents] {
                self.accept_agent()?;
            }
        }
    }

    /// Writes the table of shared memory where it is out of date. A filesystem that is full keeps nobody from being supplied with
    /// pages: it is tried again.
    pub fn write_table(&mut self) {
        if self.replaying || !self.objects.outdated {
            return;
        }
        self.table_tried = Some(Instant::now());
        self.status.trouble = match self.objects.tell() {
            Ok(()) => None,
            Err(error) => Some(format!("the table of shared memory cannot be written: {error}")),
        };
    }

    /// How many address spaces there have been.
    pub fn spaces(&self) -> u64 {
        self.spaces
    }

    /// Takes an address space among those that are served.
    pub fn serve_space(&mut self, mut space: Space) {
        space.serial = self.spaces;
        self.spaces += 1;
        self.served.push(space);
    }

    /// Ends the service of these address spaces.
    pub fn let_go(&mut self, over: impl Fn(&Space) -> bool) {
        let (over, left): (Vec<Space>, Vec<Space>) = std::mem::take(&mut self.served).into_iter().partition(over);
        self.served = left;
        for space in over {
            if self.replaying {
                space.userfault.leave();
            } else {
                self.context.journal.append(DONE, space.serial, &[]);
            }
        }
    }

    /// Every page is where it belongs.
    fn is_drained(&self) -> bool {
        self.filling && self.status.named && self.served.is_empty()
    }

    /// Nobody listens any more to what is wanted.
    fn unsubscribe(&mut self) {
        self.context.journal.append(UNSUBSCRIBED, 0, &[]);
        self.asked = None;
    }

    /// Another keeper in the place of one that was killed. Without a store there is nothing that could be lost: then this process ends, too.
    fn replace_keeper(&mut self) -> bool {
        if self.store.is_some() {
            // Where it cannot be started now, it is tried again.
            self.keeper = keeper::start(self.context).ok().or(self.keeper.take());
        }
        self.store.is_some()
    }

    /// Waits for something to do and does it. Returns false when there is nothing more to come.
    fn turn(&mut self) -> Result<bool, PagerError> {
        if self.is_drained() {
            self.status.drained = true;
            return Ok(false);
        }
        if self.table_tried.is_none_or(|tried| tried.elapsed() >= WRITE_AGAIN) {
            self.write_table();
        }
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
        polled.extend([read(self.context.control.as_fd()), read(self.context.lazy.as_fd())]);
        polled.extend(self.criu.iter().map(|criu| read(criu.as_fd())));
        let keeper = polled.len();
        polled.extend(self.keeper.iter().map(|keeper| read(keeper.as_fd())));
        polled.extend(self.guards.watched(self.context.guards.as_ref()).map(read));
        let room = if self.wanted.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        polled.extend(self.asked.iter().map(|asked| PollFd::new(asked.as_fd(), room)));
        let changing = self.served.iter().any(|space| space.changing);
        let timeout = match (busy && !self.stalled, busy || changing) {
            (true, _) => Some(self.rested.saturating_duration_since(Instant::now())),
            (_, true) => Some(RETRY),
            _ if self.objects.outdated => Some(WRITE_AGAIN),
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
        if self.keeper.is_some() && ready[keeper] && !self.replace_keeper() {
            return Ok(false);
        }

        self.forget_guarded();
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
            self.accept_criu()?;
        }
        if ready[first_other] {
            self.accept_agent()?;
        }
        if hung_up {
            self.unsubscribe();
        }
        self.ask();
        if busy && Instant::now() >= self.rested {
            self.fill()?;
        }
        let all_named = self.filling && self.status.named;
        let over = |space: &Space| space.gone || (all_named && space.is_done());
        if self.served.iter().any(over) {
            self.let_go(over);
        }
        self.status.drained = self.is_drained();
        Ok(!quit && !self.status.drained)
    }

    pub fn answer(&mut self, index: usize) -> Result<(), PagerError> {
        if self.replaying || self.store.is_none() {
            return Ok(());
        }
        // All events that are there: a change of the address space must be read before a copy can succeed.
        loop {
            let space = &self.served[index];
            let message = self.context.journal.read(space.serial, &space.userfault)?;
            // What became guards before the task did that.
            self.forget_guarded();
            let (Some(store), space) = (&self.store, &mut self.served[index]) else { break };
            let Some(message) = message else { break };
            let work = space.answer(message, store, self.status.named, &self.context.journal)?;
            self.account(work);
        }
        let Some(store) = &self.store else { return Ok(()) };
        let mut work = Work::default();
        self.served[index].retry(store, self.status.named, &mut work)?;
        self.account(work);
        Ok(())
    }

    pub fn account(&mut self, work: Work) {
        let woken = (work.faults > 0 && work.wanted.is_empty()) || !work.waited.is_empty();
        if woken && self.resumed.is_none_or(|resumed| resumed.elapsed() < BROWNOUT) {
            self.rested = self.rested.max((Instant::now() + AFTER_FAULT).min(self.filled + LONGEST_REST));
        }
        let [installed, faults] = self.context.journal.counters();
        installed.fetch_add(work.installed, Ordering::Relaxed);
        faults.fetch_add(work.faults, Ordering::Relaxed);
        work.waited.iter().for_each(|waited| self.status.remote_faults.add(*waited));
        self.wanted.extend(work.wanted);
        if let Some(child) = work.child {
            self.forked = true;
            self.serve_space(child);
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
        // Where a thread waits for a page that has not come, it is looked for more often.
        let waited_for = self.served.iter().any(|space| !space.waiting.is_empty());
        let time = if waited_for { FILL_TIME / 4 } else { FILL_TIME };
        let mut work = Work::default();
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.forget_guarded();
            let Some(store) = &self.store else { break };
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
                Err(_) => self.unsubscribe(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::PagerHandle;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A new directory, which is there for as long as this is.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tranship-pager-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn pause_until(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "waited for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_last_word_that_cannot_be_written_is_told_and_written_later() {
        let directory = Directory::new("last-word");
        let (root, work) = (directory.0.clone(), directory.0.join("work"));
        std::fs::create_dir(&work).unwrap();
        // No file can take the place of a directory that is not empty.
        let obstacle = root.join(DRAINED_FILE);
        std::fs::create_dir_all(obstacle.join("in the way")).unwrap();
        let pager = std::thread::spawn({
            let root = root.clone();
            move || run(&root, &work)
        });
        pause_until("the pager to listen", || root.join(CONTROL_SOCKET).exists());
        assert_eq!(nascent(&root).metadata().unwrap().len(), RESERVED as u64, "its space is there from the beginning");

        let agent = PagerHandle::connect(&root).unwrap();
        agent.named().unwrap();
        agent.fill().unwrap();
        let told = agent.drained(PATIENCE).unwrap();
        assert!(told.drained && told.trouble.is_some_and(|why| why.contains("cannot be written")));
        // It answers everybody meanwhile.
        let other = PagerHandle::connect_within(&root, PATIENCE).unwrap();
        let asked = other.status(PATIENCE).unwrap();
        assert!(asked.drained && asked.trouble.is_some());
        assert!(!pager.is_finished());

        std::fs::remove_dir_all(&obstacle).unwrap();
        pager.join().unwrap().unwrap();
        let left: Status = serde_json::from_slice(&std::fs::read(obstacle).unwrap()).unwrap();
        assert!(left.drained && left.trouble.is_none(), "{left:?}");
    }

    #[test]
    fn a_pager_whose_directory_is_gone_ends() {
        let directory = Directory::new("gone");
        let (root, work) = (directory.0.join("m-1"), directory.0.join("work"));
        for path in [&root, &work] {
            std::fs::create_dir(path).unwrap();
        }
        let pager = std::thread::spawn({
            let root = root.clone();
            move || run(&root, &work)
        });
        pause_until("the pager to listen", || root.join(CONTROL_SOCKET).exists());
        let agent = PagerHandle::connect(&root).unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        agent.named().unwrap();
        agent.fill().unwrap();
        assert!(agent.drained(PATIENCE).unwrap().drained);
        pager.join().unwrap().unwrap();
    }
}
