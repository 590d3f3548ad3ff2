//! Throughput at the client against time, of each system's typical run, with its move marked.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::row::Row;
use crate::suite::{Case, Suite};

const SIZE: (u32, u32) = (960, 420);
/// What one point stands for, in ms.
const SAMPLE: usize = 10;
/// What is shown before and after the beginning of the longest standstill, in s.
const BEFORE: f64 = 0.5;
const AFTER: f64 = 2.0;
const COLORS: [RGBColor; 2] = [RGBColor(0x4e, 0x79, 0xa7), RGBColor(0xe1, 0x57, 0x59)];

/// Draws `SUITE-throughput-WORKLOAD.svg`; `None` where no client has noted what it received.
pub fn draw(directory: &Path, suite: &Suite, case: &Case, rows: &[Row]) -> Result<Option<PathBuf>> {
    if !rows.iter().any(|row| row.course().is_some()) {
        return Ok(None);
    }
    let file = directory.join(format!("{}-throughput-{}.svg", suite.name, case.name()));
    paint(&file, case, rows).map_err(|e| anyhow!("cannot draw {}: {e}", file.display()))?;
    Ok(Some(file))
}

/// A run's points: s from the standstill, and what came in a second.
fn points(row: &Row) -> Option<Vec<(f64, f64)>> {
    let (marked, course) = row.course()?;
    let zero = course.longest_gap_begun(*marked)?;
    let points = course.rates(SAMPLE).into_iter().map(|(time, rate)| (time - zero, rate));
    Some(points.filter(|(time, _)| (-BEFORE..AFTER).contains(time)).collect())
}

fn paint(file: &Path, case: &Case, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let all: Vec<_> = rows.iter().filter_map(|row| Some((row, points(row)?))).collect();
    let most = all.iter().flat_map(|(_, points)| points).map(|p| p.1).fold(1.0, f64::max) * 1.1;
    let area = SVGBackend::new(file, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("{}, link {}: throughput at the client", case.workload, case.link_name());
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(90)
        .build_cartesian_2d(-BEFORE..AFTER, 0.0..most)?;
    chart
        .configure_mesh()
        .x_desc("s from the standstill, the end of the blackout marked")
        .y_desc(if case.name().starts_with("udp") { "datagrams/s" } else { "bytes/s" })
        .light_line_style(BLACK.mix(0.04))
        .draw()?;
    for ((row, points), color) in all.into_iter().zip(COLORS.iter().cycle()) {
        let style = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(row.system().name())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
        if let Some(blackout) = row.quantity("blackout_ms") {
            let end = blackout.median / 1e3;
            chart.draw_series([PathElement::new(vec![(end, 0.0), (end, most)], color.mix(0.5).stroke_width(1))])?;
        }
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    area.present()?;
    Ok(())
}
