//! The results as a table on the terminal.

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::row::{Row, Spread};

const MS: f64 = 1.0;
const MB: f64 = 1e6;
/// Column, quantity, unit in the quantity's own.
const COLUMNS: [(&str, &str, f64); 21] = [
    ("client gap ms", "client_gap_ms", MS),
    ("blackout ms", "blackout_ms", MS),
    ("gap beyond it ms", "gap_beyond_blackout_ms", MS),
    ("rate regained after ms", "regained_ms", MS),
    ("connections lost", "connections_lost", 1.0),
    ("datagrams lost", "datagrams_lost", 1.0),
    ("out of order", "datagrams_reordered", 1.0),
    ("total ms", "total_ms", MS),
    ("wire MB", "bytes_wire", MB),
    ("extra memory MB", "peak_mem_bytes", MB),
    ("rounds", "rounds", 1.0),
    ("first round MB/s", "first_round_bytes_per_s", MB),
    ("writes MB/s in the move", "write_bytes_per_s_during", MB),
    ("SETs a s in the move", "sets_per_s", 1.0),
    ("run s", "run_ms", 1e3),
    ("remote faults", "remote_faults", 1.0),
    ("remote fault p50 µs", "fault_p50_us", 1.0),
    ("remote fault p99 µs", "fault_p99_us", 1.0),
    ("tracking costs %", "tracking_cost_share", 1e-2),
    ("by CPU time %", "tracking_cpu_share", 1e-2),
    ("rounds cost %", "rounds_cost_share", 1e-2),
];

/// The table: medians, below them the range. It has the columns that some row has a figure for.
pub fn of_rows(rows: &[Row]) -> String {
    let columns: Vec<_> =
        COLUMNS.iter().filter(|(_, name, _)| rows.iter().any(|r| r.quantity(name).is_some())).collect();
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    let names = ["workload", "link", "system", "runs"].into_iter();
    table.set_header(names.chain(columns.iter().map(|c| c.0)).chain(["client gap / peer's"]));
    for row in rows {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let mut cells = vec![
            Cell::new(row.case().workload),
            Cell::new(row.case().link_name()),
            Cell::new(row.system().name()),
            right(row.runs().to_string()),
        ];
        cells.extend(
            columns.iter().map(|(_, name, unit)| right(row.quantity(name).map_or("-".into(), |s| cell(s, *unit)))),
        );
        cells.push(right(row.ratio_client_gap().map_or(String::new(), |ratio| format!("{ratio:.2}"))));
        table.add_row(cells);
    }
    table.trim_fmt()
}

fn cell(spread: Spread, unit: f64) -> String {
    let Spread { median, min, max } = spread;
    if min == max {
        return format!("{:.1}", median / unit);
    }
    // One line below the other: the table still fits a terminal when there are many columns.
    format!("{:.1}\n{:.1}–{:.1}", median / unit, min / unit, max / unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;
    use crate::suite;

    #[test]
    fn columns_without_a_figure_are_left_out() {
        let suite = suite::find("memory").unwrap();
        let sample = Sample { figures: vec![("blackout_ms", 42.0), ("rounds", 3.0)], ..Sample::default() };
        let case = &suite.cases[0];
        let text = of_rows(&[Row::new(suite, case, case.systems[0], &[sample])]);
        assert!(text.contains("blackout ms") && text.contains("42.0") && text.contains("rounds"), "{text}");
        assert!(!text.contains("fault") && !text.contains("client gap ms"), "{text}");
    }
}
