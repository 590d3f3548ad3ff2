//! Amounts as people write them: link rates and sizes of memory.

use std::fmt;
use std::str::FromStr;

use crate::LabError;

/// The speed of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Bits a second.
    pub bits: u64,
}

impl Rate {
    /// How much tbf may send at once, in bytes: 2 ms at full speed, and never less than one segment as large as GSO
    /// makes them, because tbf would have to cut those up.
    pub(crate) fn burst(self) -> u64 {
        (self.bits / 8 / 500).clamp(128 * 1024, 4 * 1024 * 1024)
    }
}

impl FromStr for Rate {
    type Err = LabError;

    /// Reads `1gbit`, `100mbit`, `512kbit`, `2.5gbit` or a plain number of bits a second.
    fn from_str(text: &str) -> Result<Self, LabError> {
        let bits = scaled(text, &[("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0), ("", 1.0)]);
        match bits {
            Some(bits @ 8_000..=1_000_000_000_000) => Ok(Self { bits }),
            _ => Err(LabError::Refused(format!(
                "{text:?} is not a link rate; write it like 1gbit, 100mbit or 512kbit (8kbit to 1000gbit)"
            ))),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000)] {
            if self.bits.is_multiple_of(size) {
                return write!(f, "{}{unit}", self.bits / size);
            }
        }
        write!(f, "{}bit", self.bits)
    }
}

/// Reads a size of memory in bytes: `512M`, `2G`, `64k`, `1073741824`; the units are powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, LabError> {
    let lower = text.to_ascii_lowercase();
    scaled(&lower, &[("g", 1073741824.0), ("m", 1048576.0), ("k", 1024.0), ("", 1.0)])
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| LabError::Refused(format!("{text:?} is not a size; write it like 512M or 2G")))
}

/// The number before the first of the units that the text ends in, times that unit.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<u64> {
    let (number, scale) = units.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)))?;
    if !number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return None;
    }
    let value = number.parse::<f64>().ok()? * scale;
    (value < 9e15).then_some(value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_tc_writes_them() {
        for (text, bits) in [("1gbit", 1_000_000_000), ("2.5gbit", 2_500_000_000), ("100mbit", 100_000_000)] {
            assert_eq!(text.parse::<Rate>().unwrap().bits, bits);
        }
        assert_eq!("1000mbit".parse::<Rate>().unwrap().to_string(), "1gbit");
        for bad in ["", "gbit", "1gb", "-1gbit", "nan", "1e9", "1 gbit", "0", "99999gbit", "infbit"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_size("512M").unwrap(), 512 << 20);
        assert_eq!(parse_size("2g").unwrap(), 2 << 30);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        for bad in ["", "M", "0", "-1", "1T", "99999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_burst_holds_the_largest_segment() {
        assert_eq!(Rate { bits: 1_000_000 }.burst(), 128 * 1024);
        assert_eq!(Rate { bits: 1_000_000_000 }.burst(), 250_000);
    }
}
