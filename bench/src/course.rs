//! The course of one move: when each round of pre-copy was, how fast pages travelled and how fast the container wrote, and
//! the freeze; below it, where pages followed the resume, how long remote faults took.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use tranship_types::{FaultReport, Report};

use crate::row::Row;
use crate::suite::{Load, Suite};

const WIDTH: u32 = 960;
const COURSE: u32 = 460;
const FAULTS: u32 = 280;
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
        let followed = |r: &&Report| !r.rounds.is_empty() || r.remote_faults.is_some();
        let Some(report) = row.report().filter(followed) else { continue };
        let file = directory.join(format!("{}-course-{}.svg", suite.name, row.case().name()));
        let title = format!(
            "{}, link {}, mode {}",
            row.case().workload,
            row.case().link_name(),
            report.mode_taken.unwrap_or(report.mode)
        );
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
    let faults = report.remote_faults.as_ref();
    let area = SVGBackend::new(file, (WIDTH, COURSE + faults.map_or(0, |_| FAULTS))).into_drawing_area();
    area.fill(&WHITE)?;
    let (upper, lower) = area.split_vertically(COURSE);
    paint_course(&upper, title, report)?;
    if let Some(faults) = faults {
        paint_faults(&lower, faults)?;
    }
    area.present()?;
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The histogram of how long remote faults took, on an axis of powers.
fn paint_faults(area: &Area<'_>, faults: &FaultReport) -> Result<(), Box<dyn std::error::Error>> {
    let classes: Vec<(f64, u64)> = faults.histogram.classes().collect();
    // A class begins at the fourth root of a half of its end.
    let begin = |end: f64| end / 2f64.powf(0.25);
    let left = classes.first().map_or(1.0, |c| begin(c.0)) / 1.5;
    let right = classes.last().map_or(10.0, |c| c.0) * 1.5;
    let most = classes.iter().map(|c| c.1).max().unwrap_or(1) as f64 * 1.1;
    let FaultReport { count, p50_us, p99_us, .. } = faults;
    let caption = format!("{count} remote faults: p50 {p50_us:.0} µs, p99 {p99_us:.0} µs");
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((left..right).log_scale(), 0.0..most)?;
    chart
        .configure_mesh()
        .x_desc("µs from the fault to the page's being in place")
        .y_desc("faults")
        .light_line_style(BLACK.mix(0.04))
        .draw()?;
    let bar = |(end, n): &(f64, u64)| Rectangle::new([(begin(*end), 0.0), (*end, *n as f64)], SENT.mix(0.6).filled());
    chart.draw_series(classes.iter().map(bar))?;
    Ok(())
}

fn paint_course(area: &Area<'_>, title: &str, report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let legs = legs(report);
    let blackout = report.blackout_ms.unwrap_or(0.0);
    let begin = legs.first().map_or(-1.0, |leg| leg.from);
    let most = legs.iter().flat_map(|leg| [leg.sent, leg.written]).fold(1.0, f64::max) * 1.1;
    let end = blackout.max(-begin * 0.05) * 1.2;
    let mut chart = ChartBuilder::on(area)
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tranship_types::{Latencies, Mode, RoundReport};

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

    #[test]
    fn faults_are_drawn_below_where_there_were_any() {
        let name = |text: &str| text.parse().unwrap();
        let id = "m-0123456789ab".parse().unwrap();
        let mut report = Report::new(id, "c".into(), name("a"), name("b"), Mode::Hybrid, 0);
        report.rounds = vec![RoundReport { bytes: 4_000_000, ms: 40.0, dirty_rate: 0.0 }];
        let file = std::env::temp_dir().join(format!("tranship-bench-course-{}.svg", std::process::id()));
        let drawn = |report: &Report| {
            paint(&file, "x", report).unwrap();
            std::fs::read_to_string(&file).unwrap()
        };
        let without = drawn(&report);
        let mut latencies = Latencies::default();
        [150, 200, 2000].into_iter().for_each(|us| latencies.add(Duration::from_micros(us)));
        report.remote_faults = Some(latencies.into());
        let with = drawn(&report);
        std::fs::remove_file(&file).unwrap();
        assert!(with.contains("3 remote faults") && !without.contains("remote faults"));
    }
}
