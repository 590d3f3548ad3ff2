//! Curves of the blackout: against a workload's size, and against the rate at which it writes. One for each system, on axes
//! of powers of ten: the systems differ by orders of magnitude.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::chart::COLORS;
use crate::row::Row;
use crate::suite::{Load, Sets, Suite};

const SIZE: (u32, u32) = (800, 480);

/// A kind of curve: a name for the file, what the axis is, and where on it a row lies, if at all.
struct Axis {
    name: &'static str,
    title: &'static str,
    label: &'static str,
    of: fn(&Row) -> Option<f64>,
    curve: fn(&Row) -> String,
}

fn by_link(row: &Row) -> String {
    format!("{}, {}", row.system().name(), row.case().link_name())
}

fn by_kind_of_tasks(row: &Row) -> String {
    let kind = match row.case().load {
        Load::Tasks { kind, .. } => kind.name(),
        _ => "",
    };
    format!("{kind}, {}", row.system().mode().unwrap_or_default())
}

const AXES: [Axis; 3] = [
    Axis {
        name: "blackout-by-size",
        title: "blackout against size: an idle Redis",
        label: "resident memory before the move, MB",
        of: |row| match row.case().load {
            Load::Redis { sets: Sets::Idle, .. } => Some(row.quantity("workload_bytes")?.median / 1e6),
            _ => None,
        },
        curve: by_link,
    },
    Axis {
        name: "blackout-by-dirty-rate",
        title: "blackout against dirty rate: 4 GiB that do not compress",
        label: "pages rewritten at random, MB/s (at the left end: none)",
        of: |row| match row.case().load {
            // An axis of powers has no zero.
            Load::Writer { rate, .. } => Some(rate.max(10) as f64),
            _ => None,
        },
        curve: by_link,
    },
    Axis {
        name: "blackout-by-tasks",
        title: "blackout against the number of tasks",
        label: "tasks",
        of: |row| match row.case().load {
            Load::Tasks { count, .. } => Some(f64::from(count)),
            _ => None,
        },
        curve: by_kind_of_tasks,
    },
];

/// A curve, with the lowest and highest of each point.
#[derive(Debug, PartialEq)]
struct Curve {
    name: String,
    points: Vec<(f64, f64, f64, f64)>,
}

/// Draws `SUITE-KIND.svg` for each kind that there are at least two points for.
pub fn draw(directory: &Path, suite: &Suite, rows: &[Row]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for axis in &AXES {
        let curves = curves(rows, axis);
        if curves.iter().any(|curve| curve.points.len() > 1) {
            let file = directory.join(format!("{}-{}.svg", suite.name, axis.name));
            paint(&file, axis, &curves).map_err(|e| anyhow!("cannot draw {}: {e}", file.display()))?;
            files.push(file);
        }
    }
    Ok(files)
}

/// The rows as curves.
fn curves(rows: &[Row], axis: &Axis) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for row in rows {
        let (Some(x), Some(y)) = ((axis.of)(row), row.quantity("blackout_ms")) else { continue };
        let name = (axis.curve)(row);
        let point = (x, y.median, y.min, y.max);
        match curves.iter_mut().find(|c| c.name == name) {
            Some(curve) => curve.points.push(point),
            None => curves.push(Curve { name, points: vec![point] }),
        }
    }
    for curve in &mut curves {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

fn paint(file: &Path, axis: &Axis, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|c| &c.points);
    let (left, right) = range(points().map(|p| p.0), 1.15);
    let (low, high) = range(points().flat_map(|p| [p.2, p.3]), 2.0);
    let area = SVGBackend::new(file, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(axis.title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((left..right).log_scale(), (low..high).log_scale())?;
    let plain = |value: &f64| if *value < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    chart
        .configure_mesh()
        .x_desc(axis.label)
        .y_desc("blackout, ms")
        .x_label_formatter(&plain)
        .y_label_formatter(&plain)
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let style = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(curve.points.iter().map(|p| (p.0, p.1)), style))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
        chart.draw_series(curve.points.iter().map(|p| Circle::new((p.0, p.1), 4, color.filled())))?;
        chart.draw_series(curve.points.iter().map(|p| PathElement::new(vec![(p.0, p.2), (p.0, p.3)], style)))?;
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    area.present()?;
    Ok(())
}

/// A range that holds all values, with room by this factor at both ends.
fn range(values: impl Iterator<Item = f64>, room: f64) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v.max(0.1)), high.max(v)));
    (low / room, high.max(low) * room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;
    use crate::suite;

    fn rows() -> Vec<Row> {
        let suite = suite::find("memory").unwrap();
        let cases = suite.cases.iter().filter(|c| c.workload.starts_with("writer-") && c.link.is_none()).rev();
        let row = |case: &'static suite::Case| {
            let sample = Sample { figures: vec![("blackout_ms", 42.0)], ..Sample::default() };
            Row::new(suite, case, case.systems[0], &[sample])
        };
        cases.map(row).collect()
    }

    #[test]
    fn a_curve_has_its_points_in_order() {
        let found = curves(&rows(), &AXES[1]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "tranship, unshaped");
        assert_eq!(found[0].points.iter().map(|p| p.0).collect::<Vec<_>>(), [10.0, 50.0, 200.0, 800.0]);
        assert!(curves(&rows(), &AXES[0]).is_empty());
    }

    #[test]
    fn what_is_drawn_is_a_picture() {
        let directory = std::env::temp_dir().join(format!("tranship-bench-curve-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let files = draw(&directory, suite::find("memory").unwrap(), &rows()).unwrap();
        let text = std::fs::read_to_string(&files[0]).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(files.len(), 1);
        assert!(text.starts_with("<svg") && text.contains("blackout against dirty rate"), "{text}");
    }
}
