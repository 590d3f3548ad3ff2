//! The progress of a move, or of a group's moves, while it lasts: one line that changes where people watch, lines that stay where they do not.

use std::time::{Duration, SystemTime};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use tranship_types::{Compressed, GroupReport, MemberOutcome, Outcome, Phase, Progress as Amounts, Report};

use crate::evacuate::{Fate, Row};
use crate::screen::Screen;
use crate::show;
use crate::show::report::part;
use crate::units::{about, bytes, rate};

/// How often [`Shows::tick`] is to be called.
pub const TICK: Duration = Duration::from_secs(1);

/// Shows reports as they come.
pub trait Shows<R> {
    /// Shows a report that has just come.
    fn show(&mut self, report: &R);

    /// Says that a second has passed since the last call.
    fn tick(&mut self, report: &R);

    /// What changes, where people watch.
    fn bar(&self) -> Option<&ProgressBar>;

    /// Says something that stays.
    fn note(&self, text: &str) {
        let tell = || Screen::tell(&format!("{text}\n"));
        self.bar().map_or_else(tell, |bar| bar.suspend(tell));
    }

    /// Clears what changes.
    fn finish(&self) {
        if let Some(bar) = self.bar() {
            bar.finish_and_clear();
        }
    }
}

/// Who is shown what.
pub enum Progress {
    /// A terminal: a line that changes, gone at the end.
    Live(ProgressBar),
    /// A file or pipe: a line on stdout for each phase, and one each second.
    Lines {
        /// The phase of the last line.
        shown: Option<Phase>,
    },
    /// Nobody.
    Silent,
}

impl Progress {
    /// The right one for `screen`. With `json`, stdout is not for progress: it shows on stderr, to people only.
    pub fn new(screen: &Screen, json: bool) -> Self {
        match target(screen, json) {
            Target::Terminal(target) => {
                let bar = ProgressBar::with_draw_target(Some(0), target);
                bar.set_style(live_style(false));
                bar.enable_steady_tick(Duration::from_millis(100));
                Self::Live(bar)
            }
            Target::Lines => Self::Lines { shown: None },
            Target::Nobody => Self::Silent,
        }
    }
}

impl Shows<Report> for Progress {
    fn show(&mut self, report: &Report) {
        match self {
            Self::Live(bar) => {
                let progress = &report.progress;
                bar.set_elapsed(elapsed(report.started_unix_ms));
                bar.set_prefix(format!("{} → {}  {:<8}", report.container, report.destination, report.phase));
                bar.set_message(amounts(report));
                if bar.length() != Some(progress.memory_bytes) {
                    bar.set_length(progress.memory_bytes);
                    bar.set_style(live_style(progress.memory_bytes > 0));
                }
                bar.set_position(progress.moved_bytes);
            }
            Self::Lines { shown } if *shown != Some(report.phase) => {
                *shown = Some(report.phase);
                Screen::print(&line(report, elapsed(report.started_unix_ms)));
            }
            Self::Lines { .. } | Self::Silent => {}
        }
    }

    fn tick(&mut self, report: &Report) {
        if let Self::Lines { .. } = self {
            Screen::print(&line(report, elapsed(report.started_unix_ms)));
        }
    }

    fn bar(&self) -> Option<&ProgressBar> {
        if let Self::Live(bar) = self { Some(bar) } else { None }
    }
}

/// A group's progress: bars that grow, or a line for each phase of each container.
pub enum GroupProgress {
    /// A terminal.
    Live(ProgressBar),
    /// A file or pipe; by container what its last line has said.
    Lines(Vec<String>),
    /// Nobody.
    Silent,
}

impl GroupProgress {
    /// As [`Progress::new`].
    pub fn new(screen: &Screen, json: bool) -> Self {
        match target(screen, json) {
            Target::Terminal(target) => {
                let bar = ProgressBar::with_draw_target(None, target);
                bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
                Self::Live(bar)
            }
            Target::Lines => Self::Lines(Vec::new()),
            Target::Nobody => Self::Silent,
        }
    }
}

impl Shows<GroupReport> for GroupProgress {
    fn show(&mut self, report: &GroupReport) {
        let now = elapsed(report.started_unix_ms);
        match self {
            Self::Live(bar) => bar.set_message(show::bars(report, now.as_secs_f64() * 1e3)),
            Self::Lines(shown) => {
                shown.resize(report.members.len(), String::new());
                for (member, shown) in report.members.iter().zip(shown) {
                    let does = match (member.outcome, member.spans.last()) {
                        (MemberOutcome::Running, span) => span.map_or(Phase::Plan, |s| s.phase).to_string(),
                        (outcome, _) => outcome.to_string(),
                    };
                    if *shown != does {
                        Screen::print(&format!("{:>6.1} s  {:<8}  {}\n", now.as_secs_f64(), does, member.container));
                        *shown = does;
                    }
                }
            }
            Self::Silent => {}
        }
    }

    fn tick(&mut self, report: &GroupReport) {
        if let Self::Live(_) = self {
            self.show(report);
        }
    }

    fn bar(&self) -> Option<&ProgressBar> {
        if let Self::Live(bar) = self { Some(bar) } else { None }
    }
}

/// Progress of an evacuation: how many containers have moved, and which are moving.
pub enum EvacuationProgress {
    /// A terminal.
    Live(ProgressBar),
    /// A file or pipe; by container what its last line has said.
    Lines(Vec<Fate>),
    /// Nobody.
    Silent,
}

impl EvacuationProgress {
    /// As [`Progress::new`].
    pub fn new(screen: &Screen, json: bool) -> Self {
        match target(screen, json) {
            Target::Terminal(target) => {
                let bar = ProgressBar::with_draw_target(Some(0), target);
                let style = ProgressStyle::with_template("{spinner} {bar:16}  {wide_msg}");
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("██░"));
                bar.enable_steady_tick(Duration::from_millis(100));
                Self::Live(bar)
            }
            Target::Lines => Self::Lines(Vec::new()),
            Target::Nobody => Self::Silent,
        }
    }

    /// Shows what has become of the containers.
    pub fn show(&mut self, rows: &[Row]) {
        match self {
            Self::Live(bar) => {
                let is = |fate: Fate| rows.iter().filter(move |row| row.fate == fate);
                let moving: Vec<&str> = is(Fate::Moving).map(|row| row.container.as_str()).collect();
                let done = rows.iter().filter(|row| !matches!(row.fate, Fate::Waiting | Fate::Moving)).count();
                bar.set_length(rows.len() as u64);
                bar.set_position(done as u64);
                let moved = is(Fate::Moved).count();
                bar.set_message(format!("{moved} of {} moved, under way: {}", rows.len(), moving.join(", ")));
            }
            Self::Lines(shown) => {
                shown.resize(rows.len(), Fate::Waiting);
                for (row, shown) in rows.iter().zip(shown) {
                    if *shown != row.fate {
                        Screen::print(&show::evacuated(row));
                        *shown = row.fate;
                    }
                }
            }
            Self::Silent => {}
        }
    }

    /// Clears what changes.
    pub fn finish(&self) {
        if let Self::Live(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Where progress shows.
enum Target {
    Terminal(ProgressDrawTarget),
    Lines,
    Nobody,
}

fn target(screen: &Screen, json: bool) -> Target {
    match (json, screen.out_is_terminal, screen.err_is_terminal) {
        (false, true, _) => Target::Terminal(ProgressDrawTarget::stdout()),
        (false, false, _) => Target::Lines,
        (true, _, true) => Target::Terminal(ProgressDrawTarget::stderr()),
        (true, _, false) => Target::Nobody,
    }
}

fn live_style(bar: bool) -> ProgressStyle {
    let template = match bar {
        true => "{spinner} {prefix}  {since:>7}  {bar:16}  {wide_msg}",
        false => "{spinner} {prefix}  {since:>7}  {wide_msg}",
    };
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("██░")
        .with_key("since", |state: &ProgressState, line: &mut dyn std::fmt::Write| {
            // Nothing can be done about a line that cannot be written to.
            let _ = write!(line, "{:.1} s", state.elapsed().as_secs_f64());
        })
}

/// Since the move began, on the clock of this node, which is also the report's.
fn elapsed(started_unix_ms: u64) -> Duration {
    let began = SystemTime::UNIX_EPOCH + Duration::from_millis(started_unix_ms);
    SystemTime::now().duration_since(began).unwrap_or_default()
}

fn line(report: &Report, elapsed: Duration) -> String {
    let amounts = amounts(report);
    let text = format!("{:>6.1} s  {:<8}  {amounts}", elapsed.as_secs_f64(), report.phase);
    format!("{}\n", text.trim_end())
}

/// How much of the memory has moved: `50 %`. It is 100 % only when nothing is left.
pub fn percent(report: &Report) -> Option<String> {
    let Amounts { memory_bytes, moved_bytes, remaining_bytes, .. } = report.progress;
    let all = moved_bytes >= memory_bytes && remaining_bytes == 0;
    let part = (moved_bytes as f64 / memory_bytes as f64 * 100.0).floor().min(if all { 100.0 } else { 99.0 });
    (memory_bytes > 0).then(|| format!("{part:.0} %"))
}

/// The time until the pages that are known to be left have been sent, at the rate of the last interval.
pub fn time_left(report: &Report) -> Option<Duration> {
    let Amounts { memory_bytes, moved_bytes, remaining_bytes, rate, .. } = report.progress;
    let sends =
        report.outcome == Outcome::Running && matches!(report.phase, Phase::Precopy | Phase::Transfer | Phase::Drain);
    let left = if remaining_bytes > 0 { remaining_bytes } else { memory_bytes.saturating_sub(moved_bytes) };
    (sends && left > 0 && rate > 0.0).then(|| Duration::try_from_secs_f64(left as f64 / rate).ok()).flatten()
}

fn amounts(report: &Report) -> String {
    let progress = &report.progress;
    if progress.memory_bytes == 0 {
        return String::new();
    }
    let mut text = format!(
        "{} of {} ({}), {}, {} on the wire",
        bytes(progress.moved_bytes),
        bytes(progress.memory_bytes),
        percent(report).unwrap_or_default(),
        rate(progress.rate),
        bytes(progress.wire_bytes)
    );
    let compressed = Compressed {
        page_bytes: progress.lz4.page_bytes + progress.zstd.page_bytes,
        wire_bytes: progress.lz4.wire_bytes + progress.zstd.wire_bytes,
    };
    if let Some(part) = part(compressed) {
        text += &format!(", compressed to {part}");
    }
    if let Some(left) = time_left(report) {
        text += &format!(", about {} left", about(left));
    }
    match report.phase {
        Phase::Precopy => {
            if progress.rounds > 0 {
                text += &format!(", round {} done, {} written", progress.rounds, rate(progress.dirty_rate));
            }
            if progress.remaining_bytes > 0 {
                text += &format!(", {} left of round {}", bytes(progress.remaining_bytes), progress.rounds + 1);
            }
        }
        Phase::Drain => {
            text += &format!(", {} left, {} remote faults", bytes(progress.remaining_bytes), progress.remote_faults);
        }
        _ => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::report::tests::moved;

    #[test]
    fn a_line_says_when_what_and_how_much() {
        let mut report = moved();
        (report.phase, report.outcome) = (Phase::Transfer, Outcome::Running);
        report.progress.moved_bytes /= 2;
        assert_eq!(
            line(&report, Duration::from_millis(1234)),
            "   1.2 s  transfer  82.4 MiB of 164.8 MiB (50 %), 112.3 MiB/s, 165.0 MiB on the wire, about 1 s left\n"
        );
        report.progress.lz4 = Compressed { page_bytes: 4096, wire_bytes: 1024 };
        assert!(amounts(&report).ends_with(", 165.0 MiB on the wire, compressed to 25 %, about 1 s left"));
        report.progress.lz4 = Compressed::default();
        (report.progress.rounds, report.progress.dirty_rate) = (2, 1024.0 * 1024.0);
        report.progress.moved_bytes *= 2;
        assert_eq!((percent(&report).as_deref(), time_left(&report)), (Some("100 %"), None));
        report.phase = Phase::Precopy;
        assert!(amounts(&report).ends_with(", 165.0 MiB on the wire, round 2 done, 1.0 MiB/s written"));
        report.progress.remaining_bytes = 4096;
        assert_eq!(percent(&report).as_deref(), Some("99 %"));
        assert!(
            amounts(&report).ends_with(", about 1 s left, round 2 done, 1.0 MiB/s written, 4.0 KiB left of round 3")
        );
        report.progress.remote_faults = 7;
        report.phase = Phase::Drain;
        assert!(amounts(&report).ends_with(", 165.0 MiB on the wire, about 1 s left, 4.0 KiB left, 7 remote faults"));
        report.progress = tranship_types::Progress::default();
        report.phase = Phase::Prepare;
        assert_eq!(line(&report, Duration::ZERO), "   0.0 s  prepare\n");
    }
}
