//! A chart for each case: what the typical run's blackout was spent on, the systems below each other.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::row::Row;
use crate::suite::{Case, Suite};
use crate::timeline::Slice;

const WIDTH: u32 = 960;
const LEFT: i32 = 120;
const RIGHT: i32 = 30;
const TOP: i32 = 70;
const BAR: i32 = 44;
const LEGEND_LINE: i32 = 20;
const LEGEND_COLUMNS: usize = 2;
pub const COLORS: [RGBColor; 10] = [
    RGBColor(0x4e, 0x79, 0xa7),
    RGBColor(0xf2, 0x8e, 0x2b),
    RGBColor(0x59, 0xa1, 0x4f),
    RGBColor(0xe1, 0x57, 0x59),
    RGBColor(0x76, 0xb7, 0xb2),
    RGBColor(0xed, 0xc9, 0x48),
    RGBColor(0xb0, 0x7a, 0xa1),
    RGBColor(0xff, 0x9d, 0xa7),
    RGBColor(0x9c, 0x75, 0x5f),
    RGBColor(0xba, 0xb0, 0xac),
];

/// Slices smaller than this share of the blackout are drawn as one, which comes last.
const SMALL: f64 = 0.005;

/// Draws `SUITE-WORKLOAD.svg`; `None` if no run succeeded.
pub fn draw(directory: &Path, suite: &Suite, case: &Case, rows: &[Row]) -> Result<Option<PathBuf>> {
    let rows: Vec<_> = rows.iter().filter(|r| r.quantity("client_gap_ms").is_some()).collect();
    let longest = rows.iter().filter_map(|r| Some(r.quantity("client_gap_ms")?.max)).fold(0.0, f64::max);
    if longest <= 0.0 {
        return Ok(None);
    }
    let file = directory.join(format!("{}-{}.svg", suite.name, case.name()));
    let failed = |e: &dyn std::fmt::Display| anyhow!("cannot draw {}: {e}", file.display());
    let legends: i32 = rows.iter().map(|r| legend_height(r)).sum();
    let rows_height = rows.len() as i32 * (BAR + 34);
    let height = TOP + rows_height + 40 + legends;
    {
        let area = SVGBackend::new(&file, (WIDTH, height as u32)).into_drawing_area();
        paint(&area, suite, case, &rows, longest * 1.02, TOP + rows_height).map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))?;
    }
    Ok(Some(file))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Painted<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn paint<'a>(area: &Area<'a>, suite: &Suite, case: &Case, rows: &[&Row], most: f64, bottom: i32) -> Painted<'a> {
    let text = |size: i32, at: HPos| ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(at, VPos::Center));
    let x = |ms: f64| LEFT + (ms / most * f64::from(WIDTH as i32 - LEFT - RIGHT)).round() as i32;
    let title =
        format!("{}, suite {}, link {}: blackout of the typical run", case.workload, suite.name, case.link_name());
    area.fill(&WHITE)?;
    area.draw(&Text::new(title, (LEFT, 22), text(20, HPos::Left)))?;
    area.draw(&Text::new("line: client gap, median; whisker: its range", (LEFT, 46), text(13, HPos::Left)))?;

    let step = tick(most);
    for number in 0..=(most / step) as u32 {
        let ms = f64::from(number) * step;
        area.draw(&PathElement::new(vec![(x(ms), TOP - 8), (x(ms), bottom)], BLACK.mix(0.12)))?;
        area.draw(&Text::new(format!("{ms:.0}"), (x(ms), bottom + 12), text(13, HPos::Center)))?;
    }
    area.draw(&Text::new("ms", (LEFT - 24, bottom + 12), text(13, HPos::Right)))?;

    let mut legend = bottom + 40;
    for (index, row) in rows.iter().enumerate() {
        let top = TOP + index as i32 * (BAR + 34);
        area.draw(&Text::new(row.system().name(), (LEFT - 10, top + BAR / 2), text(15, HPos::Right)))?;
        let mut begin = 0.0;
        for (slice, color) in visible(row.slices()).iter().zip(COLORS.iter().cycle()) {
            let corners = [(x(begin), top), (x(begin + slice.ms), top + BAR)];
            area.draw(&Rectangle::new(corners, color.filled()))?;
            begin += slice.ms;
        }
        if let Some(gap) = row.quantity("client_gap_ms") {
            let (whisker, line) = (top + BAR + 10, vec![(x(gap.median), top - 5), (x(gap.median), top + BAR + 15)]);
            area.draw(&PathElement::new(line, BLACK.stroke_width(2)))?;
            area.draw(&PathElement::new(vec![(x(gap.min), whisker), (x(gap.max).min(WIDTH as i32), whisker)], BLACK))?;
            let beside = if x(gap.median) > WIDTH as i32 / 2 { (-6, HPos::Right) } else { (6, HPos::Left) };
            // On the side where there is room, below the whisker.
            let label = format!("{:.0} ms", gap.median);
            area.draw(&Text::new(label, (x(gap.median) + beside.0, whisker + 10), text(13, beside.1)))?;
        }
        paint_legend(area, row, legend, &text)?;
        legend += legend_height(row);
    }
    Ok(())
}

fn paint_legend<'a>(
    area: &Area<'a>,
    row: &Row,
    top: i32,
    text: &dyn Fn(i32, HPos) -> TextStyle<'static>,
) -> Painted<'a> {
    area.draw(&Text::new(row.system().name(), (LEFT - 10, top), text(14, HPos::Right)))?;
    for (index, (slice, color)) in visible(row.slices()).iter().zip(COLORS.iter().cycle()).enumerate() {
        let column = (WIDTH as i32 - LEFT - RIGHT) / LEGEND_COLUMNS as i32;
        let (left, y) =
            (LEFT + (index % LEGEND_COLUMNS) as i32 * column, top + (index / LEGEND_COLUMNS) as i32 * LEGEND_LINE);
        area.draw(&Rectangle::new([(left, y - 6), (left + 12, y + 6)], color.filled()))?;
        area.draw(&Text::new(format!("{}  {:.1} ms", slice.name, slice.ms), (left + 20, y), text(14, HPos::Left)))?;
    }
    Ok(())
}

fn legend_height(row: &Row) -> i32 {
    visible(row.slices()).len().div_ceil(LEGEND_COLUMNS).max(1) as i32 * LEGEND_LINE + 12
}

/// The slices that can be seen.
fn visible(slices: &[Slice]) -> Vec<Slice> {
    let limit = SMALL * slices.iter().map(|s| s.ms).sum::<f64>();
    let (mut large, small): (Vec<_>, Vec<_>) = slices.iter().cloned().partition(|s| s.ms >= limit);
    match small.as_slice() {
        [] | [_] => large.extend(small),
        several => {
            let name = format!("{} small parts", several.len());
            large.push(Slice { name, ms: several.iter().map(|s| s.ms).sum() });
        }
    }
    large
}

/// A round distance between ticks, so that there are four to ten of them.
pub fn tick(most: f64) -> f64 {
    let scale = 10f64.powf((most / 4.0).log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|s| s * scale).find(|step| most / step >= 4.0).unwrap_or(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_slices_are_drawn_as_one() {
        let slice = |name: &str, ms| Slice { name: name.into(), ms };
        let all = [slice("a", 0.1), slice("b", 100.0), slice("c", 0.2)];
        let seen = visible(&all);
        assert_eq!(seen.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["b", "2 small parts"]);
        assert!((seen[1].ms - 0.3).abs() < 1e-9);
        assert_eq!(visible(&all[..2]).len(), 2);
    }

    #[test]
    fn ticks_are_round_and_few() {
        for (most, step) in [(545.0, 100.0), (1300.0, 200.0), (90.0, 20.0), (4.0, 1.0)] {
            assert!((tick(most) - step).abs() < 1e-9, "{most}: {}", tick(most));
        }
    }
}
