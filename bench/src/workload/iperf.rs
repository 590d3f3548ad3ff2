use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tranship_lab::{CLIENT, Lab, RunOptions};
use tranship_workloads::traffic::{Course, now};

use super::traffic::{STRIDE, without_rate};
use super::{ADDRESS, LIMIT, Workload};
use crate::run::Figures;

/// iperf3 in the container sends to an iperf3 on the client node, both as Debian has them, on one connection besides the one by
/// which they talk about it. iperf3 itself tells its throughput every 0.1 s and not more often, so what comes to the client
/// is read off the client node's interface, each millisecond.
pub struct IperfLoad {
    resident_bytes: u64,
    client: Child,
    meter: Option<Meter>,
    marked: f64,
    course: Option<Course>,
}

/// Notes what the client node receives.
struct Meter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Course>>,
}

impl Meter {
    fn begin(lab: &Lab) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = lab.within(CLIENT, None, move || {
            // It stays in the namespace of the thread that starts it.
            Ok(std::thread::spawn(move || {
                let mut course = Course::begin();
                let mut before = received()?;
                while !stopped.load(Ordering::SeqCst) {
                    let all = received()?;
                    if all > before {
                        course.note(all - before);
                    }
                    before = all;
                    sleep(Duration::from_micros(900));
                }
                Ok(course)
            }))
        })??;
        Ok(Self { stop, thread })
    }

    fn end(self) -> Result<Course> {
        self.stop.store(true, Ordering::SeqCst);
        let Ok(course) = self.thread.join() else { bail!("the thread that notes what is received panicked") };
        course
    }
}

/// What `eth0` of the calling thread's network namespace has received, in bytes.
fn received() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let count = text.lines().find_map(|line| line.trim_start().strip_prefix("eth0:")?.split_whitespace().next());
    Ok(count.context("the client node has no eth0")?.parse()?)
}

impl IperfLoad {
    /// Starts the server, and the client as soon as there is one.
    pub fn start(lab: &Lab, node: &str, name: &str) -> Result<Self> {
        lab.run(node, name, &RunOptions::new(ADDRESS, ["iperf3", "--server"]))?;
        let address = ADDRESS.to_string();
        let deadline = Instant::now() + LIMIT;
        let client = loop {
            let arguments = ["iperf3", "--client", &address, "--reverse", "--time", "3600", "--interval", "0"];
            let mut command = lab.command(CLIENT, &arguments)?;
            let mut client = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
            // One that finds no server ends at once.
            sleep(Duration::from_millis(200));
            if client.try_wait()?.is_none() {
                break client;
            }
            ensure!(Instant::now() < deadline, "iperf3 does not begin: {}", last_words(&mut client));
        };
        let mut load = Self { resident_bytes: 0, client, meter: None, marked: now(), course: None };
        load.resident_bytes = crate::watch::resident(&["iperf3", "--server"])?;
        load.meter = Some(Meter::begin(lab)?);
        Ok(load)
    }
}

fn last_words(client: &mut Child) -> String {
    let mut said = String::new();
    if let Some(mut stderr) = client.stderr.take() {
        let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
    }
    said.trim().to_owned()
}

impl Workload for IperfLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        sleep(STRIDE);
        self.marked = now();
        Ok(())
    }

    fn check(&mut self) -> Result<Figures> {
        sleep(STRIDE);
        if let Some(status) = self.client.try_wait()? {
            bail!("iperf3 has ended ({status}): {}", last_words(&mut self.client));
        }
        let course = self.meter.take().context("the stream was ended before")?.end()?;
        let figures = vec![
            ("without_rate_ms", without_rate(&course, self.marked)?),
            ("stream_bytes_per_s", course.rate(self.marked - STRIDE.as_secs_f64(), self.marked)),
        ];
        self.course = Some(course);
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        bail!("traffic is not measured by its progress")
    }

    fn course(&mut self) -> Option<(f64, Course)> {
        Some((self.marked, self.course.take()?))
    }
}

impl Drop for IperfLoad {
    fn drop(&mut self) {
        if let Some(meter) = self.meter.take() {
            let _ = meter.end();
        }
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
