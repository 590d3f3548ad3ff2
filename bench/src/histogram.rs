//! How the blackouts of a workload are distributed: one histogram below the other, with median and 99th percentile.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::chart::tick;
use crate::row::Row;
use crate::suite::Suite;

const WIDTH: u32 = 900;
const PANEL: u32 = 190;
const BINS: usize = 40;
const BAR: RGBColor = RGBColor(0x4e, 0x79, 0xa7);
const LINE: RGBColor = RGBColor(0xe1, 0x57, 0x59);
/// Fewer runs than this show no distribution.
const FEWEST: usize = 5;

/// Draws `SUITE-distribution.svg` of Tranship's rows in a suite that has enough runs for it.
pub fn draw(directory: &Path, suite: &Suite, rows: &[Row]) -> Result<Option<PathBuf>> {
    let shown: Vec<_> =
        rows.iter().filter(|row| row.system().name() == "tranship" && row.blackouts().len() >= FEWEST).collect();
    if suite.name != "blackout" || shown.is_empty() {
        return Ok(None);
    }
    let file = directory.join(format!("{}-distribution.svg", suite.name));
    paint(&file, &shown).map_err(|e| anyhow!("cannot draw {}: {e}", file.display()))?;
    Ok(Some(file))
}

fn paint(file: &Path, rows: &[&Row]) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(file, (WIDTH, PANEL * rows.len() as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    for (row, panel) in rows.iter().zip(area.split_evenly((rows.len(), 1))) {
        let longest = row.blackouts().last().copied().unwrap_or(1.0);
        let step = tick(longest);
        let most = (longest / step).ceil() * step;
        let counts = counts(row.blackouts(), most);
        let highest = counts.iter().max().copied().unwrap_or(1);
        let (p50, p99) = (row.blackout_quantile(0.5).unwrap_or(0.0), row.blackout_quantile(0.99).unwrap_or(0.0));
        let title = format!("{}: {} moves, p50 {p50:.0} ms, p99 {p99:.0} ms", row.case().workload, row.runs());
        let mut chart = ChartBuilder::on(&panel)
            .caption(title, ("sans-serif", 17))
            .margin(8)
            .x_label_area_size(32)
            .y_label_area_size(44)
            .build_cartesian_2d(0.0..most, 0..highest + 1)?;
        chart.configure_mesh().disable_x_mesh().x_desc("blackout, ms").y_desc("moves").y_labels(4).draw()?;
        let width = most / BINS as f64;
        chart.draw_series(counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(bin, count)| {
            let left = bin as f64 * width;
            Rectangle::new([(left, 0), (left + width, *count)], BAR.filled())
        }))?;
        for ms in [p50, p99] {
            chart.draw_series(LineSeries::new([(ms, 0), (ms, highest + 1)], LINE.stroke_width(2)))?;
        }
    }
    area.present()?;
    Ok(())
}

/// How many of the values lie in each of the bins from 0 to `most`.
fn counts(values: &[f64], most: f64) -> [u32; BINS] {
    let mut counts = [0; BINS];
    for value in values {
        counts[((value / most * BINS as f64) as usize).min(BINS - 1)] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_counted_once() {
        let counts = counts(&[0.0, 24.9, 25.0, 999.0, 1000.0], 1000.0);
        assert_eq!((counts[0], counts[1], counts[BINS - 1]), (2, 1, 2));
        assert_eq!(counts.iter().sum::<u32>(), 5);
    }
}
