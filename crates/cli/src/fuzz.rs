//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use jiff::tz::TimeZone;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tranship_api::{ContainerInfo, GroupPlan, Leftover, NodeInfo, Plan};
use tranship_types::{GroupReport, Report};

use crate::plain::plain;
use crate::screen::Paint;
use crate::{group, show, units};

/// A group file, and amounts on the command line.
pub fn texts(text: &str) {
    let _ = (group::parse(text), units::milliseconds(text));
}

/// An answer of an agent, which may lie: what people are shown of it has nothing that a terminal obeys.
pub fn answer(data: &[u8]) {
    let (zone, paint, now) = (TimeZone::UTC, Paint(false), 1 << 40);
    shown::<Report>(data, |r| {
        let doubts = [show::report::depends(r), show::report::in_doubt(r), show::report::waits(r, now)];
        let texts = [show::report(r, now, paint, &zone), show::failure(r), show::timing(r, paint), show::trace(r)];
        [doubts.into_iter().flatten().collect(), texts.concat(), show::ending(r, paint)].concat()
    });
    shown::<Vec<Report>>(data, |list| show::under_way(list, now) + &show::history(list, &zone));
    shown::<GroupReport>(data, |r| show::bars(r, 1e6) + &show::group(r, paint));
    shown::<Plan>(data, |p| show::plan(p, paint));
    shown::<GroupPlan>(data, |p| show::group_plan(p, paint));
    shown::<NodeInfo>(data, |n| show::node(n, paint));
    shown::<Vec<ContainerInfo>>(data, |list| show::containers(list, now));
    shown::<Vec<Leftover>>(data, |list| show::leftovers(list));
}

fn shown<T: Serialize + DeserializeOwned + Clone>(data: &[u8], show: impl Fn(&T) -> String) {
    let Ok(answer) = serde_json::from_slice(data) else { return };
    let text = show(&plain(&answer));
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}
