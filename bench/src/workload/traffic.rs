use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use tranship_lab::{CLIENT, Lab, RunOptions, find_program};
use tranship_workloads::traffic::{Course, Datagrams, Service, Stream, TRAFFIC_PORT, Way, now};

use super::{ADDRESS, LIMIT, Workload};
use crate::run::Figures;
use crate::suite::Traffic;

/// Before the move its rate is taken, after the move it is watched, for so long each.
pub(super) const STRIDE: Duration = Duration::from_secs(1);
/// A stream has recovered when it has this share of its rate again.
const RECOVERED: f64 = 0.9;
/// A connection that does not answer within this time is lost.
const ANSWER: Duration = Duration::from_secs(10);
/// Room for datagrams that come together.
const DATAGRAMS: usize = 4 << 20;

/// Numbered traffic between the client node and bench-traffic in the container.
pub struct TrafficLoad {
    resident_bytes: u64,
    client: Client,
    marked: f64,
    course: Option<Course>,
}

enum Client {
    Stream(Option<Stream>),
    Connections(Vec<TcpStream>),
    Datagrams(Option<Datagrams>),
}

impl TrafficLoad {
    /// Starts the server, and the client.
    pub fn start(lab: &Lab, node: &str, name: &str, traffic: Traffic) -> Result<Self> {
        let mut options = RunOptions::new(ADDRESS, ["/opt/bench-traffic"]);
        options.binds.push((find_program("bench-traffic")?, "/opt/bench-traffic".into()));
        lab.run(node, name, &options)?;
        // Until it has been asked for something, or closed, a connection keeps the server from the next one.
        drop(connect(lab)?);
        let client = match traffic {
            Traffic::Bulk => Client::Stream(Some(Stream::begin(connect(lab)?, Way::In, None, &[])?)),
            Traffic::Connections(count) => {
                let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
                setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
                let mut streams = Vec::new();
                for n in 0..count {
                    let stream = connect(lab).with_context(|| format!("connection {n}"))?;
                    stream.set_read_timeout(Some(ANSWER))?;
                    (&stream).write_all(&Service::Echo.to_bytes())?;
                    streams.push(stream);
                }
                Client::Connections(streams)
            }
            Traffic::Datagrams(rate) => {
                let socket = lab.within(CLIENT, None, || {
                    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
                    setsockopt(&socket, sockopt::RcvBuf, &DATAGRAMS)?;
                    socket.connect((ADDRESS, TRAFFIC_PORT))?;
                    Ok(socket)
                })??;
                Client::Datagrams(Some(Datagrams::begin(socket, rate)?))
            }
        };
        let resident_bytes = crate::watch::resident(&["/opt/bench-traffic"])?;
        let mut load = Self { resident_bytes, client, marked: now(), course: None };
        if load.answers() < load.connections() {
            bail!("not all connections are served before the move");
        }
        Ok(load)
    }

    fn connections(&self) -> usize {
        if let Client::Connections(streams) = &self.client { streams.len() } else { 0 }
    }

    /// How many connections are served.
    fn answers(&mut self) -> usize {
        let Client::Connections(streams) = &self.client else { return 0 };
        let served = |&(n, mut stream): &(u64, &TcpStream)| {
            let mut back = [0; 8];
            stream.write_all(&n.to_le_bytes()).and_then(|()| stream.read_exact(&mut back)).is_ok()
                && u64::from_le_bytes(back) == n
        };
        (0..).zip(streams).filter(served).count()
    }
}

/// A connection from the client node, once the server listens.
fn connect(lab: &Lab) -> Result<TcpStream> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match lab.connect(CLIENT, (ADDRESS, TRAFFIC_PORT).into(), Duration::from_secs(2)) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= deadline => return Err(e).context("the server does not answer"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// For how long, in ms, the stream had not the rate that it had before `marked`: from the beginning of its longest
/// standstill.
pub(super) fn without_rate(course: &Course, marked: f64) -> Result<f64> {
    let rate = course.rate(marked - STRIDE.as_secs_f64(), marked);
    let begin = course.longest_gap_begun(marked).context("nothing came after the mark")?;
    let regained = course.regains(rate * RECOVERED, begin + 0.01).context("the stream never had its rate again")?;
    Ok((regained - begin) * 1e3)
}

impl Workload for TrafficLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        std::thread::sleep(STRIDE);
        self.marked = now();
        Ok(())
    }

    fn check(&mut self) -> Result<Figures> {
        let total = self.connections();
        let served = self.answers();
        match &mut self.client {
            Client::Connections(_) => Ok(vec![("connections_lost", (total - served) as f64)]),
            Client::Stream(stream) => {
                std::thread::sleep(STRIDE);
                let course = stream.take().context("the stream was ended before")?.end()?;
                let figures = vec![
                    ("without_rate_ms", without_rate(&course, self.marked)?),
                    ("stream_bytes_per_s", course.rate(self.marked - STRIDE.as_secs_f64(), self.marked)),
                ];
                self.course = Some(course);
                Ok(figures)
            }
            Client::Datagrams(datagrams) => {
                std::thread::sleep(STRIDE);
                let tally = datagrams.take().context("the datagrams were ended before")?.end()?;
                self.course = Some(tally.course);
                Ok(vec![
                    ("datagrams_sent", tally.sent as f64),
                    ("datagrams_lost", tally.lost as f64),
                    ("datagrams_doubled", tally.doubled as f64),
                    ("datagrams_reordered", tally.reordered as f64),
                ])
            }
        }
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("traffic is not measured by its progress")
    }

    fn course(&mut self) -> Option<(f64, Course)> {
        Some((self.marked, self.course.take()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_without_its_rate_from_its_standstill_on() {
        let passed = [vec![100; 2000], vec![0; 60], vec![50; 40], vec![100; 500]].concat();
        let course = Course { begun: 100.0, passed };
        let ms = without_rate(&course, 101.5).unwrap();
        assert!((ms - 108.0).abs() < 2.1, "{ms}");
        let ended = Course { begun: 100.0, passed: [vec![100; 2000], vec![0; 60], vec![50; 400]].concat() };
        assert!(without_rate(&ended, 101.5).is_err());
    }
}
