//! The results as a table on the terminal.

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::row::{Row, Spread};

const MS: f64 = 1.0;
const MB: f64 = 1e6;
/// Column, quantity, unit in the quantity's own.
const COLUMNS: [(&str, &str, f64); 5] = [
    ("client gap ms", "client_gap_ms", MS),
    ("blackout ms", "blackout_ms", MS),
    ("total ms", "total_ms", MS),
    ("wire MB", "bytes_wire", MB),
    ("extra memory MB", "peak_mem_bytes", MB),
];

/// The table: medians, below them the range.
pub fn of_rows(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    let names = ["workload", "link", "system", "runs"].into_iter();
    table.set_header(names.chain(COLUMNS.map(|c| c.0)).chain(["client gap / peer's"]));
    for row in rows {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let mut cells = vec![
            Cell::new(row.case().workload),
            Cell::new(row.case().link_name()),
            Cell::new(row.system().name()),
            right(row.runs().to_string()),
        ];
        cells.extend(COLUMNS.map(|(_, name, unit)| right(row.quantity(name).map_or("-".into(), |s| cell(s, unit)))));
        cells.push(right(row.ratio_client_gap().map_or(String::new(), |ratio| format!("{ratio:.2}"))));
        table.add_row(cells);
    }
    table.trim_fmt()
}

fn cell(spread: Spread, unit: f64) -> String {
    let Spread { median, min, max } = spread;
    // One line below the other: the table still fits a terminal when there are many columns.
    format!("{:.1}\n{:.1}–{:.1}", median / unit, min / unit, max / unit)
}
