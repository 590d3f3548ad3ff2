use serde::{Deserialize, Serialize};

/// How long something took, many times over: a histogram whose classes grow by a quarter of an octave, so that what is read
/// from it is right to a fifth.
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
        self.classes.iter().sum()
    }

    /// The time in µs that a share `q` (0 to 1) of them did not exceed; `None` if there are none.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let wanted = (self.count() as f64 * q).ceil().max(1.0) as u64;
        let mut seen = 0;
        let class = self.classes.iter().position(|n| {
            seen += n;
            seen >= wanted
        })?;
        Some(((class + 1) as f64 / 4.0).exp2())
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
    fn quantiles_are_right_to_a_fifth() {
        let mut all = Latencies::default();
        assert_eq!(all.quantile(0.5), None);
        (1..=1000).for_each(|us| all.add(Duration::from_micros(us)));
        assert_eq!(all.count(), 1000);
        for (q, exact) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let found = all.quantile(q).unwrap();
            assert!((exact..exact * 1.2).contains(&found), "{q}: {found}");
        }
        assert_eq!(all.classes().map(|(_, n)| n).sum::<u64>(), 1000);
        all.add(Duration::from_secs(1 << 40));
        all.add(Duration::ZERO);
        assert_eq!(all.count(), 1002);
    }
}
