//! What the blackout was spent on, in the report.

use tranship_types::{Part, Side};

use super::SourceRun;
use crate::timeline::align;

impl SourceRun {
    /// The tasks run on the destination since `resumed_ns` of its clock, and these are its last parts.
    pub(super) fn account(&mut self, resumed_ns: u64, parts: Vec<Part>) {
        let error_ms = self.clock.error_ns as f64 / 1e6;
        let resumed = self.clock.to_source(resumed_ns);
        self.report.change(|r| {
            r.parts.extend(parts);
            if let Some(frozen) = self.frozen_ns {
                align(&mut r.parts, self.clock, frozen);
                r.blackout_ms = Some(resumed.saturating_sub(frozen) as f64 / 1e6);
                r.blackout_error_ms = Some(error_ms);
            }
        });
        self.report_parts();
    }

    /// Puts the newest parts into the report, once it is known when the freeze was.
    pub(super) fn report_parts(&mut self) {
        let Some(frozen) = self.frozen_ns else { return };
        let mut parts = self.timeline.take(Side::Source);
        align(&mut parts, self.clock, frozen);
        self.report.change(|r| {
            r.parts.append(&mut parts);
            r.parts.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
        });
    }
}
