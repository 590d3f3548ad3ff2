use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// How a column is set: text to the left, numbers to the right.
#[derive(Clone, Copy)]
pub enum Column {
    Text(&'static str),
    Number(&'static str),
}

/// A table without rules: two spaces between the columns, none at the ends of the lines, `indent` before each.
pub fn table(indent: &str, columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|c| match c {
        Column::Text(name) | Column::Number(name) => *name,
    }));
    for row in rows {
        table.add_row(row);
    }
    for (column, kind) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if matches!(kind, Column::Number(_)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| format!("{indent}{line}").trim_end().to_owned() + "\n").collect()
}
