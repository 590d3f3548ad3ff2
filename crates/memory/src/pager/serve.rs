//! The pager's loop: one thread, faults before everything else.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tranship_sys::arena::View;
use tranship_sys::descriptor;
use tranship_sys::userfault::Userfault;
use tranship_types::AddressSpaceId;

use super::control::{self, Message, Status};
use super::space::{Space, Work};
use super::{CONTROL_SOCKET, DRAINED_FILE, LAZY_SOCKET};
use crate::index::{Extent, Index};

/// CRIU's word for "the restore is finished" on the lazy-pages socket.
const RESTORE_FINISHED: i32 = 0x5253_5446;
/// Bytes put in place between two looks for faults: about 0.1 ms.
const FILL_CHUNK: u64 = 256 << 10;

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
    let mut pager = Pager { control, lazy, ..Pager::blank()? };
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
    criu: Option<UnixStream>,
    store: Option<View>,
    /// Everything that has come, by address space; kept whole until the restore is finished.
    stored: HashMap<AddressSpaceId, Index>,
    served: Vec<(Option<AddressSpaceId>, Space)>,
    filling: bool,
    /// Stored pages that were settled before the tasks ran: given back when they do.
    freed: Vec<Extent>,
    /// A forked child shares stored pages with its parent, so that none may be given back before the end.
    forked: bool,
    status: Status,
}

impl Pager {
    fn blank() -> io::Result<Self> {
        // Replaced at once by `run`; sockets have no empty state.
        let (control, _) = descriptor::seqpacket_pair()?;
        let lazy = UnixListener::from(descriptor::seqpacket_pair()?.0);
        Ok(Self {
            control,
            lazy,
            agents: Vec::new(),
            criu: None,
            store: None,
            stored: HashMap::new(),
            served: Vec::new(),
            filling: false,
            freed: Vec::new(),
            forked: false,
            status: Status::default(),
        })
    }

    /// Waits for something to do and does it. Returns false when there is nothing more to come.
    fn turn(&mut self) -> Result<bool, PagerError> {
        let busy = self.filling && self.served.iter().any(|(_, s)| !s.pending.is_empty());
        let fds: Vec<BorrowedFd<'_>> = [self.control.as_fd(), self.lazy.as_fd()]
            .into_iter()
            .chain(self.criu.iter().map(AsFd::as_fd))
            .chain(self.agents.iter().map(AsFd::as_fd))
            .chain(self.served.iter().map(|(_, s)| s.userfault.as_fd()))
            .collect();
        let mut polled: Vec<PollFd<'_>> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut polled, if busy { PollTimeout::ZERO } else { PollTimeout::NONE }) {
            Err(nix::errno::Errno::EINTR) => return Ok(true),
            Err(error) => return Err(io::Error::from(error).into()),
            Ok(_) => {}
        }
        let ready: Vec<bool> = polled.iter().map(|fd| fd.revents().is_some_and(|r| !r.is_empty())).collect();
        drop(polled);

        let first_agent = 2 + usize::from(self.criu.is_some());
        let first_space = first_agent + self.agents.len();
        for (index, _) in ready[first_space..].iter().enumerate().filter(|(_, ready)| **ready) {
            self.answer(index)?;
        }
        let mut quit = false;
        let heard: Vec<usize> = (0..self.agents.len()).filter(|i| ready[first_agent + i]).collect();
        for index in heard.into_iter().rev() {
            quit |= self.hear(index)?;
        }
        if first_agent == 3 && ready[2] {
            self.hear_criu()?;
        }
        if ready[1] {
            self.criu = Some(self.lazy.accept()?.0);
            // A restore that is done again starts with nothing in place.
            self.served.clear();
            self.freed.clear();
            self.status.restored = false;
        }
        if ready[0] {
            self.agents.push(descriptor::accept(self.control.as_fd())?);
        }
        if busy {
            self.fill()?;
        }
        self.served.retain(|(_, space)| !space.gone);
        if self.filling && self.status.complete {
            self.served.retain(|(_, space)| !(space.pending.is_empty() && space.waiting.is_empty()));
            self.status.drained = self.served.is_empty();
        }
        Ok(!quit && !self.status.drained)
    }

    fn answer(&mut self, index: usize) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        let mut works = Vec::new();
        let space = &mut self.served[index].1;
        // All events that are there: a change of the address space must be read before a copy can succeed.
        while let Some(work) = space.answer(store, self.status.complete)? {
            works.push(work);
        }
        let mut work = Work::default();
        for address in std::mem::take(&mut space.waiting) {
            space.supply(address, store, self.status.complete, &mut work)?;
        }
        works.push(work);
        works.into_iter().for_each(|work| self.account(work));
        Ok(())
    }

    fn account(&mut self, work: Work) {
        self.status.installed_bytes += work.installed;
        self.status.faults += work.faults;
        if let Some(child) = work.child {
            self.forked = true;
            self.served.push((None, child));
        }
        self.freed.extend(work.freed);
        self.give_back();
    }

    fn give_back(&mut self) {
        let Some(store) = &self.store else { return };
        if self.filling && !self.forked {
            for extent in self.freed.drain(..) {
                // Memory that cannot be given back now goes with the pager.
                let _ = store.release(extent.offset, extent.range.len());
            }
        }
    }

    fn fill(&mut self) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        let Some((_, space)) = self.served.iter_mut().find(|(_, s)| !s.pending.is_empty()) else { return Ok(()) };
        let mut work = Work::default();
        space.fill(FILL_CHUNK, store, &mut work)?;
        self.account(work);
        Ok(())
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
                for row in extents {
                    self.stored.entry(row.space).or_default().insert(row.extent);
                    for (_, space) in self.served.iter_mut().filter(|(id, _)| *id == Some(row.space)) {
                        space.pending.insert(row.extent);
                    }
                }
                self.retry_waiting()?;
            }
            Message::Gone(id, range) => {
                if let Some(index) = self.stored.get_mut(&id) {
                    index.remove(range);
                }
                for (_, space) in self.served.iter_mut().filter(|(served, _)| *served == Some(id)) {
                    space.pending.remove(range);
                }
            }
            Message::Complete => {
                self.status.complete = true;
                self.retry_waiting()?;
                if let Some(store) = &self.store {
                    self.status.peak_bytes = self.status.peak_bytes.max(store.resident()?);
                }
            }
            Message::Fill => {
                self.filling = true;
                self.stored = HashMap::new();
                self.give_back();
            }
            Message::Status => self.tell(index),
            Message::Quit => return Ok(true),
        }
        Ok(false)
    }

    fn retry_waiting(&mut self) -> Result<(), PagerError> {
        let Some(store) = &self.store else { return Ok(()) };
        let mut work = Work::default();
        for (_, space) in &mut self.served {
            for address in std::mem::take(&mut space.waiting) {
                space.supply(address, store, self.status.complete, &mut work)?;
            }
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
            let pending = self.stored.get(&id).cloned().unwrap_or_default();
            self.served.push((Some(id), Space::new(Userfault::from(fd), pending)));
        }
        Ok(())
    }

    fn tell(&mut self, index: usize) {
        self.status.pending_bytes = self.served.iter().map(|(_, s)| s.pending.bytes()).sum();
        self.status.waiting = self.served.iter().map(|(_, s)| s.waiting.len() as u64).sum();
        if let Ok(text) = serde_json::to_vec(&self.status) {
            // An agent that does not listen is dropped when it hangs up.
            let _ = descriptor::send(self.agents[index].as_fd(), &text, &[]);
        }
    }

    fn tell_all(&mut self) {
        (0..self.agents.len()).for_each(|index| self.tell(index));
    }
}
