//! Amounts as people read them.

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

/// Reads `100ms`, `1.5s`, `30min`, or a number of milliseconds.
pub fn milliseconds(text: &str) -> Result<u32, String> {
    let (number, scale) = match text {
        _ if text.ends_with("ms") => (&text[..text.len() - 2], 1.0),
        _ if text.ends_with("min") => (&text[..text.len() - 3], 60_000.0),
        _ if text.ends_with('s') => (&text[..text.len() - 1], 1000.0),
        _ => (text, 1.0),
    };
    let ms = number.trim_end().parse::<f64>().ok().map(|n| (n * scale).round());
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    let ms = ms.filter(|ms| (1.0..=f64::from(u32::MAX)).contains(ms)).map(|ms| ms as u32);
    ms.ok_or_else(|| "write it like 100ms, 0.5s or 2min".to_owned())
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
        for bad in ["", "ms", "-1ms", "0", "1e99s", "nans", "min", "2h"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
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
