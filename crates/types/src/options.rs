use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Allowances, EngineName, Mode, StdioTarget};

/// How a user wants a container to be moved. Every field has a default, under which the agents choose.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MoveOptions {
    /// How memory moves relative to the freeze.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub mode: Mode,
    /// The engine that runs the container; found by the container's name where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineName>,
    /// The engine that is to have the container on the destination; the same as on the source where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_engine: Option<EngineName>,
    /// With rounds: freeze when what is left takes no longer than this, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blackout_budget_ms: Option<u32>,
    /// Never let the container run on the destination before its last page is there, so that it depends on one node at a
    /// time. A container that writes faster than the link carries is slowed down until it does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub safe: bool,
    /// With rounds: no more than so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<u32>,
    /// With `safe`: give up, rather than slow the container down.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub no_throttle: bool,
    /// How much of the link the move may take while the container runs, in bits a second; all of it where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Whether and how pages are compressed.
    #[serde(default, skip_serializing_if = "Compress::is_auto")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub compress: Compress,
    /// Carry the node's own directories that the container may write to, too. Otherwise the destination must have them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub with_binds: bool,
    /// Have both nodes read all files that were carried once more in the freeze, and compare. It lengthens the blackout.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub verify_files: bool,
    /// The longest freeze, in ms: from the first attempt to stop the container until the commit point. A move that takes longer is
    /// undone. [`MoveOptions::FREEZE_TIMEOUT`] where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze_timeout_ms: Option<u32>,
    /// The longest time from the request until the commit point, in ms; unlimited where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u32>,
    /// What happens when `timeout_ms` has passed.
    #[serde(default, skip_serializing_if = "OnTimeout::is_undo")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub on_timeout: OnTimeout,
    /// State that the move may lose, by the names that blockers have in `allow`.
    #[serde(default, skip_serializing_if = "Allowances::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false, value_type = Vec<String>))]
    pub allow: Allowances,
    /// Where standard streams that lead to files, pipes, sockets or terminals of the node go after the move: `keep`, `journal`, `null`
    /// or `file:PATH`. Containers of engines that have their own logs have none of these.
    #[serde(default, skip_serializing_if = "StdioTarget::is_keep")]
    #[cfg_attr(feature = "openapi", schema(required = false, value_type = String))]
    pub stdio: StdioTarget,
    /// What becomes of what the container has logged before the move, where its engine keeps that in files.
    #[serde(default, skip_serializing_if = "Logs::is_keep")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub logs: Logs,
    /// Whether the container goes on reaching those that stay on a bridge network of its node, by a VXLAN between the
    /// two nodes, which is not encrypted; as the node is configured where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_path: Option<bool>,
}

/// What becomes of the log of a container before the move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Logs {
    /// It moves with the container.
    #[default]
    Keep,
    /// It is removed with the original.
    None,
}

impl Logs {
    fn is_keep(&self) -> bool {
        *self == Logs::Keep
    }
}

/// Options that contradict each other, or have no meaning together; the text says which, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SenselessOptions {
    /// The mode's point is to commit early.
    #[error(
        "safe and mode {0} contradict each other: in mode {0} the container runs on the destination before its last page \
         is there; leave out one of them, or use mode precopy"
    )]
    SafeButEarly(Mode),
    /// There is nothing to throttle.
    #[error(
        "no_throttle has no meaning without safe: only a safe move may slow the container down; leave it out, or add safe"
    )]
    NothingToThrottle,
    /// There are no rounds.
    #[error("{option} has no meaning in mode {mode}, which has no rounds; leave it out, or use mode precopy")]
    NoRounds {
        /// The option, as the API names it.
        option: &'static str,
        /// The mode.
        mode: Mode,
    },
    /// The pages that are left may not follow the resume.
    #[error(
        "on_timeout postcopy needs a mode with rounds whose last pages may follow the resume; leave it out, or use mode auto, \
         hybrid or precopy without safe"
    )]
    NoPostcopy,
    /// There is no time that could run out.
    #[error("on_timeout has no meaning without timeout_ms; leave it out, or add timeout_ms")]
    NoTimeout,
    /// A number is out of its range.
    #[error("{option} of {value} is out of range; use {least} to {most}")]
    OutOfRange {
        /// The option, as the API names it.
        option: &'static str,
        /// What was asked for.
        value: u64,
        /// The least that is allowed.
        least: u64,
        /// The most that is allowed.
        most: u64,
    },
}

/// The longest blackout budget, in ms.
const LONGEST_BUDGET: u32 = 60_000;
/// The longest freeze timeout, in ms: an hour.
const LONGEST_FREEZE: u32 = 3_600_000;
/// The shortest freeze timeout and timeout, in ms.
const SHORTEST_TIMEOUT: u32 = 100;
/// The most rounds.
const MOST_ROUNDS: u32 = 1000;

impl MoveOptions {
    /// The longest freeze where nothing else is asked for.
    pub const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);

    /// How long the container may be frozen until the commit point.
    pub fn freeze_timeout(&self) -> Duration {
        self.freeze_timeout_ms.map_or(Self::FREEZE_TIMEOUT, |ms| Duration::from_millis(ms.into()))
    }

    /// How long the move may take until the commit point.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout_ms.map(|ms| Duration::from_millis(ms.into()))
    }

    /// All defaults, in a mode.
    pub fn in_mode(mode: Mode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Whether the decision may come before the last page is on the destination.
    pub fn may_commit_early(&self) -> bool {
        self.mode.may_commit_early() && !self.safe
    }

    /// Whether they make sense together.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), SenselessOptions> {
        use SenselessOptions as S;
        let mode = self.mode;
        if self.safe && matches!(mode, Mode::Postcopy | Mode::Hybrid) {
            return Err(S::SafeButEarly(mode));
        }
        if self.no_throttle && !self.safe {
            return Err(S::NothingToThrottle);
        }
        for (option, value, most) in [
            ("blackout_budget_ms", self.blackout_budget_ms, LONGEST_BUDGET),
            ("max_rounds", self.max_rounds, MOST_ROUNDS),
        ] {
            let Some(value) = value else { continue };
            if !mode.has_rounds() {
                return Err(S::NoRounds { option, mode });
            }
            if value == 0 || value > most {
                return Err(S::OutOfRange { option, value: value.into(), least: 1, most: most.into() });
            }
        }
        let postcopy = self.on_timeout == OnTimeout::Postcopy;
        if postcopy && self.timeout_ms.is_none() {
            return Err(S::NoTimeout);
        }
        if postcopy && (self.safe || !mode.has_rounds()) {
            return Err(S::NoPostcopy);
        }
        for (option, value, most) in
            [("freeze_timeout_ms", self.freeze_timeout_ms, LONGEST_FREEZE), ("timeout_ms", self.timeout_ms, u32::MAX)]
        {
            if let Some(value) = value.filter(|value| !(SHORTEST_TIMEOUT..=most).contains(value)) {
                return Err(S::OutOfRange {
                    option,
                    value: value.into(),
                    least: SHORTEST_TIMEOUT.into(),
                    most: most.into(),
                });
            }
        }
        match self.bandwidth {
            Some(Bandwidth(value)) if value < Bandwidth::LEAST => {
                Err(S::OutOfRange { option: "bandwidth", value, least: Bandwidth::LEAST, most: u64::MAX })
            }
            _ => Ok(()),
        }
    }
}

/// How fast a link may be used, in bits a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(transparent)]
pub struct Bandwidth(pub u64);

impl Bandwidth {
    /// The least that a move can do with: 1 Mbit/s. Below, even a small skeleton takes longer than any peer waits.
    pub const LEAST: u64 = 1_000_000;

    /// In bytes a second.
    pub fn bytes_per_second(self) -> u64 {
        self.0 / 8
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n.is_multiple_of(1_000_000_000) => write!(f, "{} Gbit/s", n / 1_000_000_000),
            n if n.is_multiple_of(1_000_000) => write!(f, "{} Mbit/s", n / 1_000_000),
            n => write!(f, "{n} bit/s"),
        }
    }
}

/// A bandwidth that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no bandwidth of at least 1mbit; write it like 500mbit, 1gbit (bits a second) or 100MB/s (bytes a second)"
)]
pub struct InvalidBandwidth(String);

impl FromStr for Bandwidth {
    type Err = InvalidBandwidth;

    /// Reads `500mbit`, `1.5gbit`, `100MB/s`, `64MiB/s`: a number and a unit. Units with `bit` count bits, those with a
    /// `B` for bytes count bytes; case matters for this `B` alone. Without a unit the number is bits a second.
    fn from_str(text: &str) -> Result<Self, InvalidBandwidth> {
        let bad = || InvalidBandwidth(text.chars().take(40).collect());
        let number_ends = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(number_ends);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let unit = unit.trim_start();
        let unit = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(unit);
        let (prefix, each) = if unit.is_empty() {
            ("", 1)
        } else if let Some(prefix) = unit.strip_suffix("bit") {
            (prefix, 1)
        } else if let Some(prefix) = unit.strip_suffix('B') {
            (prefix, 8)
        } else {
            return Err(bad());
        };
        let scale: u64 = match prefix.to_ascii_lowercase().as_str() {
            "" => 1,
            "k" => 1_000,
            "m" => 1_000_000,
            "g" => 1_000_000_000,
            "ki" => 1 << 10,
            "mi" => 1 << 20,
            "gi" => 1 << 30,
            _ => return Err(bad()),
        };
        // A float-to-int cast saturates; what is too much for 64 bits is no limit.
        let bits = (number * (scale * each) as f64).round() as u64;
        if bits < Self::LEAST { Err(bad()) } else { Ok(Self(bits)) }
    }
}

/// What happens to a move whose time is over before its commit point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is undone.
    #[default]
    Undo,
    /// Its rounds end and the container is frozen at once; the pages that are left follow the resume.
    Postcopy,
}

impl OnTimeout {
    fn is_undo(&self) -> bool {
        *self == OnTimeout::Undo
    }
}

/// Whether and how pages are compressed on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Compress {
    /// Where the link is the bottleneck, and with what it is worth.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always, fast.
    Lz4,
    /// Always, tight.
    Zstd,
}

impl Compress {
    fn is_auto(&self) -> bool {
        *self == Compress::Auto
    }
}

impl fmt::Display for Compress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Compress::Auto => "auto",
            Compress::Off => "off",
            Compress::Lz4 => "lz4",
            Compress::Zstd => "zstd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_read_as_people_write_them() {
        let read = |text: &str| text.parse::<Bandwidth>().map(|b| b.0);
        assert_eq!(read("500mbit"), Ok(500_000_000));
        assert_eq!(read("1gbit"), Ok(1_000_000_000));
        assert_eq!(read("1.5Gbit/s"), Ok(1_500_000_000));
        assert_eq!(read("100MB/s"), Ok(800_000_000));
        assert_eq!(read("64 MiB/s"), Ok((64 * 8) << 20));
        assert_eq!(read("10gbps".replace("gbps", "gbitps").as_str()), Ok(10_000_000_000));
        assert_eq!(read("2000000"), Ok(2_000_000));
        for bad in ["", "fast", "100", "-1gbit", "1.2.3gbit", "100mb/s", "5 parsec", "0gbit", "nangbit"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert_eq!(Bandwidth(500_000_000).to_string(), "500 Mbit/s");
        assert_eq!(Bandwidth(800_000_000).bytes_per_second(), 100_000_000);
    }

    #[test]
    fn what_has_no_meaning_together_is_refused() {
        let check = |options: MoveOptions| options.check().map_err(|e| e.to_string());
        for mode in Mode::ALL {
            assert_eq!(check(MoveOptions::in_mode(mode)), Ok(()));
            let safe = MoveOptions { safe: true, ..MoveOptions::in_mode(mode) };
            assert_eq!(check(safe.clone()).is_ok(), !matches!(mode, Mode::Postcopy | Mode::Hybrid), "{mode}");
            assert!(!safe.may_commit_early());
            let rounds = MoveOptions { max_rounds: Some(3), ..MoveOptions::in_mode(mode) };
            assert_eq!(check(rounds).is_ok(), mode.has_rounds(), "{mode}");
        }
        let precopy = MoveOptions::in_mode(Mode::Precopy);
        for (options, word) in [
            (MoveOptions { no_throttle: true, ..precopy.clone() }, "no_throttle"),
            (MoveOptions { max_rounds: Some(0), ..precopy.clone() }, "max_rounds"),
            (MoveOptions { blackout_budget_ms: Some(60_001), ..precopy.clone() }, "1 to 60000"),
            (MoveOptions { bandwidth: Some(Bandwidth(999_999)), ..precopy.clone() }, "bandwidth"),
        ] {
            assert!(check(options.clone()).unwrap_err().contains(word), "{options:?}");
        }
        assert_eq!(check(MoveOptions { no_throttle: true, safe: true, ..precopy.clone() }), Ok(()));
    }

    #[test]
    fn timeouts_have_a_range_and_postcopy_needs_rounds() {
        let check = |options: MoveOptions| options.check().map_err(|e| e.to_string());
        for mode in Mode::ALL {
            let timed = MoveOptions { timeout_ms: Some(5000), ..MoveOptions::in_mode(mode) };
            assert_eq!(check(timed.clone()), Ok(()));
            let postcopy = MoveOptions { on_timeout: OnTimeout::Postcopy, ..timed.clone() };
            assert_eq!(check(postcopy.clone()).is_ok(), mode.has_rounds(), "{mode}");
            assert!(check(MoveOptions { safe: true, ..postcopy.clone() }).is_err());
            assert!(check(MoveOptions { timeout_ms: None, ..postcopy.clone() }).unwrap_err().contains("timeout_ms"));
        }
        let cold = MoveOptions::in_mode(Mode::Cold);
        assert_eq!(cold.freeze_timeout(), MoveOptions::FREEZE_TIMEOUT);
        for (ms, sensible) in [(0, false), (99, false), (100, true), (3_600_000, true), (3_600_001, false)] {
            assert_eq!(check(MoveOptions { freeze_timeout_ms: Some(ms), ..cold.clone() }).is_ok(), sensible, "{ms}");
        }
    }
}
