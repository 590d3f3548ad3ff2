use std::time::{SystemTime, UNIX_EPOCH};

/// Now, in s since the Unix epoch.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// How much of something passed in each millisecond.
#[derive(Debug, Clone, Default)]
pub struct Course {
    /// When the first millisecond began, in s since the Unix epoch.
    pub begun: f64,
    /// For each millisecond, how much passed: bytes of a stream, or datagrams.
    pub passed: Vec<u64>,
}

impl Course {
    /// Begins now.
    pub fn begin() -> Self {
        Self { begun: now(), passed: Vec::new() }
    }

    /// Notes that so much has passed now.
    pub fn note(&mut self, much: u64) {
        let at = ((now() - self.begun) * 1e3).max(0.0) as usize;
        if self.passed.len() <= at {
            self.passed.resize(at + 1, 0);
        }
        self.passed[at] += much;
    }

    /// What passed in a second, on average from one time to another (s since the Unix epoch).
    pub fn rate(&self, from: f64, to: f64) -> f64 {
        let index = |time: f64| (((time - self.begun) * 1e3).max(0.0) as usize).min(self.passed.len());
        let (from, to) = (index(from), index(to));
        self.passed[from..to.max(from)].iter().sum::<u64>() as f64 * 1e3 / (to.saturating_sub(from).max(1)) as f64
    }

    /// The rate by so many milliseconds: the middle of each stretch in s since the Unix epoch, and what passed a second.
    pub fn rates(&self, ms: usize) -> Vec<(f64, f64)> {
        let middle = |n: usize| self.begun + (n as f64 + 0.5) * ms as f64 / 1e3;
        let rate = |bins: &[u64]| bins.iter().sum::<u64>() as f64 * 1e3 / ms as f64;
        self.passed.chunks_exact(ms).enumerate().map(|(n, bins)| (middle(n), rate(bins))).collect()
    }

    /// When, after `from`, the rate over the 10 ms before was `rate` again; `None` if it never was.
    pub fn regains(&self, rate: f64, from: f64) -> Option<f64> {
        const WINDOW: usize = 10;
        let first = ((from - self.begun) * 1e3).max(0.0) as usize;
        let enough = rate * WINDOW as f64 / 1e3;
        let windows = self.passed.get(first..)?.windows(WINDOW);
        let found = windows.enumerate().find(|(_, bins)| bins.iter().sum::<u64>() as f64 >= enough);
        found.map(|(n, _)| self.begun + (first + n + WINDOW) as f64 / 1e3)
    }

    /// The longest time in which nothing passed, in ms, between the first that passed and the last.
    pub fn longest_gap_ms(&self) -> usize {
        self.longest_gap(0).map_or(0, |(_, length)| length)
    }

    /// When the longest time after `from` began in which nothing passed, in s since the Unix epoch; `None` if something passed
    /// in every millisecond.
    pub fn longest_gap_begun(&self, from: f64) -> Option<f64> {
        let gap = self.longest_gap(((from - self.begun) * 1e3).max(0.0) as usize);
        gap.filter(|(_, length)| *length > 0).map(|(at, _)| self.begun + at as f64 / 1e3)
    }

    /// The longest gap from this millisecond on: where it begins, and its length.
    fn longest_gap(&self, from: usize) -> Option<(usize, usize)> {
        let busy: Vec<_> = (from..self.passed.len()).filter(|at| self.passed[*at] > 0).collect();
        let gaps = busy.windows(2).map(|pair| (pair[0] + 1, pair[1] - pair[0] - 1));
        gaps.max_by_key(|(_, length)| *length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course() -> Course {
        let passed = [vec![100; 50], vec![0; 30], vec![20; 10], vec![95; 30]].concat();
        Course { begun: 1000.0, passed }
    }

    #[test]
    fn a_stream_has_recovered_when_ten_milliseconds_had_the_rate() {
        let course = course();
        assert_eq!(course.rate(1000.01, 1000.04), 100_000.0);
        let regained = course.regains(90_000.0, 1000.08).unwrap();
        // Nine of 95 and one of 20 are 875, less than 900.
        assert!((regained - 1000.1).abs() < 2e-3, "{regained}");
        assert_eq!(course.regains(96_000.0, 1000.08), None);
        assert_eq!(course.regains(1.0, 2000.0), None);
    }

    #[test]
    fn gaps_lie_between_what_passed() {
        assert_eq!(course().longest_gap_ms(), 30);
        let begun = course().longest_gap_begun(1000.0).unwrap();
        assert!((begun - 1000.05).abs() < 1e-6, "{begun}");
        assert_eq!(course().longest_gap_begun(1000.09), None);
        assert_eq!(Course { begun: 0.0, passed: vec![0, 0, 1, 0] }.longest_gap_ms(), 0);
    }

    #[test]
    fn rates_are_by_stretches() {
        let rates = course().rates(10);
        assert_eq!(rates.len(), 12);
        assert!((rates[0].0 - 1000.005).abs() < 1e-6 && rates[0].1 == 100_000.0 && rates[5].1 == 0.0);
    }
}
