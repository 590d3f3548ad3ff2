//! Amounts as people read them.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

const KIB: f64 = 1024.0;

/// `164.8 MiB`; exact below 1 KiB.
#[allow(clippy::cast_precision_loss, reason = "for people")]
pub fn bytes(n: u64) -> String {
    let mut amount = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if amount < 1000.0 {
            return if unit == "B" { format!("{n} B") } else { format!("{amount:.1} {unit}") };
        }
        amount /= KIB;
    }
    format!("{amount:.1} TiB")
}

/// `112.3 MiB/s`.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float-to-int cast saturates, which is right"
)]
pub fn rate(bytes_per_second: f64) -> String {
    format!("{}/s", bytes(bytes_per_second as u64))
}

/// `213.4 ms`, `1.84 s`, `3 min 5 s`.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float-to-int cast saturates, which is right"
)]
pub fn duration(ms: f64) -> String {
    match ms {
        _ if ms < 999.95 => format!("{ms:.1} ms"),
        _ if ms < 59_995.0 => format!("{:.2} s", ms / 1000.0),
        _ => {
            let seconds = (ms / 1000.0).round() as u64;
            format!("{} min {} s", seconds / 60, seconds % 60)
        }
    }
}

/// A duration as a forecast shows it: `8 s`, `3 min`, `2 h`.
pub fn about(time: Duration) -> String {
    match time.as_secs() {
        0..100 => format!("{} s", time.as_secs().max(1)),
        100..5400 => format!("{} min", (time.as_secs() + 30) / 60),
        _ => format!("{} h", (time.as_secs() + 1800) / 3600),
    }
}

/// Units of time, in ms. Longer names come before their endings.
const TIME_UNITS: [(&str, f64); 5] =
    [("ms", 1.0), ("min", 60_000.0), ("s", 1000.0), ("h", 3_600_000.0), ("d", 86_400_000.0)];

/// A number of milliseconds of `100ms`, `1.5s`, `30min`, `2h`, `3d`; a number without a unit counts milliseconds.
fn time(text: &str) -> Option<f64> {
    let unit = TIME_UNITS.into_iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let (number, scale) = unit.unwrap_or((text, 1.0));
    number.trim_end().parse::<f64>().ok().filter(|n| n.is_finite()).map(|n| (n * scale).round())
}

/// Reads a duration: `100ms`, `1.5s`, `30min`, `2h`, or a number of milliseconds. At least 1 ms, at most 49 days.
pub fn milliseconds(text: &str) -> Result<u32, String> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    match time(text) {
        Some(ms) if ms < 0.0 || text.starts_with('-') => {
            Err("a duration cannot be negative; write it like 100ms".into())
        }
        Some(ms) if ms < 1.0 => Err("the shortest duration is 1ms".into()),
        Some(ms) if ms <= f64::from(u32::MAX) => Ok(ms as u32),
        Some(_) => Err("the longest duration is 49d".into()),
        None => Err("write it like 100ms, 0.5s, 2min or 1h".into()),
    }
}

/// Reads a number of things of which there must be one.
pub fn count(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(n) if n < 1 => Err("the least is 1".into()),
        Ok(n) => u32::try_from(n).map_err(|_| format!("the most is {}", u32::MAX)),
        Err(_) => Err("write a number, like 3".into()),
    }
}

/// Reads a point of time: `2h` before `now`, `2026-03-01`, `2026-03-01 14:00` in `zone`, or `2026-03-01T14:00:00Z`. In ms since
/// the Unix epoch.
pub fn point_of_time(text: &str, now: Timestamp, zone: &TimeZone) -> Result<u64, String> {
    if let Some(ms) = time(text).filter(|ms| *ms >= 0.0 && text.ends_with(|c: char| c.is_ascii_alphabetic())) {
        #[allow(clippy::cast_possible_truncation, reason = "a float-to-int cast saturates, which is right")]
        return Ok(u64::try_from(now.as_millisecond().saturating_sub(ms as i64)).unwrap_or(0));
    }
    let local = || text.parse::<jiff::civil::DateTime>().ok()?.to_zoned(zone.clone()).ok().map(|t| t.timestamp());
    let time = text.parse::<Timestamp>().ok().or_else(local);
    let time = time.ok_or("write it like 90min, 2d, 2026-03-01 or '2026-03-01 14:00'")?;
    u64::try_from(time.as_millisecond()).map_err(|_| "it is before 1970".to_owned())
}

/// `2026-03-01 14:05:09` in `zone`.
pub fn when(unix_ms: u64, zone: &TimeZone) -> String {
    match i64::try_from(unix_ms).map(Timestamp::from_millisecond) {
        Ok(Ok(time)) => time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
        _ => "?".to_owned(),
    }
}

/// How long ago, roughly: `5 s`, `12 min`, `3 h`, `9 d`.
pub fn since(unix_ms: u64, now_unix_ms: u64) -> String {
    let seconds = now_unix_ms.saturating_sub(unix_ms) / 1000;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_keep_to_four_digits() {
        assert_eq!([bytes(0), bytes(999), bytes(1000), bytes(172_851_200)], ["0 B", "999 B", "1.0 KiB", "164.8 MiB"]);
        assert_eq!([bytes(1_072_693_248), bytes(u64::MAX)], ["1.0 GiB", "16777216.0 TiB"]);
        assert_eq!([rate(117_755_084.8), rate(f64::NAN), rate(-1.0)], ["112.3 MiB/s", "0 B/s", "0 B/s"]);
        assert_eq!([duration(0.0), duration(213.42), duration(999.99)], ["0.0 ms", "213.4 ms", "1.00 s"]);
        assert_eq!([duration(1840.0), duration(59_999.0), duration(185_000.0)], ["1.84 s", "1 min 0 s", "3 min 5 s"]);
    }

    #[test]
    fn times_are_read() {
        let read = ["100ms", "250", "1.5s", "0.5 s", "2min"].map(milliseconds);
        assert_eq!(read, [Ok(100), Ok(250), Ok(1500), Ok(500), Ok(120_000)]);
        assert_eq!(milliseconds("2h"), Ok(7_200_000));
        for (bad, word) in [
            ("", "like 100ms"),
            ("ms", "like 100ms"),
            ("-1ms", "negative"),
            ("-0s", "negative"),
            ("0", "shortest"),
            ("1e99s", "longest"),
            ("nans", "like 100ms"),
            ("infs", "like 100ms"),
            ("min", "like 100ms"),
            ("60d", "longest"),
        ] {
            let error = milliseconds(bad).unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn forecasts_are_rounded() {
        let about = |seconds| about(Duration::from_secs(seconds));
        assert_eq!([about(0), about(99), about(100), about(5400)], ["1 s", "99 s", "2 min", "2 h"]);
    }

    #[test]
    fn numbers_are_read() {
        assert_eq!(count("3"), Ok(3));
        for (bad, word) in [("0", "least"), ("-4", "least"), ("", "like 3"), ("4294967296", "most"), ("x", "like 3")] {
            let error = count(bad).unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn points_of_time_are_read() {
        let now = Timestamp::from_millisecond(1_700_000_000_000).unwrap();
        let read = |text| point_of_time(text, now, &TimeZone::UTC);
        assert_eq!(read("2h"), Ok(1_700_000_000_000 - 7_200_000));
        assert_eq!(read("0s"), Ok(1_700_000_000_000));
        assert_eq!(read("2023-11-14"), Ok(1_699_920_000_000));
        assert_eq!(read("2023-11-14 22:13"), Ok(1_699_999_980_000));
        assert_eq!(read("2023-11-14T22:13:20Z"), Ok(1_700_000_000_000));
        for bad in ["", "yesterday", "-2h", "14:00", "1969-01-01", "2023-13-01"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(when(1_700_000_000_123, &TimeZone::UTC), "2023-11-14 22:13:20");
        assert_eq!(when(u64::MAX, &TimeZone::UTC), "?");
        assert_eq!([since(0, 119_000), since(0, 7_199_000), since(0, 7_200_000)], ["119 s", "119 min", "2 h"]);
        assert_eq!([since(0, 9 * 86_400_000), since(5, 0)], ["9 d", "0 s"]);
    }
}
