use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::Lab;

use super::service::Service;
use super::witness::Witness;
use super::{LIMIT, Workload};
use crate::run::Figures;

/// The iterations and the result of the first run.
static FIRST: Mutex<Option<(u64, String)>> = Mutex::new(None);

/// A computation of a fixed amount of work: bench-stencil.
pub struct StencilLoad {
    service: Service,
    client: Witness,
    end: Receiver<Result<String>>,
    iterations: u64,
    resident_bytes: u64,
}

impl StencilLoad {
    /// Starts it and its work.
    pub fn start(lab: &Lab, node: &str, name: &str, iterations: u64) -> Result<Self> {
        let mut service = Service::run(lab, node, name, "bench-stencil", &[])?;
        let mut runner = Service::connect(lab)?;
        let client = Witness::start(lab)?;
        let (sender, end) = channel();
        std::thread::spawn(move || {
            // Answered at the end of the work; the lab's end is the connection's end too.
            let _ = sender.send(runner.text(&["RUN", &iterations.to_string()]));
        });
        while service.number("DONE")? == 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        let resident_bytes = service.number("RESIDENT")?;
        Ok(Self { service, client, end, iterations, resident_bytes })
    }
}

impl Workload for StencilLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Waits for the first quarter of the work to be done.
    fn mark(&mut self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.service.number("DONE")? < self.iterations / 4 {
            if Instant::now() >= deadline {
                bail!("the stencil has not done a quarter of its work within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.client.mark()
    }

    fn check(&mut self) -> Result<Figures> {
        if self.service.number("DONE")? >= self.iterations {
            bail!("the stencil had done its work before the move had ended; it needs more iterations");
        }
        let mut figures = self.client.check()?;
        let said = self.end.recv_timeout(LIMIT).context("the stencil does not end")??;
        let (ms, result) = said.split_once(' ').with_context(|| format!("the stencil said {said:?}"))?;
        figures.push(("run_ms", ms.parse().with_context(|| format!("the stencil ran for {ms:?} ms"))?));
        // The same work has the same result, moved or not.
        let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = first.get_or_insert_with(|| (self.iterations, result.to_owned()));
        if *expected != (self.iterations, result.to_owned()) {
            bail!("the stencil's result is {result}; in an earlier run it was {}", expected.1);
        }
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        self.service.number("DONE")
    }
}
