//! Internet sockets on the loopback interface inside the container.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};

use crate::raw;
use crate::species::{Check, pattern};

/// How long a socket may wait for its peer in the same process.
const PATIENCE: Duration = Duration::from_secs(60);

fn pair() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(PATIENCE))?;
    }
    Ok((client, server))
}

/// A bound UDP socket and a connected one. UDP may lose what is under way, so it is asked three times.
pub fn udp(_: &Path) -> Result<Check> {
    let server = UdpSocket::bind("127.0.0.1:0")?;
    let client = UdpSocket::bind("127.0.0.1:0")?;
    client.connect(server.local_addr()?)?;
    server.set_read_timeout(Some(Duration::from_secs(1)))?;
    setsockopt(&server, sockopt::Broadcast, &true)?;
    let (here, there) = (client.local_addr()?, server.local_addr()?);
    let mut n = 0u64;
    Ok(Box::new(move || {
        ensure!(client.local_addr()? == here && client.peer_addr()? == there, "the addresses changed");
        ensure!(getsockopt(&server, sockopt::Broadcast)?, "an option of the socket is gone");
        for _ in 0..3 {
            n += 1;
            client.send(&n.to_le_bytes())?;
            let mut bytes = [0; 16];
            while let Ok((length, from)) = server.recv_from(&mut bytes) {
                ensure!(length == 8 && from == here, "{length} bytes came from {from}");
                if bytes[..8] == n.to_le_bytes() {
                    return Ok(());
                }
            }
        }
        bail!("three datagrams were lost")
    }))
}

/// Sockets with datagrams that they read at the next look only, when others have taken their place.
pub fn unread(_: &Path) -> Result<Check> {
    const SIZES: [usize; 4] = [9, 0, 20_000, 10];
    let pairs = ["127.0.0.1:0", "[::1]:0"].map(|address| -> Result<_> {
        let (server, client) = (UdpSocket::bind(address)?, UdpSocket::bind(address)?);
        server.set_nonblocking(true)?;
        client.connect(server.local_addr()?)?;
        Ok((server, client))
    });
    let pairs = pairs.into_iter().collect::<Result<Vec<_>>>()?;
    let send = |client: &UdpSocket, n: u8| SIZES.iter().try_for_each(|size| client.send(&vec![n; *size]).map(drop));
    pairs.iter().try_for_each(|(_, client)| send(client, 0))?;
    let mut n = 0u8;
    Ok(Box::new(move || {
        let mut bytes = vec![0; 1 << 16];
        for (server, client) in &pairs {
            for size in SIZES {
                let (length, from) = server.recv_from(&mut bytes).context("a datagram is gone")?;
                ensure!(length == size && from == client.local_addr()?, "{length} bytes for {size}, from {from}");
                ensure!(bytes[..length].iter().all(|byte| *byte == n), "it is another datagram");
            }
            ensure!(server.recv_from(&mut bytes).is_err(), "there is one more");
            send(client, n.wrapping_add(1))?;
        }
        n = n.wrapping_add(1);
        Ok(())
    }))
}

/// A socket that has joined two groups, one of them for one source only, and sends to both.
pub fn multicast(_: &Path) -> Result<Check> {
    let here = Ipv4Addr::LOCALHOST;
    let (group, by_source) = (Ipv4Addr::new(239, 77, 0, 2), Ipv4Addr::new(232, 77, 0, 2));
    let member = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    member.join_multicast_v4(&group, &here)?;
    raw::join_source(member.as_fd(), by_source, here)?;
    member.set_multicast_ttl_v4(7)?;
    member.set_read_timeout(Some(Duration::from_secs(1)))?;
    let sender = UdpSocket::bind((here, 0))?;
    raw::send_multicast_from(sender.as_fd(), here)?;
    let port = member.local_addr()?.port();
    let mut n = 0u64;
    Ok(Box::new(move || {
        ensure!(member.multicast_ttl_v4()? == 7, "IP_MULTICAST_TTL is another one");
        for group in [group, by_source] {
            n += 1;
            ensure!(comes(&sender, &member, (group, port), n)?, "nothing comes from group {group}");
        }
        Ok(())
    }))
}

/// Whether a number arrives, of three that are sent: UDP may lose what is under way.
fn comes(sender: &UdpSocket, member: &UdpSocket, to: (Ipv4Addr, u16), number: u64) -> Result<bool> {
    let mut bytes = [0; 16];
    for _ in 0..3 {
        sender.send_to(&number.to_le_bytes(), to)?;
        while let Ok((length, _)) = member.recv_from(&mut bytes) {
            if bytes[..length] == number.to_le_bytes() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Options that CRIU does not carry.
pub fn uncarried_options(_: &Path) -> Result<Check> {
    let udp = UdpSocket::bind("[::1]:0")?;
    setsockopt(&udp, sockopt::ReceiveTimestampns, &true)?;
    setsockopt(&udp, sockopt::Ipv6RecvPacketInfo, &true)?;
    setsockopt(&udp, sockopt::UdpGroSegment, &true)?;
    let (tcp, _other) = pair()?;
    setsockopt(&tcp, sockopt::TcpUserTimeout, &77_000)?;
    setsockopt(&tcp, sockopt::TcpCongestion, &"reno".into())?;
    Ok(Box::new(move || {
        ensure!(getsockopt(&udp, sockopt::ReceiveTimestampns)?, "SO_TIMESTAMPNS is gone");
        ensure!(getsockopt(&udp, sockopt::Ipv6RecvPacketInfo)?, "IPV6_RECVPKTINFO is gone");
        ensure!(getsockopt(&udp, sockopt::UdpGroSegment)?, "UDP_GRO is gone");
        let timeout = getsockopt(&tcp, sockopt::TcpUserTimeout)?;
        ensure!(timeout == 77_000, "TCP_USER_TIMEOUT is {timeout}");
        let control = getsockopt(&tcp, sockopt::TcpCongestion)?;
        ensure!(control.to_string_lossy().trim_end_matches('\0') == "reno", "TCP_CONGESTION is {control:?}");
        Ok(())
    }))
}

/// A listening socket that accepts a new connection now and then. Not at every check: CRIU refuses to dump while a
/// connection waits to be accepted, and a connection made fifty times a second would meet the freeze too often.
pub fn listener(_: &Path) -> Result<Check> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut n = 0u64;
    Ok(Box::new(move || {
        ensure!(listener.local_addr()? == address, "the listener changed its address");
        n += 1;
        if n % 25 == 1 {
            let mut client = TcpStream::connect_timeout(&address, PATIENCE).context("connecting anew")?;
            let (mut server, _) = listener.accept()?;
            client.write_all(b"hello")?;
            server.set_read_timeout(Some(PATIENCE))?;
            let mut text = [0; 5];
            server.read_exact(&mut text)?;
            ensure!(&text == b"hello", "a new connection has the wrong data");
        }
        Ok(())
    }))
}

/// An established connection with unread data in both directions.
pub fn queued_data(_: &Path) -> Result<Check> {
    const QUEUED: u64 = 1000;
    let (mut a, mut b) = pair()?;
    for token in 0..QUEUED {
        a.write_all(&pattern(token).to_le_bytes())?;
        b.write_all(&pattern(!token).to_le_bytes())?;
    }
    let mut next = 0u64;
    Ok(Box::new(move || {
        for _ in 0..5 {
            let mut bytes = [0; 8];
            b.read_exact(&mut bytes)?;
            ensure!(u64::from_le_bytes(bytes) == pattern(next), "token {next} to the server is wrong");
            a.read_exact(&mut bytes)?;
            ensure!(u64::from_le_bytes(bytes) == pattern(!next), "token {next} to the client is wrong");
            a.write_all(&pattern(next + QUEUED).to_le_bytes())?;
            b.write_all(&pattern(!(next + QUEUED)).to_le_bytes())?;
            next += 1;
        }
        Ok(())
    }))
}

/// Connections whose readers acknowledge what they have read 40 ms later, whatever happens to the program meanwhile, while the writers' next
/// data wait for that (Nagle): of some those that connected write, of others those that accepted.
pub fn delayed_acknowledgements(_: &Path) -> Result<Check> {
    const CONNECTIONS: usize = 32;
    let mut pairs = both_ways(CONNECTIONS)?;
    let mut n = 0u64;
    let expect = |mut from: &TcpStream, n: u64| -> Result<()> {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        ensure!(bytes == n.to_le_bytes(), "what was read is not what was written");
        Ok(())
    };
    pairs.iter_mut().try_for_each(|(writer, _)| writer.write_all(&n.to_le_bytes()))?;
    Ok(Box::new(move || {
        for (writer, reader) in &pairs {
            expect(reader, n)?;
            // The kernel delays the acknowledgement of what comes after an answer: it may go with the next one.
            for (mut from, to) in [(writer, reader), (reader, writer), (writer, reader)] {
                from.write_all(&n.to_le_bytes())?;
                expect(to, n)?;
            }
        }
        n += 1;
        pairs.iter_mut().try_for_each(|(writer, _)| Ok(writer.write_all(&n.to_le_bytes())?))
    }))
}

/// Connections whose writers have data that they cannot send, since the reader's window is full.
pub fn full_window(_: &Path) -> Result<Check> {
    const BUFFER: usize = 16 << 10;
    const BYTES: usize = 64;
    fn expected(at: u64) -> [u8; BYTES] {
        std::array::from_fn(|i| pattern(at + i as u64) as u8)
    }
    fn fill(mut writer: &TcpStream, mut at: u64) -> Result<u64> {
        loop {
            match writer.write(&expected(at)) {
                Ok(length) => at += length as u64,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(at),
                Err(e) => return Err(e.into()),
            }
        }
    }
    let mut pairs = Vec::new();
    for (writer, reader) in both_ways(4)? {
        setsockopt(&reader, sockopt::RcvBuf, &BUFFER)?;
        setsockopt(&writer, sockopt::SndBuf, &BUFFER)?;
        writer.set_nonblocking(true)?;
        let written = fill(&writer, 0)?;
        ensure!(written > BUFFER as u64, "only {written} bytes were taken");
        pairs.push((writer, reader, 0, written));
    }
    Ok(Box::new(move || {
        for (writer, reader, read, written) in &mut pairs {
            let mut bytes = [0; BYTES];
            reader.read_exact(&mut bytes)?;
            ensure!(bytes == expected(*read), "what was read at {read} is not what was written");
            *read += BYTES as u64;
            *written = fill(writer, *written)?;
        }
        Ok(())
    }))
}

/// Connections whose first end writes and whose other one reads: by turns the client and the server.
fn both_ways(count: usize) -> Result<Vec<(TcpStream, TcpStream)>> {
    (0..count)
        .map(|i| {
            let (client, server) = pair()?;
            Ok(if i % 2 == 0 { (client, server) } else { (server, client) })
        })
        .collect()
}

/// A connection of which one side has said that it will send no more.
pub fn half_closed(_: &Path) -> Result<Check> {
    let (mut a, mut b) = pair()?;
    a.shutdown(Shutdown::Write)?;
    let mut n = 0u64;
    Ok(Box::new(move || {
        let length = b.read(&mut [0; 8])?;
        ensure!(length == 0, "{length} bytes came after the end");
        ensure!(a.write(b"x").is_err(), "the closed direction takes data");
        n += 1;
        b.write_all(&n.to_le_bytes())?;
        let mut bytes = [0; 8];
        a.read_exact(&mut bytes)?;
        ensure!(bytes == n.to_le_bytes(), "the open direction has the wrong data");
        Ok(())
    }))
}

/// Options of a connection.
pub fn options(_: &Path) -> Result<Check> {
    let (a, _b) = pair()?;
    a.set_nodelay(true)?;
    a.set_nonblocking(true)?;
    setsockopt(&a, sockopt::KeepAlive, &true)?;
    setsockopt(&a, sockopt::TcpKeepIdle, &77)?;
    setsockopt(&a, sockopt::TcpKeepCount, &7)?;
    setsockopt(&a, sockopt::TcpKeepInterval, &17)?;
    Ok(Box::new(move || {
        let _peer = &_b;
        ensure!(a.nodelay()?, "TCP_NODELAY is gone");
        ensure!(getsockopt(&a, sockopt::KeepAlive)?, "SO_KEEPALIVE is gone");
        let keep = (
            getsockopt(&a, sockopt::TcpKeepIdle)?,
            getsockopt(&a, sockopt::TcpKeepCount)?,
            getsockopt(&a, sockopt::TcpKeepInterval)?,
        );
        ensure!(keep == (77, 7, 17), "the keepalive times are {keep:?}");
        let read = (&a).read(&mut [0]).map_err(|e| e.kind());
        ensure!(read == Err(ErrorKind::WouldBlock), "reading gave {read:?}");
        Ok(())
    }))
}

/// A connection that waits to be accepted.
pub fn pending(_: &Path) -> Result<Check> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut client = TcpStream::connect(address)?;
    Ok(Box::new(move || {
        let (mut server, _) = listener.accept()?;
        client.write_all(b"hello")?;
        server.set_read_timeout(Some(PATIENCE))?;
        let mut text = [0; 5];
        server.read_exact(&mut text)?;
        ensure!(&text == b"hello", "the connection that waited has the wrong data");
        client = TcpStream::connect(address)?;
        Ok(())
    }))
}
