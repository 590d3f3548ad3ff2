use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Course, Numbers, Service};

/// Between two pieces of a stream that is to have a certain rate.
const TICK: Duration = Duration::from_millis(2);
const PIECE: usize = 64 << 10;
/// How long the other side may say nothing when it must.
const PATIENCE: Duration = Duration::from_secs(30);

/// Which way numbers go on a connection, seen from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the server, which takes them in.
    Out,
    /// From the server.
    In,
    /// To the server and back, both at once.
    Both,
}

/// A client that sends or receives numbers on one connection, and checks them.
#[derive(Debug)]
pub struct Stream {
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<Result<(Numbers, Course)>>>,
    receiver: Option<JoinHandle<Result<(Numbers, Course)>>>,
    stream: TcpStream,
    way: Way,
}

impl Stream {
    /// Begins. `rate` in bytes a second bounds what is sent, by the server if only that does; without one it is as much as goes. `through` are the services
    /// that the connection passes before it reaches the server.
    ///
    /// # Errors
    /// The connection's.
    pub fn begin(stream: TcpStream, way: Way, rate: Option<u32>, through: &[Service]) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let service = match way {
            Way::Out => Service::Intake,
            Way::In => Service::Output(rate),
            Way::Both => Service::Echo,
        };
        for service in through.iter().chain([&service]) {
            (&stream).write_all(&service.to_bytes())?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let sender = (way != Way::In).then(|| -> io::Result<_> {
            let (to, stop) = (stream.try_clone()?, Arc::clone(&stop));
            Ok(spawn(move || send(&to, rate, &stop)))
        });
        let receiver = (way != Way::Out).then(|| -> io::Result<_> {
            let from = stream.try_clone()?;
            Ok(spawn(move || receive(&from)))
        });
        Ok(Self { stop, sender: sender.transpose()?, receiver: receiver.transpose()?, stream, way })
    }

    /// Whether nothing has gone wrong so far.
    pub fn goes_on(&self) -> bool {
        [&self.sender, &self.receiver].into_iter().flatten().all(|thread| !thread.is_finished())
    }

    /// The client's port.
    ///
    /// # Errors
    /// The system's.
    pub fn port(&self) -> Result<u16> {
        Ok(self.stream.local_addr()?.port())
    }

    /// Ends it in order; the course of what the client received, or of what it sent where it only sends.
    ///
    /// # Errors
    /// If the connection failed, or a byte was lost, doubled or in the wrong place.
    pub fn end(self) -> Result<Course> {
        self.stop.store(true, Ordering::SeqCst);
        if self.way == Way::In {
            self.stream.shutdown(Shutdown::Write)?;
        }
        let join = |thread: JoinHandle<Result<(Numbers, Course)>>| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("the client's thread panicked"),
        };
        // Where nothing is received any more, nothing can be sent either after a while: that one is the consequence.
        let received = self.receiver.map(join).transpose().context("receiving")?;
        let sent = self.sender.map(join).transpose().context("sending")?;
        match (sent, received) {
            (Some((sent, _)), Some((received, course))) => {
                ensure!(sent == received, "{} bytes were sent, {} came back", sent.at(), received.at());
                Ok(course)
            }
            (Some((sent, course)), None) => {
                let mut count = [0; 8];
                (&self.stream).read_exact(&mut count).context("waiting for the server's count")?;
                let count = u64::from_le_bytes(count);
                ensure!(count == sent.at(), "{} bytes were sent, {count} arrived", sent.at());
                Ok(course)
            }
            (None, Some((_, course))) => Ok(course),
            (None, None) => Ok(Course::default()),
        }
    }
}

fn send(to: &TcpStream, rate: Option<u32>, stop: &AtomicBool) -> Result<(Numbers, Course)> {
    let mut course = Course::begin();
    let numbers = give_out(to, rate, stop, |sent| course.note(sent))?;
    Ok((numbers, course))
}

/// Sends numbers until it is to stop, then ends this direction: at most `rate` bytes a second, in small pieces, or as much as goes. `sent` hears of
/// each piece, in bytes.
///
/// # Errors
/// The connection's.
pub fn give_out(
    mut to: &TcpStream,
    rate: Option<u32>,
    stop: &AtomicBool,
    mut sent: impl FnMut(u64),
) -> io::Result<Numbers> {
    let (mut numbers, mut piece, begun) = (Numbers::default(), vec![0; PIECE], Instant::now());
    while !stop.load(Ordering::SeqCst) {
        let mut length = PIECE;
        if let Some(rate) = rate {
            sleep(TICK);
            let due = (begun.elapsed().as_secs_f64() * f64::from(rate)) as u64;
            length = length.min(due.saturating_sub(numbers.at()) as usize);
        }
        numbers.write(&mut piece[..length]);
        to.write_all(&piece[..length])?;
        numbers.pass(length);
        sent(length as u64);
    }
    to.shutdown(Shutdown::Write)?;
    Ok(numbers)
}

/// Receives numbers to the end of the other direction.
fn receive(mut from: &TcpStream) -> Result<(Numbers, Course)> {
    let (mut numbers, mut course) = (Numbers::default(), Course::begin());
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok((numbers, course)),
            length => {
                numbers.check(&piece[..length])?;
                course.note(length as u64);
            }
        }
    }
}
