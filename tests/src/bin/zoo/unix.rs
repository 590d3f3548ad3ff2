//! Unix sockets: pairs with queued data, a descriptor on its way, listeners.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recv, recvmsg, send, sendmsg,
    socketpair,
};

use crate::species::{Check, pattern, pattern_bytes};

/// A stream pair with data queued in both directions.
pub fn stream(_: &Path) -> Result<Check> {
    // Each write is a buffer of its own, of which a socket takes about 250.
    const QUEUED: u64 = 100;
    let (mut a, mut b) = UnixStream::pair()?;
    for token in 0..QUEUED {
        a.write_all(&pattern(token).to_le_bytes())?;
        b.write_all(&pattern(!token).to_le_bytes())?;
    }
    let mut next = 0u64;
    Ok(Box::new(move || {
        let mut bytes = [0; 8];
        b.read_exact(&mut bytes)?;
        ensure!(u64::from_le_bytes(bytes) == pattern(next), "token {next} to the right is wrong");
        a.read_exact(&mut bytes)?;
        ensure!(u64::from_le_bytes(bytes) == pattern(!next), "token {next} to the left is wrong");
        a.write_all(&pattern(next + QUEUED).to_le_bytes())?;
        b.write_all(&pattern(!(next + QUEUED)).to_le_bytes())?;
        next += 1;
        Ok(())
    }))
}

/// Queues messages of different lengths and checks that each comes out whole and in its turn.
fn messages(kind: SockType) -> Result<Check> {
    const QUEUED: u64 = 5;
    let (a, b) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_NONBLOCK)?;
    let message = |n: u64| pattern_bytes(n, 1 + (n % 300) as usize);
    for n in 0..QUEUED {
        send(a.as_raw_fd(), &message(n), MsgFlags::empty())?;
    }
    let mut next = 0u64;
    Ok(Box::new(move || {
        let mut buffer = [0; 1024];
        let length = recv(b.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        ensure!(buffer[..length] == message(next), "message {next} came out with {length} bytes, or changed");
        send(a.as_raw_fd(), &message(next + QUEUED), MsgFlags::empty())?;
        next += 1;
        Ok(())
    }))
}

/// A datagram pair with queued messages.
pub fn datagram(_: &Path) -> Result<Check> {
    messages(SockType::Datagram)
}

/// A seqpacket pair with queued messages.
pub fn seqpacket(_: &Path) -> Result<Check> {
    messages(SockType::SeqPacket)
}

/// The only descriptor of a pipe's reading end is inside a socket's queue.
pub fn descriptor_in_flight(_: &Path) -> Result<Check> {
    let (a, b) = UnixDatagram::pair()?;
    b.set_nonblocking(true)?;
    let (reader, writer) = nix::unistd::pipe()?;
    let mut writer = std::fs::File::from(writer);
    let put = move |fd: RawFd| -> Result<()> {
        let rights = [fd];
        let data = [std::io::IoSlice::new(b"take it")];
        sendmsg::<()>(a.as_raw_fd(), &data, &[ControlMessage::ScmRights(&rights)], MsgFlags::empty(), None)?;
        Ok(())
    };
    put(reader.as_raw_fd())?;
    drop(reader);
    let mut written = 0u64;
    Ok(Box::new(move || {
        writer.write_all(&pattern(written).to_le_bytes())?;
        let mut text = [0; 16];
        let mut space = nix::cmsg_space!(RawFd);
        let mut data = [std::io::IoSliceMut::new(&mut text)];
        let message = recvmsg::<()>(b.as_raw_fd(), &mut data, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
        let fd = message.cmsgs()?.find_map(|c| match c {
            ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
            _ => None,
        });
        let mut reader = crate::raw::received_file(fd.context("the message came without its descriptor")?);
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes)?;
        ensure!(u64::from_le_bytes(bytes) == pattern(written), "the pipe that was in flight has the wrong data");
        written += 1;
        put(reader.as_raw_fd())
    }))
}

fn conversation(listener: UnixListener, address: SocketAddr) -> Result<Check> {
    let mut client = UnixStream::connect_addr(&address)?;
    let (mut server, _) = listener.accept()?;
    let mut turn = 0u64;
    client.write_all(&pattern(turn).to_le_bytes())?;
    Ok(Box::new(move || {
        let mut bytes = [0; 8];
        server.read_exact(&mut bytes)?;
        ensure!(u64::from_le_bytes(bytes) == pattern(turn), "the kept connection has the wrong data");
        turn += 1;
        client.write_all(&pattern(turn).to_le_bytes())?;

        let mut another = UnixStream::connect_addr(&address).context("connecting anew")?;
        let (mut accepted, _) = listener.accept()?;
        another.write_all(b"hello")?;
        let mut text = [0; 5];
        accepted.read_exact(&mut text)?;
        ensure!(&text == b"hello", "a new connection has the wrong data");
        Ok(())
    }))
}

/// A listening socket with a path, a connection that it accepted, and new ones all the time.
pub fn listener(place: &Path) -> Result<Check> {
    let address = SocketAddr::from_pathname(place.join("socket"))?;
    conversation(UnixListener::bind_addr(&address)?, address)
}

/// The same with an abstract name.
pub fn abstract_listener(_: &Path) -> Result<Check> {
    let address = SocketAddr::from_abstract_name("zoo")?;
    conversation(UnixListener::bind_addr(&address)?, address)
}

/// A connection that waits to be accepted. Nothing has been sent on it yet: CRIU does not carry that.
pub fn pending_connection(place: &Path) -> Result<Check> {
    let path = place.join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut client = UnixStream::connect(&path)?;
    Ok(Box::new(move || {
        let (mut server, _) = listener.accept()?;
        client.write_all(b"hello")?;
        let mut text = [0; 5];
        server.read_exact(&mut text)?;
        ensure!(&text == b"hello", "the connection that waited has the wrong data");
        client = UnixStream::connect(&path)?;
        Ok(())
    }))
}

/// The same with data that was sent before the accept.
pub fn pending_data(place: &Path) -> Result<Check> {
    let path = place.join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut client = UnixStream::connect(&path)?;
    client.write_all(b"early")?;
    Ok(Box::new(move || {
        let (mut server, _) = listener.accept()?;
        let mut text = [0; 5];
        server.read_exact(&mut text)?;
        ensure!(&text == b"early", "what was sent before the accept is wrong");
        server.write_all(b"late")?;
        client.read_exact(&mut text[..4])?;
        ensure!(&text[..4] == b"late", "the answer is wrong");
        client = UnixStream::connect(&path)?;
        client.write_all(b"early")?;
        Ok(())
    }))
}
