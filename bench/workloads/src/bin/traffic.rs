//! The server of numbered traffic; see [`tranship_workloads::traffic`]. Its arguments are multicast groups, in which it hears
//! datagrams, too.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use tranship_workloads::traffic::{Numbers, Service, TRAFFIC_PORT, give_out};

const PIECE: usize = 64 << 10;
/// Room for datagrams that arrive together: what is held in a second, at 10,000 a second.
const DATAGRAMS: usize = 4 << 20;

/// Bytes that ended connections of [`Service::Mute`] have brought.
static TOTAL: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, TRAFFIC_PORT)).context("cannot bind UDP")?;
    setsockopt(&socket, sockopt::RcvBuf, &DATAGRAMS)?;
    for group in std::env::args().skip(1) {
        join(&socket, &group).with_context(|| format!("cannot join {group}"))?;
    }
    spawn(move || reflect(&socket));
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, TRAFFIC_PORT)).context("cannot listen on TCP")?;
    let echoes = Arc::new(Echoes::new()?);
    let served = Arc::clone(&echoes);
    spawn(move || served.serve());
    loop {
        // A client that gave up, or a limit that others have reached: the next one may succeed.
        let Ok((stream, _)) = listener.accept() else { continue };
        // What a connection begins with comes with it; only a pause is served here.
        match Service::read(&stream) {
            Ok(Service::Pause(time)) => sleep(time),
            Ok(Service::Echo) => drop(echoes.add(stream)),
            Ok(service) => drop(spawn(move || serve(&stream, service))),
            Err(_) => {}
        }
    }
}

/// Joins a multicast group on the container's interface.
fn join(socket: &UdpSocket, group: &str) -> Result<()> {
    const INTERFACE: &str = "eth0";
    match group.parse()? {
        IpAddr::V6(group) => socket.join_multicast_v6(&group, if_nametoindex(INTERFACE)?)?,
        IpAddr::V4(group) => {
            let mut own = getifaddrs()?.filter(|own| own.interface_name == INTERFACE);
            let address = own.find_map(|own| Some(own.address?.as_sockaddr_in()?.ip()));
            socket.join_multicast_v4(&group, &address.context("it has no address")?)?;
        }
    }
    Ok(())
}

/// Sends each datagram back; one of four bytes has it read no more for so many milliseconds.
fn reflect(socket: &UdpSocket) {
    let mut bytes = [0; 2048];
    loop {
        if let Ok((length, from)) = socket.recv_from(&mut bytes) {
            if length == 4 {
                let pause = bytes.first_chunk().map_or(0, |pause| u32::from_le_bytes(*pause));
                sleep(Duration::from_millis(pause.into()));
                continue;
            }
            // Who sent it may have gone.
            let _ = socket.send_to(&bytes[..length], from);
        }
    }
}

fn serve(stream: &TcpStream, service: Service) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match service {
        Service::Later(time) => {
            sleep(time);
            pass_on(stream, stream)
        }
        Service::Intake => {
            let count = take_in(stream)?;
            let mut to = stream;
            to.write_all(&count.to_le_bytes())
        }
        Service::Output(rate) => give_out_to(stream, rate),
        Service::Mute => {
            stream.shutdown(Shutdown::Write)?;
            TOTAL.fetch_add(take_in(stream)?, Ordering::SeqCst);
            Ok(())
        }
        Service::Total => {
            let mut to = stream;
            to.write_all(&TOTAL.load(Ordering::SeqCst).to_le_bytes())
        }
        Service::Relay(address) => {
            let next = TcpStream::connect(address)?;
            next.set_nodelay(true)?;
            let (from, to) = (stream.try_clone()?, next.try_clone()?);
            let there = spawn(move || pass_on(&from, &to));
            pass_on(&next, stream)?;
            there.join().unwrap_or(Ok(()))
        }
        Service::Echo | Service::Pause(_) => Ok(()),
    }
}

fn pass_on(mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return to.shutdown(Shutdown::Write),
            length => to.write_all(&piece[..length])?,
        }
    }
}

/// Takes numbers in to the end; how many bytes. After a wrong one the connection is reset, since bytes stay unread.
fn take_in(mut from: &TcpStream) -> io::Result<u64> {
    let (mut numbers, mut piece) = (Numbers::default(), vec![0; PIECE]);
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(numbers.at()),
            length => {
                if let Err(mismatch) = numbers.check(&piece[..length]) {
                    setsockopt(&from, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
                    return Err(io::Error::new(ErrorKind::InvalidData, mismatch));
                }
            }
        }
    }
}

/// Sends numbers until the other side ends its direction.
fn give_out_to(stream: &TcpStream, rate: Option<u32>) -> io::Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    let (mut from, flag) = (stream.try_clone()?, Arc::clone(&ended));
    spawn(move || {
        let _ = from.read(&mut [0]);
        flag.store(true, Ordering::SeqCst);
    });
    give_out(stream, rate, &ended, |_| ()).map(drop)
}

/// Connections whose every byte is sent back, by one thread, however many they are.
struct Echoes {
    poll: Epoll,
    streams: Mutex<HashMap<RawFd, Echo>>,
}

struct Echo {
    stream: TcpStream,
    /// What could not be sent back yet.
    rest: Vec<u8>,
    ended: bool,
}

impl Echoes {
    fn new() -> Result<Self> {
        let poll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { poll, streams: Mutex::default() })
    }

    fn add(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let id = stream.as_raw_fd();
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        self.poll.add(&stream, EpollEvent::new(events, id as u64))?;
        streams.insert(id, Echo { stream, rest: Vec::new(), ended: false });
        Ok(())
    }

    fn serve(&self) {
        let mut events = [EpollEvent::empty(); 256];
        let mut piece = vec![0; PIECE];
        loop {
            let Ok(count) = self.poll.wait(&mut events, EpollTimeout::NONE) else { continue };
            for event in &events[..count] {
                let id = event.data() as RawFd;
                let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(echo) = streams.get_mut(&id) else { continue };
                if !matches!(echo.go_on(&mut piece), Ok(true)) {
                    streams.remove(&id);
                }
            }
        }
    }
}

impl Echo {
    /// Sends back what there is; false when both directions have ended.
    fn go_on(&mut self, piece: &mut [u8]) -> io::Result<bool> {
        loop {
            while !self.rest.is_empty() {
                match self.stream.write(&self.rest) {
                    Ok(length) => drop(self.rest.drain(..length)),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                    Err(e) => return Err(e),
                }
            }
            if self.ended {
                self.stream.shutdown(Shutdown::Write)?;
                return Ok(false);
            }
            match self.stream.read(piece) {
                Ok(0) => self.ended = true,
                Ok(length) => self.rest.extend_from_slice(&piece[..length]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) => return Err(e),
            }
        }
    }
}
