//! `tranship status --watch`: the same text, again each second.

use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tranship_api::ClientError;
use tranship_types::{GroupId, Outcome};

use crate::calls::{Calls, Exit, now_unix_ms};
use crate::follow::interrupted;
use crate::plain::plain;
use crate::screen::Screen;
use crate::show;

const EVERY: Duration = Duration::from_secs(1);
/// Cursor to the upper left corner, and what is below and behind it erased (ECMA-48: CUP, ED).
const CLEAR: &str = "\x1b[H\x1b[J";

impl Calls<'_> {
    /// Shows what is under way, or one move or group, until Ctrl-C. Where nobody watches, it prints what has changed.
    pub async fn watch(&self, of: Option<&str>) -> Exit {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut interrupt = std::pin::pin!(interrupted());
        let mut shown = String::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = &mut interrupt => return Exit::Done,
            }
            let text = match self.frame(of).await {
                Ok(text) => text,
                // An agent that is restarted comes back.
                Err(error) if error.is_unreachable() && !shown.is_empty() => format!("{error}\n"),
                Err(error) => return self.refused(&error, false),
            };
            if self.screen.out_is_terminal {
                Screen::print(&format!("{CLEAR}{text}"));
            } else if text != shown {
                Screen::print(&text);
            }
            shown = text;
        }
    }

    async fn frame(&self, of: Option<&str>) -> Result<String, ClientError> {
        let Some(of) = of else {
            let mut reports = self.client.reports().await?;
            reports.retain(|report| report.outcome == Outcome::Running);
            return Ok(show::under_way(&plain(&reports), now_unix_ms()));
        };
        if of.starts_with(GroupId::PREFIX)
            && let Ok(id) = of.parse()
        {
            return Ok(show::group(&plain(&self.client.group(&id).await?), self.screen.out));
        }
        let report = plain(&self.report_of(of).await?);
        Ok(show::report(&report, now_unix_ms(), self.screen.out, &self.screen.zone))
    }
}
