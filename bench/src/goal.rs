//! What is to be reached, and whether it was.

use std::fmt;

use serde_json::{Value, json};

/// The unit that a figure is shown in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// ms.
    Milliseconds,
    /// µs.
    Microseconds,
    /// How many.
    Count,
    /// A ratio.
    Times,
    /// A part of a whole, 0 to 1; shown in percent.
    Share,
    /// Bytes; shown in 10^6 bytes.
    Megabytes,
    /// Bytes a second; shown in 10^9 bytes a second.
    GigabytesPerSecond,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Milliseconds => format!("{value:.1} ms"),
            Self::Microseconds => format!("{value:.0} µs"),
            Self::Count => format!("{value:.0}"),
            Self::Times => format!("{value:.2} ×"),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Megabytes => format!("{:.1} MB", value / 1e6),
            Self::GigabytesPerSecond => format!("{:.2} GB/s", value / 1e9),
        }
    }
}

/// A figure with the limit that it is to keep.
#[derive(Debug, Clone, PartialEq)]
pub struct Goal {
    /// What was measured, in words.
    pub what: String,
    /// The figure, in the unit's base: ms, µs, bytes, bytes a second.
    pub value: f64,
    limit: f64,
    at_least: bool,
    unit: Unit,
}

impl Goal {
    /// The figure is to be at most this.
    pub fn at_most(what: &str, value: f64, limit: f64, unit: Unit) -> Self {
        Self { what: what.to_owned(), value, limit, at_least: false, unit }
    }

    /// The figure is to be at least this.
    pub fn at_least(what: &str, value: f64, limit: f64, unit: Unit) -> Self {
        Self { what: what.to_owned(), value, limit, at_least: true, unit }
    }

    /// Whether it is reached.
    pub fn is_met(&self) -> bool {
        if self.at_least { self.value >= self.limit } else { self.value <= self.limit }
    }

    /// As results.json has it.
    pub fn to_json(&self) -> Value {
        let relation = if self.at_least { "at least" } else { "at most" };
        json!({"what": self.what, "value": self.value, "relation": relation, "limit": self.limit, "met": self.is_met()})
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (met, relation) =
            (if self.is_met() { "met   " } else { "MISSED" }, if self.at_least { "at least" } else { "at most" });
        let (value, limit) = (self.unit.show(self.value), self.unit.show(self.limit));
        write!(f, "goal {met} {}: {value} ({relation} {limit})", self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_may_be_reached_and_not_passed() {
        assert!(Goal::at_most("x", 10.0, 10.0, Unit::Milliseconds).is_met());
        assert!(!Goal::at_most("x", 10.1, 10.0, Unit::Milliseconds).is_met());
        assert!(Goal::at_least("x", 0.95, 0.95, Unit::Share).is_met());
        assert!(!Goal::at_least("x", 0.94, 0.95, Unit::Share).is_met());
    }

    #[test]
    fn figures_that_are_no_numbers_meet_nothing() {
        assert!(!Goal::at_most("x", f64::NAN, 1.0, Unit::Times).is_met());
        assert!(!Goal::at_least("x", f64::NAN, 1.0, Unit::Times).is_met());
    }

    #[test]
    fn a_goal_says_all_that_it_is_about() {
        let goal = Goal::at_least("wire", 1.25e9, 1e9, Unit::GigabytesPerSecond);
        assert_eq!(goal.to_string(), "goal met    wire: 1.25 GB/s (at least 1.00 GB/s)");
        assert_eq!(goal.to_json()["met"], true);
    }
}
