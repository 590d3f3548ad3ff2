//! What happens in a filesystem, by the kernel's own account (fanotify(7)).

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};

/// Events name inodes instead of opening them, which would keep a mount busy (linux/fanotify.h; Linux 5.1).
const FAN_REPORT_FID: u32 = 0x200;

/// What has happened since the last look.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Anything at all, or there may have been more than can be told.
    pub any: bool,
    /// Inodes of files that were closed by somebody who could write to them, or had a shared mapping of them.
    pub closed: HashSet<u64>,
    /// There was more than can be told.
    pub lost: bool,
}

impl Events {
    /// The events in a buffer that was read from a group in FID mode: struct fanotify_event_metadata, then info records.
    pub(super) fn note(&mut self, mut buffer: &[u8]) {
        const METADATA: usize = 24;
        let u32_at = |b: &[u8], at: usize| b.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        while let Some(length) = u32_at(buffer, 0).map(|l| l as usize).filter(|l| (METADATA..=buffer.len()).contains(l))
        {
            let (event, rest) = buffer.split_at(length);
            buffer = rest;
            let mask = event.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes);
            self.any = true;
            self.lost |= mask & MaskFlags::FAN_Q_OVERFLOW.bits() != 0;
            if mask & MaskFlags::FAN_CLOSE_WRITE.bits() == 0 {
                continue;
            }
            // Info header (type, length: 4 bytes), fsid (8), handle's length and type (8), handle. That of a tmpfs is the
            // generation and the two halves of the inode's number (mm/shmem.c, shmem_encode_fh).
            let handle = METADATA + 20;
            let known = event.get(METADATA) == Some(&1) && u32_at(event, METADATA + 12) == Some(12);
            match (known, u32_at(event, handle + 4), u32_at(event, handle + 8)) {
                (true, Some(low), Some(high)) => drop(self.closed.insert(u64::from(low) | u64::from(high) << 32)),
                _ => self.lost = true,
            }
        }
    }
}

/// Watches one filesystem. Its events are taken in as they come, so that the kernel need not keep them.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    group: Fanotify,
    events: Mutex<Events>,
}

impl Shared {
    fn drain(&self, events: &mut Events) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match nix::unistd::read(&self.group, &mut buffer) {
                Ok(0) | Err(Errno::EAGAIN) => return,
                Ok(got) => events.note(&buffer[..got]),
                Err(Errno::EINTR) => {}
                Err(_) => {
                    (events.any, events.lost) = (true, true);
                    return;
                }
            }
        }
    }
}

impl Watch {
    /// Watches the filesystem that `directory` is on.
    pub fn start(directory: impl AsFd) -> io::Result<Self> {
        let flags = InitFlags::FAN_CLASS_NOTIF
            | InitFlags::from_bits_retain(FAN_REPORT_FID)
            | InitFlags::FAN_UNLIMITED_QUEUE
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_CLOEXEC;
        let group = Fanotify::init(flags, EventFFlags::O_RDONLY)?;
        let mask = MaskFlags::FAN_MODIFY
            | MaskFlags::FAN_ATTRIB
            | MaskFlags::FAN_CLOSE_WRITE
            | MaskFlags::FAN_CREATE
            | MaskFlags::FAN_DELETE
            | MaskFlags::FAN_MOVED_FROM
            | MaskFlags::FAN_MOVED_TO
            | MaskFlags::FAN_ONDIR;
        let mark = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_FILESYSTEM;
        group.mark(mark, mask, directory, Some("."))?;
        let shared = Arc::new(Shared { group, events: Mutex::default() });
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let at_work = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tmpfs watch".into()).spawn(move || {
            loop {
                let mut fds = [&at_work.group.as_fd(), &stopped.as_fd()].map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
                match poll(&mut fds, PollTimeout::NONE) {
                    Err(Errno::EINTR) => continue,
                    Err(_) => return,
                    Ok(_) if fds[1].any() != Some(false) => return,
                    Ok(_) => at_work.drain(&mut at_work.events.lock().unwrap_or_else(PoisonError::into_inner)),
                }
            }
        })?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// What has happened up to now.
    pub fn take(&self) -> Events {
        let mut events = self.shared.events.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.drain(&mut events);
        std::mem::take(&mut events)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            Events::default().note(&bytes);
        }
    }
}
