//! Guard pages (`MADV_GUARD_INSTALL`) in tasks that run while their pages follow.
//!
//! A page that was made a guard, and is none any more, is zeros; the content that it had before must not be put in place.
//! userfaultfd does not tell of guards, so the pager looks into a log of the kernel before it answers an event and before
//! it puts pages in place. What a task did before it touched a missing page is in the log by then. (Where a page is just
//! being put in place, for some microseconds, while a task makes it a guard and takes that back, it has its old content.)

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use tranship_sys::guard_log::{GuardLog, GuardReader, Guarded};
use tranship_sys::userfault::{Change, Message};

use super::serve::Pager;
use super::space::Work;
use super::takeover::CHANGE;

/// What the log is read with.
#[derive(Debug, Default)]
pub(super) struct Guards {
    /// With what the log goes on while it is open.
    running: Option<(GuardReader, OwnedFd)>,
    /// The address space of each userfaultfd, as the log names it, by the userfaultfd's number.
    memories: HashMap<RawFd, u64>,
    /// For how many address spaces these have been looked up.
    known: u64,
}

impl Guards {
    /// Begins the log, and goes on where another process has read it.
    pub fn begin(&mut self, log: Option<&GuardLog>) {
        let Some(log) = log.filter(|_| self.running.is_none()) else { return };
        match log.reader().and_then(|reader| Ok((reader, log.begin()?))) {
            Ok(running) => self.running = Some(running),
            Err(error) => super::log(format_args!("guard pages are not seen: {error}")),
        }
    }

    /// What polls as readable when something has become guards.
    pub fn watched<'a>(&self, log: Option<&'a GuardLog>) -> Option<BorrowedFd<'a>> {
        log.filter(|_| self.running.is_some()).map(GuardLog::as_fd)
    }
}

impl Pager<'_> {
    /// Forgets pages that have become guards.
    pub(super) fn forget_guarded(&mut self) {
        let Some((reader, _)) = self.guards.running.as_mut().filter(|_| !self.replaying) else { return };
        let mut all = Vec::new();
        reader.read(|guarded| all.push(guarded));
        all.into_iter().for_each(|guarded| self.forget(guarded));
    }

    fn forget(&mut self, Guarded { memory, start, end }: Guarded) {
        if self.guards.known != self.spaces()
            && let Some(Ok(memories)) = self.context.guards.as_ref().map(GuardLog::memories)
        {
            (self.guards.memories, self.guards.known) = (memories, self.spaces());
        }
        let memories = &self.guards.memories;
        let is_its = |number: RawFd| memories.get(&number) == Some(&memory);
        let Some(space) = self.served.iter_mut().find(|space| is_its(space.userfault.number())) else { return };
        self.context.journal.append(CHANGE, space.serial, &Message::removed(start, end).to_bytes());
        let mut work = Work::default();
        space.follow(Change::Remove { start, end }, &mut work);
        // Whoever waits for one of these pages looks again, and finds a guard.
        let _ = space.userfault.wake(start, end - start);
        self.account(work);
    }
}
