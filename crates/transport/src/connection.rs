use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use tranship_types::NodeName;

use crate::handshake::{Established, tls_io_error};
use crate::records::{OVERHEAD, Outgoing, RECORD, Records, Step};
use crate::socket::Socket;
use crate::{Closer, Counters, Link};

/// Encrypted bytes that leave in one write, and most that one read takes in. Small enough to stay in a core's cache
/// between the cipher and the kernel's copy, large enough that the system calls do not count (`docs/transport.md`).
const BATCH: usize = 256 << 10;
/// Room for what is encrypted: a batch, what was gathered of the next one, and the records' own bytes.
const ROOM: usize = 2 * BATCH + 2 * (BATCH / RECORD + 2) * OVERHEAD;

/// A TLS stream over a socket, behind the handshake.
pub(crate) struct Channel {
    socket: Socket,
    records: Records,
    /// Encrypted bytes from the socket; those at `incoming[start..end]` are still to be handled.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Plaintext that was decrypted but not asked for yet, from `overflow_at` on.
    overflow: Vec<u8>,
    overflow_at: usize,
    /// Plaintext of small writes, at most a record.
    small: Vec<u8>,
    /// Encrypted bytes that have not left yet.
    out: Outgoing,
    peer_closed: bool,
    /// One direction has failed for good. Nothing is sent after that, no farewell either: the peer must not take what broke
    /// for what ended in good order.
    broken: bool,
}

impl Channel {
    /// Goes on where a handshake has ended.
    pub fn new(socket: Socket, established: Established) -> io::Result<Self> {
        let Established { suite, sending, receiving, plain, sealed, bytes, .. } = established;
        socket.counters().add_sent(bytes.0 as usize);
        socket.counters().add_received(bytes.1 as usize);
        let mut incoming = vec![0; BATCH];
        let end = sealed.len();
        let start = incoming.get_mut(..end).ok_or(ErrorKind::InvalidData)?;
        start.copy_from_slice(&sealed);
        Ok(Self {
            socket,
            records: Records::new(suite, sending, receiving).map_err(tls_io_error)?,
            incoming,
            start: 0,
            end,
            overflow: plain,
            overflow_at: 0,
            small: Vec::with_capacity(RECORD),
            out: Outgoing { bytes: vec![0; ROOM], len: 0 },
            peer_closed: false,
            broken: false,
        })
    }

    pub fn socket_mut(&mut self) -> &mut Socket {
        &mut self.socket
    }

    #[cfg(test)]
    pub fn records_mut(&mut self) -> &mut Records {
        &mut self.records
    }

    /// Opens one of the records that are here.
    fn step(&mut self, to: &mut [u8]) -> io::Result<Step> {
        let opened = self.records.open(&mut self.incoming[self.start..self.end], to, &mut self.overflow);
        let (done, step) = opened.map_err(tls_io_error).inspect_err(|_| self.broken = true)?;
        self.start += done;
        if self.start >= self.end {
            (self.start, self.end) = (0, 0);
        }
        Ok(step)
    }

    /// Sends what is encrypted, then waits for bytes.
    fn receive(&mut self) -> io::Result<()> {
        if !self.broken {
            self.send()?;
        }
        if self.incoming.len() - self.end < self.incoming.len() / 2 {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.incoming.len() {
            return Err(io::Error::new(ErrorKind::InvalidData, "the peer sent a TLS message that is too long"));
        }
        match self.socket.read(&mut self.incoming[self.end..]) {
            Ok(0) => {
                self.broken = true;
                Err(io::Error::new(ErrorKind::UnexpectedEof, "the link broke off"))
            }
            Ok(n) => {
                self.end += n;
                Ok(())
            }
            Err(e) => {
                self.broken |= e.kind() != ErrorKind::TimedOut;
                Err(e)
            }
        }
    }

    /// Encrypts `data`, whatever its length, behind what is encrypted already.
    fn encrypt(&mut self, data: &[u8]) -> io::Result<()> {
        self.records.seal(data, &mut self.out).map_err(tls_io_error).inspect_err(|_| self.broken = true)
    }

    fn send(&mut self) -> io::Result<()> {
        if self.out.len > 0 {
            let len = self.out.len;
            self.out.len = 0;
            self.socket.write_all(&self.out.bytes[..len]).inspect_err(|_| self.broken = true)?;
        }
        Ok(())
    }

    fn encrypt_small(&mut self) -> io::Result<()> {
        if !self.small.is_empty() {
            let mut small = std::mem::take(&mut self.small);
            let result = self.encrypt(&small);
            small.clear();
            self.small = small;
            result?;
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::new(ErrorKind::BrokenPipe, "the link broke before"));
        }
        Ok(())
    }

    fn take_overflow(&mut self, to: &mut [u8]) -> usize {
        let rest = &self.overflow[self.overflow_at..];
        let n = rest.len().min(to.len());
        to[..n].copy_from_slice(&rest[..n]);
        self.overflow_at += n;
        if self.overflow_at == self.overflow.len() {
            self.overflow.clear();
            self.overflow_at = 0;
        }
        n
    }
}

impl Read for Channel {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = self.take_overflow(buf);
        while done < buf.len() && !self.peer_closed {
            match self.step(&mut buf[done..])? {
                Step::Progress => {}
                Step::Data(n) => done += n,
                Step::PeerClosed => self.peer_closed = true,
                // What is here is better than what may come.
                Step::Idle if done > 0 => break,
                Step::Idle => {
                    if !self.broken {
                        self.encrypt_small()?;
                    }
                    self.receive()?;
                }
            }
        }
        Ok(done)
    }
}

impl Write for Channel {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.check()?;
        if self.small.len() + buf.len() > RECORD {
            self.encrypt_small()?;
        }
        if buf.len() < RECORD {
            self.small.extend_from_slice(buf);
        } else {
            for piece in buf.chunks(BATCH) {
                self.encrypt(piece)?;
                if self.out.len >= BATCH {
                    self.send()?;
                }
            }
        }
        if self.out.len >= BATCH {
            self.send()?;
        }
        Ok(buf.len())
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut done = 0;
        for buf in bufs {
            done += self.write(buf)?;
        }
        Ok(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.check()?;
        self.encrypt_small()?;
        self.send()
    }
}

/// An open link to a peer that has proved its name.
///
/// Small writes are gathered into records and records into large writes to the socket; `flush` (or a `read`) sends what
/// is left. Writes of 16 KiB and more are encrypted from where they are. Dropping it ends the link in good order as far
/// as that needs no waiting.
pub struct Connection {
    channel: Channel,
    peer: NodeName,
    version: u16,
}

impl Connection {
    pub(crate) fn new(mut channel: Channel, peer: NodeName, version: u16) -> io::Result<Self> {
        channel.socket_mut().set_timeout(None)?;
        Ok(Self { channel, peer, version })
    }

    /// The protocol version that both agreed on.
    pub fn version(&self) -> u16 {
        self.version
    }

    #[cfg(test)]
    pub(crate) fn records_mut(&mut self) -> &mut Records {
        self.channel.records_mut()
    }

    /// Bytes sent so far, TLS included.
    pub fn bytes_sent(&self) -> u64 {
        self.channel.socket.counters().sent()
    }

    /// Bytes received so far, TLS included.
    pub fn bytes_received(&self) -> u64 {
        self.channel.socket.counters().received()
    }
}

impl Link for Connection {
    fn peer(&self) -> &NodeName {
        &self.peer
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.channel.socket.set_timeout(timeout)
    }

    fn set_pace(&mut self, bytes_a_second: Option<u64>) -> io::Result<()> {
        self.channel.socket.set_pace(bytes_a_second)
    }

    fn set_in_flight(&mut self, bytes: usize) -> io::Result<()> {
        self.channel.socket.set_in_flight(bytes)
    }

    fn give_way(&mut self) -> io::Result<()> {
        self.channel.socket.give_way()
    }

    fn is_narrow(&self) -> bool {
        self.channel.socket.is_narrow()
    }

    fn in_flight(&mut self) -> io::Result<usize> {
        self.channel.socket.in_flight()
    }

    fn closer(&self) -> Closer {
        self.channel.socket.closer()
    }

    fn counters(&self) -> Counters {
        self.channel.socket.counters().clone()
    }
}

impl Read for Connection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.channel.read(buf)
    }
}

impl Write for Connection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.channel.write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.channel.write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.channel.flush()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let channel = &mut self.channel;
        if !channel.broken && channel.encrypt_small().is_ok() && channel.records.close(&mut channel.out).is_ok() {
            channel.socket.set_nonblocking();
            let _ = channel.send();
        }
        channel.socket.shutdown(Shutdown::Write);
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).field("version", &self.version).finish_non_exhaustive()
    }
}
