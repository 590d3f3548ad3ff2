//! The course of one move: when each round of pre-copy was, how fast pages travelled and how fast the container wrote, and
//! the freeze.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use tranship_types::Report;

use crate::row::Row;
use crate::suite::{Load, Suite};

const SIZE: (u32, u32) = (960, 460);
const SENT: RGBColor = RGBColor(0x4e, 0x79, 0xa7);
const WRITTEN: RGBColor = RGBColor(0xe1, 0x57, 0x59);
const FROZEN: RGBColor = RGBColor(0x9c, 0x75, 0x5f);

/// A round of pre-copy: from, to (ms from the freeze; negative before it), MB/s sent, MB/s written by the container.
#[derive(Debug, PartialEq)]
struct Leg {
    from: f64,
    to: f64,
    sent: f64,
    written: f64,
}

/// Draws `SUITE-course-WORKLOAD.svg` of each writer's typical run with rounds.
pub fn draw(directory: &Path, suite: &Suite, rows: &[Row]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for row in rows.iter().filter(|r| matches!(r.case().load, Load::Writer { .. })) {
        let Some(report) = row.report().filter(|r| !r.rounds.is_empty()) else { continue };
        let file = directory.join(format!("{}-course-{}.svg", suite.name, row.case().name()));
        let title = format!("{}, link {}, mode {}", row.case().workload, row.case().link_name(), report.mode);
        paint(&file, &title, report).map_err(|e| anyhow!("cannot draw {}: {e}", file.display()))?;
        files.push(file);
    }
    Ok(files)
}

/// The rounds, laid out backwards from the freeze, which the last of them ends at.
fn legs(report: &Report) -> Vec<Leg> {
    let mut to = 0.0;
    let mut legs: Vec<Leg> = report
        .rounds
        .iter()
        .rev()
        .map(|round| {
            let from = to - round.ms;
            let leg =
                Leg { from, to, sent: round.bytes as f64 / round.ms.max(0.01) / 1e3, written: round.dirty_rate / 1e6 };
            to = from;
            leg
        })
        .collect();
    legs.reverse();
    legs
}

fn paint(file: &Path, title: &str, report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let legs = legs(report);
    let blackout = report.blackout_ms.unwrap_or(0.0);
    let begin = legs.first().map_or(0.0, |leg| leg.from);
    let most = legs.iter().flat_map(|leg| [leg.sent, leg.written]).fold(1.0, f64::max) * 1.1;
    let end = blackout.max(-begin * 0.05) * 1.2;
    let area = SVGBackend::new(file, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(format!("{title}: rounds of pre-copy, and {blackout:.0} ms of blackout"), ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(begin..end, 0.0..most)?;
    chart
        .configure_mesh()
        .x_desc("ms from the freeze")
        .y_desc("MB/s")
        .x_label_formatter(&|ms| format!("{ms:.0}"))
        .light_line_style(BLACK.mix(0.04))
        .draw()?;
    let box_of =
        |from: f64, to: f64, height: f64, style: ShapeStyle| Rectangle::new([(from, 0.0), (to, height)], style);
    chart
        .draw_series([box_of(0.0, blackout, most, FROZEN.mix(0.35).filled())])?
        .label("no task runs")
        .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 18, y + 5)], FROZEN.mix(0.35).filled()));
    chart
        .draw_series(legs.iter().map(|leg| box_of(leg.from, leg.to, leg.sent, SENT.mix(0.4).filled())))?
        .label("pages sent, by round")
        .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 18, y + 5)], SENT.mix(0.4).filled()));
    chart.draw_series(legs.iter().map(|leg| box_of(leg.from, leg.to, leg.sent, SENT.stroke_width(1))))?;
    // The first round has none: nothing was watched before it.
    let written = legs.iter().skip(1).flat_map(|leg| [(leg.from, leg.written), (leg.to, leg.written)]);
    chart
        .draw_series(LineSeries::new(written, WRITTEN.stroke_width(2)))?
        .label("written by the container since the round before")
        .legend(|(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], WRITTEN.stroke_width(2)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::{Mode, RoundReport};

    #[test]
    fn rounds_end_where_the_freeze_begins() {
        let name = |text: &str| text.parse().unwrap();
        let id = "m-0123456789ab".parse().unwrap();
        let mut report = Report::new(id, "c".into(), name("a"), name("b"), Mode::Precopy, 0);
        let round = |bytes, ms, dirty_rate| RoundReport { bytes, ms, dirty_rate };
        report.rounds = vec![round(4_000_000, 40.0, 0.0), round(500_000, 10.0, 12.5e6)];
        let found = legs(&report);
        assert_eq!(found[0], Leg { from: -50.0, to: -10.0, sent: 100.0, written: 0.0 });
        assert_eq!(found[1], Leg { from: -10.0, to: 0.0, sent: 50.0, written: 12.5 });
    }
}
