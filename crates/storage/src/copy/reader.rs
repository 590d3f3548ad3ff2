//! A thread that empties the kernel's rings.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How often that is, however little is in them, in ms.
const READ_EVERY: u16 = 100;

/// The thread, which ends with this.
#[derive(Debug)]
pub(super) struct Reader {
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Begins to `read` each time that one of the `events` polls as readable, and else every 100 ms.
    pub fn start<'a>(
        name: &str,
        events: impl Iterator<Item = BorrowedFd<'a>>,
        read: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let events: Vec<OwnedFd> = events.map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            loop {
                let mut fds: Vec<PollFd<'_>> = [&stopped]
                    .into_iter()
                    .chain(&events)
                    .map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN))
                    .collect();
                match poll(&mut fds, PollTimeout::from(READ_EVERY)) {
                    Err(Errno::EINTR) => {}
                    Err(_) => return,
                    Ok(_) if fds[0].any() != Some(false) => return,
                    Ok(_) => read(),
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
