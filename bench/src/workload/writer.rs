use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tranship_lab::{Lab, find_program};

use super::service::Service;
use super::witness::Witness;
use super::{ADDRESS, LIMIT, Workload};
use crate::run::Figures;

const PAGE: f64 = 4096.0;
/// For so long its rate is measured before the move.
const STRIDE: Duration = Duration::from_secs(1);

const PROGRAM: &str = "bench-writer";

/// A large memory, or a large file, that is rewritten at a given rate: bench-writer.
pub struct WriterLoad {
    service: Service,
    client: Witness,
    rate: u64,
    resident_bytes: u64,
    before: f64,
    marked: (Instant, u64),
}

impl WriterLoad {
    /// Starts it; it listens once its memory is filled.
    pub fn start(lab: &Lab, node: &str, name: &str, bytes: u64, rate: u64) -> Result<Self> {
        let arguments = [format!("--size={bytes}"), format!("--rate={rate}")];
        Self::watched(lab, Service::run(lab, node, name, PROGRAM, &arguments)?, rate)
    }

    /// Starts it in a container of Docker's, with a file of so many bytes in a volume on the nodes' disk; with none of both for no bytes.
    pub fn start_in_volume(lab: &Lab, node: &str, name: &str, bytes: u64, rate: u64) -> Result<Self> {
        for node in lab.nodes() {
            // What a node has on the disk it has there. All else of Docker's is in memory.
            let place = "mkdir /srv/docker /run/docker-data && mount --bind /srv/docker /run/docker-data";
            lab.check(&node, &["sh", "-c", place])?;
        }
        lab.start_docker()?;
        let inside = format!("/opt/{PROGRAM}");
        let program = format!("{}:{inside}:ro", find_program(PROGRAM)?.display());
        let mut options = vec!["--volume", &program];
        let mut command = vec![inside.clone(), format!("--rate={rate}")];
        if bytes > 0 {
            options.extend(["--volume", "data:/data"]);
            command.extend([format!("--size={bytes}"), "--file=/data/file".to_owned()]);
        } else {
            command.push("--size=1M".to_owned());
        }
        lab.docker_run(node, name, ADDRESS, &options, &command)?;
        Self::watched(lab, Service::connect(lab)?, rate)
    }

    fn watched(lab: &Lab, mut service: Service, rate: u64) -> Result<Self> {
        let resident_bytes = service.number("RESIDENT")?;
        let client = Witness::start(lab)?;
        Ok(Self { service, client, rate, resident_bytes, before: 0.0, marked: (Instant::now(), 0) })
    }

    fn rate_since(&mut self, (start, before): (Instant, u64)) -> Result<f64> {
        Ok((self.service.number("WRITTEN")? - before) as f64 * PAGE / start.elapsed().as_secs_f64())
    }
}

impl Workload for WriterLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        let begin = (Instant::now(), self.service.number("WRITTEN")?);
        std::thread::sleep(STRIDE);
        self.before = self.rate_since(begin)?;
        if self.before < self.rate as f64 * 1e6 * 0.9 {
            bail!(
                "it rewrites {:.0} MB/s before the move, not {}: the machine has too little to spare",
                self.before / 1e6,
                self.rate
            );
        }
        self.client.mark()?;
        self.marked = (Instant::now(), self.service.number("WRITTEN")?);
        Ok(())
    }

    fn check(&mut self) -> Result<Figures> {
        let during = self.rate_since(self.marked)?;
        let mut figures = self.client.check()?;
        figures.extend([("write_bytes_per_s_before", self.before), ("write_bytes_per_s_during", during)]);
        // Reads every page: whatever has not come yet has to come now, and be right.
        let start = Instant::now();
        self.service.text(&["VERIFY"])?;
        if start.elapsed() > LIMIT {
            bail!("reading all memory took {:.0} s", start.elapsed().as_secs_f64());
        }
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        self.service.number("WRITTEN")
    }
}
