use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::Course;

/// How long after the last datagram was sent its echo is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// What is late by more than this is not made up for.
const MOST_BEHIND: Duration = Duration::from_millis(10);

/// What became of numbered datagrams.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// How many were sent.
    pub sent: u64,
    /// Of how many no echo came.
    pub lost: u64,
    /// How many echoes came a second time.
    pub doubled: u64,
    /// How many came after a later one.
    pub reordered: u64,
    /// The first one lost and the last one, with the numbers from the first on: where in the course it happened.
    pub lost_range: Option<(u64, u64)>,
    /// Echoes over time.
    pub course: Course,
}

/// A client that sends numbered datagrams at a constant rate, and takes in their echoes.
#[derive(Debug)]
pub struct Datagrams {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<std::io::Result<u64>>,
    receiver: JoinHandle<std::io::Result<Received>>,
    done: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Received {
    times: Vec<u8>,
    count: u64,
    reordered: u64,
    course: Course,
}

impl Datagrams {
    /// Begins, on a socket that is connected to the server, with `rate` datagrams a second.
    ///
    /// # Errors
    /// The system's.
    pub fn begin(socket: UdpSocket, rate: u64) -> Result<Self> {
        Self::begin_between(socket.try_clone()?, socket, rate)
    }

    /// The same with one socket for what is sent, and another one for its echoes: whoever sends to a group is answered by others.
    ///
    /// # Errors
    /// The system's.
    pub fn begin_between(to: UdpSocket, from: UdpSocket, rate: u64) -> Result<Self> {
        from.set_read_timeout(Some(Duration::from_millis(20)))?;
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let sender = spawn(move || send(&to, rate, &stopped));
        let ended = Arc::clone(&done);
        let receiver = spawn(move || receive(&from, &ended));
        Ok(Self { stop, sender, receiver, done })
    }

    /// Stops sending, waits for what is under way.
    ///
    /// # Errors
    /// If the system refused to send or receive.
    pub fn end(self) -> Result<Tally> {
        self.stop.store(true, Ordering::SeqCst);
        let Ok(sent) = self.sender.join() else { bail!("the sender panicked") };
        sleep(PATIENCE);
        self.done.store(true, Ordering::SeqCst);
        let Ok(received) = self.receiver.join() else { bail!("the receiver panicked") };
        let (sent, received) = (sent?, received?);
        let lost: Vec<u64> =
            (0..sent).filter(|n| received.times.get(*n as usize).is_none_or(|times| *times == 0)).collect();
        Ok(Tally {
            sent,
            lost: lost.len() as u64,
            doubled: received.count + lost.len() as u64 - sent,
            reordered: received.reordered,
            lost_range: lost.first().copied().zip(lost.last().copied()),
            course: received.course,
        })
    }
}

fn send(to: &UdpSocket, rate: u64, stop: &AtomicBool) -> std::io::Result<u64> {
    let time_of = |n: u64| Duration::from_nanos(n * 1_000_000_000 / rate.max(1));
    let (mut start, mut since_start, mut sent) = (Instant::now(), 0, 0u64);
    while !stop.load(Ordering::SeqCst) {
        if start.elapsed().saturating_sub(time_of(since_start)) > MOST_BEHIND {
            (start, since_start) = (Instant::now(), 0);
        }
        while time_of(since_start) <= start.elapsed() {
            to.send(&sent.to_le_bytes())?;
            (since_start, sent) = (since_start + 1, sent + 1);
        }
        sleep(time_of(since_start).saturating_sub(start.elapsed()).max(Duration::from_micros(50)));
    }
    Ok(sent)
}

fn receive(from: &UdpSocket, done: &AtomicBool) -> std::io::Result<Received> {
    let mut received = Received { course: Course::begin(), ..Received::default() };
    let (mut bytes, mut latest) = ([0; 64], None);
    while !done.load(Ordering::SeqCst) {
        let number = match from.recv(&mut bytes) {
            Ok(8) => u64::from_le_bytes(*bytes.first_chunk().unwrap_or(&[0; 8])),
            Ok(_) => continue,
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => continue,
            Err(e) => return Err(e),
        };
        let at = number as usize;
        if received.times.len() <= at {
            received.times.resize(at + 1, 0);
        }
        received.times[at] = received.times[at].saturating_add(1);
        received.count += 1;
        received.reordered += u64::from(latest.is_some_and(|latest| number < latest));
        latest = latest.max(Some(number));
        received.course.note(1);
    }
    Ok(received)
}
