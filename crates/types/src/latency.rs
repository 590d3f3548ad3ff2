use serde::{Deserialize, Serialize};

/// How long something took, many times over: a histogram whose classes grow by a quarter of an octave. What is read from it is right to a
/// fifth, and better where those of a class are spread over it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Latencies {
    /// How often it took at least 2^(i/4) µs and less than 2^((i+1)/4); the first class begins at 0.
    classes: Vec<u64>,
}

/// The last class ends at over ten minutes.
const CLASSES: usize = 120;

impl Latencies {
    /// Counts one.
    pub fn add(&mut self, took: std::time::Duration) {
        let us = took.as_secs_f64() * 1e6;
        let class = if us < 1.0 { 0 } else { ((us.log2() * 4.0) as usize).min(CLASSES - 1) };
        if self.classes.len() <= class {
            self.classes.resize(class + 1, 0);
        }
        self.classes[class] += 1;
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.classes.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// The time in µs that a share `q` (0 to 1) of them did not exceed, if those of each class are spread evenly over its octaves; `None` if there
    /// are none.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let wanted = (self.count() as f64 * q).ceil().max(1.0) as u64;
        let mut before = 0u64;
        let class = self.classes.iter().position(|n| {
            let reached = before.saturating_add(*n) >= wanted;
            before += if reached { 0 } else { *n };
            reached
        })?;
        let part = (wanted - before) as f64 / self.classes[class] as f64;
        Some(((class as f64 + part) / 4.0).exp2())
    }

    /// The classes that are not empty: upper bound in µs, and how many.
    pub fn classes(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bound = |(class, n): (usize, &u64)| (((class + 1) as f64 / 4.0).exp2(), *n);
        self.classes.iter().enumerate().filter(|(_, n)| **n > 0).map(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn quantiles_are_found_within_a_class() {
        let mut all = Latencies::default();
        assert_eq!(all.quantile(0.5), None);
        (1..=1000).for_each(|us| all.add(Duration::from_micros(us)));
        assert_eq!(all.count(), 1000);
        // Of the last class only the lower half is there, whose end is not known.
        for (q, exact, off) in
            [(0.25, 250.0, 0.02), (0.5, 500.0, 0.02), (0.75, 750.0, 0.02), (0.99, 990.0, 0.2), (1.0, 1000.0, 0.2)]
        {
            let found = all.quantile(q).unwrap();
            assert!((found / exact - 1.0).abs() < off, "{q}: {found}");
        }
        assert_eq!(all.classes().map(|(_, n)| n).sum::<u64>(), 1000);
        all.add(Duration::from_secs(1 << 40));
        all.add(Duration::ZERO);
        assert_eq!(all.count(), 1002);
    }

    #[test]
    fn quantiles_of_a_class_alone_are_in_it() {
        let mut all = Latencies::default();
        all.add(Duration::from_micros(300));
        assert_eq!(all.quantile(0.0), all.quantile(1.0));
        (0..9).for_each(|_| all.add(Duration::from_micros(300)));
        let found = [0.0, 0.1, 0.5, 1.0].map(|q| all.quantile(q).unwrap());
        assert!(
            found.is_sorted() && found[0] > 256.0 && found[1] < found[2] && (found[3] - 304.4).abs() < 0.1,
            "{found:?}"
        );
    }
}
