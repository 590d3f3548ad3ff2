//! How the demo shows what a move did.

use comfy_table::{Cell, CellAlignment, Table, presets};
use tranship_lab::CounterReport;
use tranship_types::{Report, Side};

/// What was found out about one move besides its report.
pub struct Findings {
    /// What the client saw since the move began.
    pub client: CounterReport,
    /// Keys that there are, and that there should be.
    pub keys: (u64, u64),
    /// Checksums after and before.
    pub checksums: (String, String),
}

impl Findings {
    /// Whether all is as it was.
    pub fn all_right(&self) -> bool {
        self.client.error.is_none()
            && self.client.same_connection
            && self.keys.0 == self.keys.1
            && self.checksums.0 == self.checksums.1
    }
}

/// The table of one move.
pub fn of_move(report: &Report, found: &Findings) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header([format!("{} → {}", report.source, report.destination), String::new(), String::new()]);
    let mut row = |name: &str, value: String, note: String| {
        let value = Cell::new(value).set_alignment(CellAlignment::Right);
        table.add_row(vec![Cell::new(name), value, Cell::new(note)]);
    };
    row("client gap", ms(found.client.since_mark.longest.ms), "between two replies, one INCR every 0.5 ms".into());
    let blackout = report.blackout_ms;
    let error = report.blackout_error_ms.map_or(String::new(), |e| format!("± {e:.1} ms"));
    row("blackout", blackout.map_or("unknown".into(), ms), error);
    for part in report.parts.iter().filter(|p| p.start_ms >= 0.0 && blackout.is_none_or(|b| p.start_ms < b)) {
        let side = match part.side {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        row(&format!("  {}", part.name), ms(part.ms), format!("{side}, from {:.1} ms on", part.start_ms));
    }
    row("total", report.total_ms.map_or("unknown".into(), ms), "from the request to the end".into());
    let memory = format!("for {} of memory", megabytes(report.progress.memory_bytes));
    row("bytes on the wire", megabytes(report.progress.wire_bytes), memory);
    let (keys, expected) = found.keys;
    row(
        "keys",
        grouped(keys),
        if keys == expected { "all there".into() } else { format!("NOT {}", grouped(expected)) },
    );
    let (after, before) = &found.checksums;
    let equal = if after == before { "as before the move" } else { "DIFFERS from before the move" };
    row("checksum", after.chars().take(12).collect::<String>() + "…", equal.into());
    let same = if found.client.same_connection { "yes" } else { "NO" };
    let replies = format!("{} replies, each right", grouped(found.client.total.replies));
    row("same connection", same.into(), found.client.error.clone().unwrap_or(replies));
    table.trim_fmt()
}

/// A time, as people read it.
pub fn ms(value: f64) -> String {
    if value >= 10_000.0 { format!("{:.1} s", value / 1e3) } else { format!("{value:.1} ms") }
}

/// An amount of bytes.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// A number with its thousands apart.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([grouped(0), grouped(999), grouped(1_000_000)], ["0", "999", "1,000,000"]);
    }

    #[test]
    fn a_lost_key_is_not_all_right_and_shows() {
        let id = "m-00000001".parse().unwrap();
        let (a, b) = ("a".parse().unwrap(), "b".parse().unwrap());
        let report = Report::new(id, "redis".into(), a, b, tranship_types::Mode::Cold, 0);
        let client = CounterReport { same_connection: true, ..CounterReport::default() };
        let mut found = Findings { client, keys: (10, 10), checksums: ("x".into(), "x".into()) };
        assert!(found.all_right());
        found.keys.0 = 9;
        assert!(!found.all_right());
        assert!(of_move(&report, &found).contains("NOT 10"));
    }
}
