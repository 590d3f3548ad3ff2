//! How a pager goes on where one that was killed has left off.
//!
//! Everything that a pager learns is in its journal before it acts on it: messages of agents, which stay in their sockets until then; tasks that CRIU hands
//! over, likewise; and what tasks do to their address spaces, which is read into the journal itself. Another pager goes through the journal and knows the same.
//!
//! What has been put in place is not in it. It is tried again, and the kernel refuses where a page is already: a page that was in place is missing again only
//! if its task has thrown it away, and that is in the journal. Faults that were read and not answered are not in it either: all threads that wait are woken,
//! and fault again.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use tranship_sys::descriptor::{self, SocketKind};
use tranship_sys::journal::Record;
use tranship_sys::userfault::{Change, Event, Message as TaskMessage, Userfault};
use tranship_types::AddressSpaceId;

use super::control::{self, Message};
use super::serve::{Pager, PagerError};
use super::space::{Space, Work};

/// A message of an agent, with the number of the descriptor that came along (of the socket that it came by, for `Subscribe`).
pub(super) const MESSAGE: u32 = 1;
/// What a task has done to its address space; with the space's serial number.
pub(super) const CHANGE: u32 = 2;
/// A task that criu has handed over: its pid, with the number of the descriptor.
pub(super) const TASK: u32 = 3;
/// Criu has said that the restore is finished.
pub(super) const RESTORED: u32 = 4;
/// Criu has begun again.
pub(super) const RESTART: u32 = 5;
/// An address space is served no more; its serial number.
pub(super) const DONE: u32 = 6;
/// Nobody is told what is wanted any more.
pub(super) const UNSUBSCRIBED: u32 = 7;

impl Pager<'_> {
    /// Goes on where another process has left off, if one has.
    pub(super) fn take_over(&mut self) -> Result<(), PagerError> {
        let journal = &self.context.journal;
        if journal.has_overflowed() {
            return Err(io::Error::other("its predecessor was killed, and had done too much to be followed").into());
        }
        self.replaying = true;
        let (mut any, mut subscribed) = (false, None);
        for record in journal.records() {
            any = true;
            self.replay(&record, &mut subscribed)?;
        }
        if let Some((serial, message)) = journal.unfinished()
            && matches!(message.event()?, Event::Changed(_))
        {
            journal.append(CHANGE, serial, &message.to_bytes());
            self.change(serial, message)?;
        }
        self.replaying = false;
        if !any {
            return Ok(());
        }
        super::log(format_args!("takes over from one that was killed, with {} address spaces", self.served.len()));
        self.adopt(subscribed)?;
        self.objects.outdated = true;
        self.write_table();
        Ok(self.served.iter().try_for_each(|space| space.userfault.wake_all())?)
    }

    fn replay(&mut self, record: &Record, subscribed: &mut Option<RawFd>) -> Result<(), PagerError> {
        let Record { kind, tag, bytes } = record;
        let number = *tag as RawFd;
        match *kind {
            MESSAGE => {
                let brought = Message::brings_descriptor(bytes);
                // SAFETY: the pager that was killed had the table in common with this one, and nothing here has taken over what came with
                // this message.
                let descriptors = if brought { vec![unsafe { descriptor::inherited(number)? }] } else { Vec::new() };
                match control::decode(bytes, descriptors) {
                    Some(Message::Subscribe) => *subscribed = Some(number),
                    Some(message) => self.apply(message)?,
                    None => return Err(io::Error::other("the journal cannot be understood").into()),
                }
            }
            CHANGE => {
                let message = TaskMessage::from_bytes(bytes);
                self.change(*tag, message.ok_or_else(|| io::Error::other("the journal cannot be understood"))?)?;
            }
            TASK => {
                let pid = bytes.first_chunk().map_or(0, |pid| u32::from_le_bytes(*pid));
                self.add_task(AddressSpaceId(pid), of_past(number)?);
            }
            RESTORED => self.restored(),
            RESTART => self.restart(),
            DONE => self.let_go(|space| space.serial == *tag),
            UNSUBSCRIBED => *subscribed = None,
            _ => {}
        }
        Ok(())
    }

    /// Does what a task has done, once it is in the journal.
    fn change(&mut self, serial: u64, message: TaskMessage) -> Result<(), PagerError> {
        let Event::Changed(change) = message.event()? else { return Ok(()) };
        let Some(space) = self.served.iter_mut().find(|space| space.serial == serial) else { return Ok(()) };
        let mut work = Work::default();
        match change {
            Change::Fork(number) => work.child = Some(space.child(of_past(number)?)),
            change => space.follow(change, &mut work),
        }
        self.account(work);
        Ok(())
    }

    /// Takes over what stands in the table of descriptors, and closes what nobody needs.
    fn adopt(&mut self, subscribed: Option<RawFd>) -> Result<(), PagerError> {
        for (number, kind) in descriptor::sockets()? {
            if kind == SocketKind::Other {
                continue;
            }
            // SAFETY: this process has connected to nothing and accepted nothing yet: the sockets are those of the pager that was killed.
            let socket = unsafe { descriptor::inherited(number)? };
            match kind {
                SocketKind::Seqpacket if Some(number) == subscribed => self.asked = Some(socket),
                SocketKind::Seqpacket => self.agents.push(socket),
                SocketKind::Stream => self.criu = Some(UnixStream::from(socket)),
                SocketKind::Other => {}
            }
        }
        let (live, strange): (Vec<Space>, Vec<Space>) =
            std::mem::take(&mut self.served).into_iter().partition(|space| space.userfault.is_one());
        self.served = live;
        strange.into_iter().for_each(|space| space.userfault.leave());
        let known: Vec<RawFd> = self.served.iter().map(|space| space.userfault.number()).collect();
        for number in descriptor::numbers()?.into_iter().filter(|number| !known.contains(number)) {
            // Of a task that is not served any more, or one more of one that is.
            // SAFETY: it is none of those that are served, and nobody else here has one.
            drop(unsafe { Userfault::adopt(number) });
        }
        Ok(())
    }
}

/// The userfaultfd that was made under this number, unless it was closed since.
fn of_past(number: RawFd) -> io::Result<Userfault> {
    // SAFETY: the log names each descriptor once for each time that it was made. One that was closed, and whose number another one has by now,
    // is found out by `adopt`, where that is no userfaultfd, and else left alone (`Userfault::leave`).
    unsafe { Userfault::adopt(number) }.or_else(|_| Userfault::of_nobody())
}

/// The number of a socket, as the journal has it.
pub(super) fn number_of(socket: &impl AsRawFd) -> u64 {
    socket.as_raw_fd().cast_unsigned().into()
}
