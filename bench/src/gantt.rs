//! Groups' moves as bars on one clock, the orders below each other.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use tranship_types::{GroupReport, Phase};

const WIDTH: i32 = 960;
const LEFT: i32 = 110;
const RIGHT: i32 = 30;
const TOP: i32 = 70;
const BAR: i32 = 16;
const LINE: i32 = 22;
const TITLE: i32 = 34;

const STAGES: [(&str, RGBColor); 4] = [
    ("prepare", RGBColor(0xba, 0xb0, 0xac)),
    ("pre-copy", RGBColor(0x76, 0xb7, 0xb2)),
    ("frozen", RGBColor(0xe1, 0x57, 0x59)),
    ("drain, release", RGBColor(0xed, 0xc9, 0x48)),
];

fn stage(phase: Phase) -> usize {
    match phase {
        Phase::Plan | Phase::Prepare => 0,
        Phase::Precopy => 1,
        Phase::Freeze | Phase::Transfer | Phase::Ready | Phase::Commit | Phase::Resume => 2,
        Phase::Drain | Phase::Release | Phase::Done | Phase::Undo | Phase::Undone | Phase::Damaged | Phase::Unknown => {
            3
        }
    }
}

/// Draws them into an SVG file.
pub fn draw(file: &Path, title: &str, groups: &[&GroupReport]) -> Result<()> {
    let failed = |e: &dyn std::fmt::Display| anyhow!("cannot draw {}: {e}", file.display());
    let lines: i32 = groups.iter().map(|g| TITLE + g.members.len() as i32 * LINE).sum();
    let area = SVGBackend::new(file, (WIDTH as u32, (TOP + lines + 40) as u32)).into_drawing_area();
    paint(&area, title, groups, TOP + lines).map_err(|e| failed(&e))?;
    area.present().map_err(|e| failed(&e))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Painted<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn paint<'a>(area: &Area<'a>, title: &str, groups: &[&GroupReport], bottom: i32) -> Painted<'a> {
    let text = |size: i32, at: HPos| ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(at, VPos::Center));
    let most = groups.iter().filter_map(|g| g.total_ms).fold(1.0, f64::max) * 1.02;
    let x = |ms: f64| LEFT + (ms / most * f64::from(WIDTH - LEFT - RIGHT)).round() as i32;
    area.fill(&WHITE)?;
    area.draw(&Text::new(title.to_owned(), (LEFT, 22), text(20, HPos::Left)))?;
    for (index, (name, color)) in (0..).zip(STAGES) {
        let left = LEFT + index * 150;
        area.draw(&Rectangle::new([(left, 42), (left + 12, 54)], color.filled()))?;
        area.draw(&Text::new(name, (left + 18, 48), text(13, HPos::Left)))?;
    }
    let step = (most / 1e3 / 8.0).ceil().max(1.0);
    for number in 0..=(most / 1e3 / step) as u32 {
        let seconds = f64::from(number) * step;
        area.draw(&PathElement::new(vec![(x(seconds * 1e3), TOP), (x(seconds * 1e3), bottom)], BLACK.mix(0.12)))?;
        area.draw(&Text::new(format!("{seconds:.0} s"), (x(seconds * 1e3), bottom + 12), text(13, HPos::Center)))?;
    }
    let mut top = TOP;
    for group in groups {
        let total = group.total_ms.unwrap_or_default() / 1e3;
        let title = format!("{}: {total:.1} s", group.order);
        area.draw(&Text::new(title, (LEFT, top + TITLE / 2), text(15, HPos::Left)))?;
        top += TITLE;
        for member in &group.members {
            area.draw(&Text::new(member.container.clone(), (LEFT - 8, top + BAR / 2), text(13, HPos::Right)))?;
            for span in &member.spans {
                let corners = [(x(span.start_ms), top), (x(span.start_ms + span.ms.unwrap_or_default()), top + BAR)];
                area.draw(&Rectangle::new(corners, STAGES[stage(span.phase)].1.filled()))?;
            }
            top += LINE;
        }
    }
    Ok(())
}
