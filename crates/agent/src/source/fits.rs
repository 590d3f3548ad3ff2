//! Whether what must travel in the freeze fits into the longest freeze that is allowed.

use std::sync::Arc;

use tranship_coordinator::Failure;
use tranship_memory::tracker::{Method, Tracker};
use tranship_types::{Blocker, BlockerKind, Compress, NodeName};

use super::{SourceRun, failed};
use crate::probes;

/// By how much compression makes pages fewer at most, as far as anybody counts on it.
const COMPRESSED: f64 = 3.0;

/// What stands in the way of a freeze in which so many bytes travel at this rate, in bytes a second.
pub fn too_slow((name, peer): (&str, &NodeName), bytes: u64, rate: f64, limit: std::time::Duration) -> Option<Blocker> {
    let seconds = bytes as f64 / rate.max(1.0);
    (seconds > limit.as_secs_f64()).then(|| {
        let cause = format!(
            "{:.1} MB of container {name} would travel while it is frozen, for which the link to node {peer} ({:.2} MB/s) needs {seconds:.1} \
             s, and --freeze-timeout allows {:.1} s",
            bytes as f64 / 1e6,
            rate / 1e6,
            limit.as_secs_f64()
        );
        let remedy = "move it in a mode in which memory does not travel in the freeze (--mode hybrid or postcopy), or give a larger \
                      --freeze-timeout";
        Blocker::new(BlockerKind::TooSlow, cause, remedy)
    })
}

/// At how many bytes of pages a second a link counts that carries so many, where pages are compressed.
pub fn pages_rate(rate: f64, compress: Compress) -> f64 {
    if compress == Compress::Off { rate } else { rate * COMPRESSED }
}

impl SourceRun {
    /// Refuses a freeze in which so many bytes would have to travel, if they do not fit at this rate. Pages of zeros among them, which
    /// do not travel, are counted where that may make a difference.
    pub(super) fn refuse_too_long(
        &self,
        bytes: u64,
        rate: f64,
        zeros: impl FnOnce() -> Result<u64, Failure>,
    ) -> Result<(), Failure> {
        let too_slow = |bytes| too_slow((&self.name, &self.peer), bytes, rate, self.interrupt.freeze_timeout());
        if too_slow(bytes).is_none() {
            return Ok(());
        }
        let blocker = too_slow(bytes.saturating_sub(zeros()?));
        Failure::blocked(blocker.into_iter().collect()).map_or(Ok(()), Err)
    }

    /// Refuses a freeze in which all memory would have to travel, if it does not fit: without rounds only a look at the link tells.
    pub(super) fn probe_link(&mut self) -> Result<(), Failure> {
        let (container, offer) = self.inspected()?;
        let (container, bytes, streams) = (container.clone(), offer.memory_bytes, offer.streams);
        let needed = bytes as f64 / self.interrupt.freeze_timeout().as_secs_f64();
        let compress = self.report.read().options.compress;
        let (node, peer) = (Arc::clone(&self.node), self.peer.clone());
        // A link that carries more than twice as much is not looked at for longer.
        let measured = self.interrupt.aside(move || probes::measure_until(&node, &peer, streams, Some(2.0 * needed)));
        match measured {
            Ok(link) => self.refuse_too_long(bytes, pages_rate(link.rate, compress), || {
                self.interrupt.aside(move || container.processes().map(|pids| zeros(&pids)).map_err(failed))
            }),
            Err(failure) => {
                self.interrupt.check()?;
                tracing::info!(id = %self.id, %failure, "the link is not measured; the freeze has its limit all the same");
                Ok(())
            }
        }
    }
}

/// How many bytes of the processes' memory are zeros.
pub fn zeros(pids: &[u32]) -> u64 {
    Tracker::new(Method::Hash).zeros(pids)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        let (name, peer) = ("kv", "b".parse::<NodeName>().unwrap());
        let limit = Duration::from_secs(3);
        assert_eq!(too_slow((name, &peer), 30_000_000, 10_000_001.0, limit), None);
        let blocker = too_slow((name, &peer), 30_000_000, 1_000_000.0, limit).unwrap();
        for word in ["kv", "node b", "30.0 MB", "1.00 MB/s", "30.0 s", "3.0 s"] {
            assert!(blocker.cause.contains(word), "{word}: {}", blocker.cause);
        }
        assert!(blocker.remedy.contains("--freeze-timeout") && blocker.remedy.contains("hybrid"));
        assert!(too_slow((name, &peer), 1, 0.0, Duration::from_millis(100)).is_some(), "a link that carries nothing");
        assert_eq!(too_slow((name, &peer), 0, 0.0, limit), None);
    }
}
