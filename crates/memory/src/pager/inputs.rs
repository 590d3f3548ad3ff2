//! What a pager is told by agents and by criu.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SendTimeout;
use nix::sys::time::{TimeVal, TimeValLike};
use tranship_sys::arena::View;
use tranship_sys::descriptor;
use tranship_sys::userfault::Userfault;
use tranship_types::{AddressSpaceId, PageRange};

use super::control::{self, BATCH, Message, Peeked, StoredExtent};
use super::remote::Remote;
use super::serve::{Pager, PagerError};
use super::space::{Space, Work};
use super::takeover::{MESSAGE, RESTART, RESTORED, TASK, number_of};
use crate::page_set::PageSet;

/// CRIU's word for "the restore is finished" on the lazy-pages socket.
const RESTORE_FINISHED: i32 = 0x5253_5446;
/// Extents that are taken note of between two looks for faults.
const FEW: usize = 32;
/// How long an agent may leave an answer unread, in whole.
const AGENT_PATIENCE: i64 = 2;

impl Pager<'_> {
    /// Takes an agent that connects.
    pub(super) fn accept_agent(&mut self) -> io::Result<()> {
        let agent = descriptor::accept(self.context.control.as_fd())?;
        // An agent that does not listen must not keep the tasks waiting.
        setsockopt(&agent, SendTimeout, &TimeVal::seconds(AGENT_PATIENCE))?;
        self.agents.push(agent);
        Ok(())
    }

    /// Takes criu that connects. A restore that is done again starts with nothing in place.
    pub(super) fn accept_criu(&mut self) -> io::Result<()> {
        self.criu = Some(self.context.lazy.accept()?.0);
        self.context.journal.append(RESTART, 0, &[]);
        self.restart();
        Ok(())
    }

    pub(super) fn restart(&mut self) {
        let spaces = std::mem::take(&mut self.served);
        if self.replaying {
            spaces.into_iter().for_each(|space| space.userfault.leave());
        }
        self.freed = PageSet::default();
        self.status.restored = false;
    }

    /// Deals with one message of an agent; returns whether to quit. What changes anything stays in its socket until it is in the journal.
    pub(super) fn hear(&mut self, index: usize) -> Result<bool, PagerError> {
        let socket = self.agents[index].as_fd();
        let peeked = match control::peek(socket) {
            Ok(Some(peeked)) => peeked,
            Ok(None) => return Ok(false),
            Err(_) => {
                self.agents.remove(index);
                return Ok(false);
            }
        };
        if peeked.message.is_question() {
            // Answered first: a pager that takes over from one that is killed before that answers it.
            let quits = self.reply(index, &peeked.message);
            if peeked.discard(self.agents[index].as_fd()).is_err() {
                self.agents.remove(index);
            }
            return Ok(quits);
        }
        let number = peeked.descriptor.map_or(number_of(&socket), |number| number.cast_unsigned().into());
        self.context.journal.append(MESSAGE, number, &peeked.bytes);
        // What is there a second time for a pager that takes over changes nothing.
        peeked.discard(socket)?;
        let Peeked { message, .. } = peeked;
        if matches!(message, Message::Subscribe) {
            self.asked = Some(self.agents.remove(index));
            self.wanted.clear();
            self.served.iter_mut().for_each(Space::ask_again);
            self.retry_all()?;
            return Ok(false);
        }
        self.apply(message)?;
        Ok(false)
    }

    fn reply(&mut self, index: usize, question: &Message) -> bool {
        match question {
            Message::Status => self.tell(index),
            Message::Missing => self.tell_missing(index),
            Message::Reattach => {
                if let Some(store) = &self.store {
                    let _ = descriptor::send(self.agents[index].as_fd(), &self.used.to_le_bytes(), &[store.file()]);
                }
            }
            _ => return true,
        }
        false
    }

    /// Does what an agent has said, once it is in the journal.
    pub(super) fn apply(&mut self, message: Message) -> Result<(), PagerError> {
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
            Message::Object(object, file) => {
                self.objects.keep(object, file);
                self.write_table();
            }
            Message::Named => {
                self.status.named = true;
                self.retry_all()?;
            }
            Message::Fill => {
                if let Some(store) = &self.store {
                    self.status.peak_bytes = self.status.peak_bytes.max(store.resident()? + self.objects.resident());
                }
                self.filling = true;
                self.resumed.get_or_insert_with(Instant::now);
                (self.stored, self.later) = (HashMap::new(), HashMap::new());
            }
            Message::Subscribe | Message::Status | Message::Missing | Message::Reattach | Message::Quit => {}
        }
        Ok(())
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

    fn retry_all(&mut self) -> Result<(), PagerError> {
        let ids: Vec<AddressSpaceId> = self.served.iter().map(|space| space.origin).collect();
        ids.into_iter().try_for_each(|id| self.retry(id))
    }

    /// Tries again what the threads of these tasks wait for.
    fn retry(&mut self, id: AddressSpaceId) -> Result<(), PagerError> {
        self.forget_guarded();
        let Some(store) = &self.store else { return Ok(()) };
        let mut work = Work::default();
        for space in self.served.iter_mut().filter(|space| space.origin == id && !space.waiting.is_empty()) {
            space.retry(store, self.status.named, &mut work)?;
        }
        self.account(work);
        Ok(())
    }

    /// Takes what criu hands over: for each task its pid and a userfaultfd (a zombie's pid is negative and brings
    /// nothing), at last the word that the restore is finished. It stays in the socket until it is in the journal.
    pub(super) fn hear_criu(&mut self) -> Result<(), PagerError> {
        let Some(criu) = &self.criu else { return Ok(()) };
        let mut bytes = [0; 5];
        let (got, descriptors) = match descriptor::peek(criu.as_fd(), &mut bytes) {
            Ok(None) => return Ok(()),
            Err(_) | Ok(Some((0, _))) => {
                self.criu = None;
                return Ok(());
            }
            Ok(Some(peeked)) => peeked,
        };
        let word = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let brings = word > 0 && word != RESTORE_FINISHED;
        let len = if brings { 5 } else { 4 };
        if got < len {
            // The rest is on its way.
            return Ok(());
        }
        let id = AddressSpaceId(word.unsigned_abs());
        if word == RESTORE_FINISHED {
            self.context.journal.append(RESTORED, 0, &[]);
            self.restored();
        } else if brings && !self.served.iter().any(|space| space.origin == id) {
            let Some(fd) = descriptors.into_iter().next() else {
                return Err(io::Error::other(format!("criu named task {word} but handed over no descriptor")).into());
            };
            self.context.journal.append(TASK, number_of(&fd), &id.0.to_le_bytes());
            self.add_task(id, Userfault::from(fd));
        }
        if let Some(criu) = &self.criu {
            descriptor::discard(criu.as_fd(), len)?;
        }
        Ok(())
    }

    /// Serves a task that criu has handed over.
    pub(super) fn add_task(&mut self, id: AddressSpaceId, userfault: Userfault) {
        let remote = self.later.get(&id).cloned().unwrap_or_default();
        let pending = self.stored.get(&id).cloned().unwrap_or_default();
        self.serve_space(Space::new(id, userfault, pending, Remote::new(remote)));
    }

    /// The restore is finished.
    pub(super) fn restored(&mut self) {
        self.status.restored = true;
        // The tasks will soon run.
        self.guards.begin(self.context.guards.as_ref());
    }

    fn tell(&mut self, index: usize) {
        self.status.pending_bytes = self.served.iter().map(|s| s.pending.bytes()).sum();
        self.status.remote_bytes = match self.filling {
            true => self.served.iter().map(|s| s.remote.bytes()).sum(),
            false => self.later.values().map(PageSet::bytes).sum(),
        };
        self.status.waiting = self.served.iter().map(|s| s.waiting.len() as u64).sum();
        self.count();
        if let Ok(text) = serde_json::to_vec(&self.status) {
            // An agent that does not listen is dropped when it hangs up.
            let _ = descriptor::send(self.agents[index].as_fd(), &text, &[]);
        }
    }

    /// Takes the counters into the status, which those before have begun.
    pub(super) fn count(&mut self) {
        let [installed, faults] = self.context.journal.counters();
        self.status.installed_bytes = installed.load(Ordering::Relaxed);
        self.status.faults = faults.load(Ordering::Relaxed);
    }

    pub(super) fn tell_all(&mut self) {
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
