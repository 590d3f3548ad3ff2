use tranship_types::NodeName;

use super::table::{Column, table};
use crate::evacuate::{Fate, Row};
use crate::units::{bytes, duration};

const NOTHING: &str = "-";

/// `tranship evacuate`: a table of the containers, with whom they move where that matters, and how many stay.
pub fn evacuation(rows: &[Row], node: &NodeName, dry_run: bool) -> String {
    if rows.is_empty() {
        return format!("no containers on {node}\n");
    }
    let any_together = rows.iter().any(|row| !row.together_with.is_empty());
    let together = any_together.then_some(Column::Text("TOGETHER WITH"));
    let first = [Column::Text("CONTAINER"), Column::Number("MEMORY"), Column::Text("TO")];
    let last = [Column::Text("OUTCOME"), Column::Number("BLACKOUT"), Column::Number("TOTAL"), Column::Text("WHY")];
    let columns: Vec<Column> = first.into_iter().chain(together).chain(last).collect();
    let or_nothing = |text: Option<String>| text.unwrap_or_else(|| NOTHING.to_owned());
    let row = |r: &Row| {
        let first = [
            r.container.clone(),
            or_nothing(r.memory_bytes.map(bytes)),
            or_nothing(r.to.as_ref().map(ToString::to_string)),
        ];
        let together = (!r.together_with.is_empty()).then(|| r.together_with.join(", "));
        let last = [
            fate(r.fate).to_owned(),
            or_nothing(r.report.as_ref().and_then(|report| report.blackout_ms).map(duration)),
            or_nothing(r.report.as_ref().and_then(|report| report.total_ms).map(duration)),
            r.error.as_ref().map(ToString::to_string).unwrap_or_default(),
        ];
        let together = any_together.then(|| or_nothing(together));
        first.into_iter().chain(together).chain(last).collect::<Vec<_>>()
    };
    table("", &columns, rows.iter().map(row)) + &summary(rows, node, dry_run)
}

/// A line about one container.
pub fn evacuated(row: &Row) -> String {
    let to = row.to.as_ref().map(|node| format!(" → {node}")).unwrap_or_default();
    let why = row.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    format!("{}{to}  {}{why}\n", row.container, fate(row.fate))
}

fn summary(rows: &[Row], node: &NodeName, dry_run: bool) -> String {
    let number = |fates: &[Fate]| rows.iter().filter(|row| fates.contains(&row.fate)).count();
    let (moved, movable, skipped) = (number(&[Fate::Moved]), number(&[Fate::Movable]), number(&[Fate::Skipped]));
    let ended = number(&[Fate::Ended]);
    let stay = rows.len() - moved - ended - movable - skipped;
    let mut text = match dry_run {
        true => format!("\n{movable} of {} containers can be moved from {node}", rows.len()),
        false => format!("\n{moved} of {} containers were moved from {node}", rows.len()),
    };
    for (number, what) in [(ended, "ended on the way"), (skipped, "skipped")] {
        if number > 0 {
            text += &format!(", {number} {what}");
        }
    }
    match (stay, dry_run) {
        (0, _) => {}
        (_, true) => text += &format!(", {stay} cannot be moved"),
        (_, false) => text += &format!(", {stay} were not; repeat the command to try them again"),
    }
    text + "\n"
}

fn fate(fate: Fate) -> &'static str {
    match fate {
        Fate::Waiting => "not begun",
        Fate::Moving => "under way",
        Fate::Moved => "moved",
        Fate::Ended => "ended there",
        Fate::Movable => "can be moved",
        Fate::Blocked => "blocked",
        Fate::Failed => "failed",
        Fate::Skipped => "skipped",
    }
}

#[cfg(test)]
mod tests {
    use tranship_api::ErrorBody;

    use super::*;
    use crate::show::report::tests::moved;

    fn row(container: &str, fate: Fate) -> Row {
        Row {
            container: container.into(),
            engine: "runc".into(),
            migration: None,
            memory_bytes: Some(1 << 20),
            to: Some("b".parse().unwrap()),
            together_with: Vec::new(),
            fate,
            error: None,
            report: (fate == Fate::Moved).then(moved),
        }
    }

    #[test]
    fn containers_and_what_became_of_them_in_columns() {
        let error = ErrorBody { message: "it has a GPU".into(), remedy: "stop it".into(), blockers: vec![] };
        let blocked = Row { error: Some(error), ..row("job", Fate::Blocked) };
        let stopped = Row { to: None, memory_bytes: None, ..row("old", Fate::Skipped) };
        let node = "a".parse().unwrap();
        assert_eq!(
            evacuation(&[row("redis", Fate::Moved), blocked, stopped], &node, false),
            "\
CONTAINER   MEMORY  TO  OUTCOME  BLACKOUT   TOTAL  WHY
redis      1.0 MiB  b   moved    213.4 ms  1.84 s
job        1.0 MiB  b   blocked         -       -  it has a GPU; stop it
old              -  -   skipped         -       -

1 of 3 containers were moved from a, 1 skipped, 1 were not; repeat the command to try them again
"
        );
        let with = |name: &str, other: &str| Row { together_with: vec![other.to_owned()], ..row(name, Fate::Movable) };
        let all = evacuation(&[with("app", "db"), with("db", "app"), row("redis", Fate::Movable)], &node, true);
        assert_eq!(
            all,
            "\
CONTAINER   MEMORY  TO  TOGETHER WITH  OUTCOME       BLACKOUT  TOTAL  WHY
app        1.0 MiB  b   db             can be moved         -      -
db         1.0 MiB  b   app            can be moved         -      -
redis      1.0 MiB  b   -              can be moved         -      -

3 of 3 containers can be moved from a
"
        );
        let all = evacuation(&[row("redis", Fate::Movable)], &node, true);
        assert!(all.ends_with("\n1 of 1 containers can be moved from a\n"), "{all}");
        assert_eq!(evacuation(&[], &node, false), "no containers on a\n");
    }
}
