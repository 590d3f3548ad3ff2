use std::fmt::Write;

use jiff::tz::TimeZone;
use tranship_types::{Compressed, Original, Outcome, Part, Phase, Report, Side, WaitKind, Waiting};

use super::table::{Column, table};
use crate::screen::Paint;
use crate::units::{bytes, duration, since, when};

/// Cells of a bar that spans the whole blackout.
const BAR: usize = 32;

/// One line: how the move ended, or where it stands.
fn headline(r: &Report, paint: Paint) -> String {
    let Report { container, source, destination, .. } = r;
    match r.outcome {
        Outcome::Running => {
            format!("{container} moves from {source} to {destination}: {}\n", paint.strong(&r.phase.to_string()))
        }
        Outcome::Moved => {
            let mut line = format!("{container} {} from {source} to {destination}", paint.good("moved"));
            if let Some(total) = r.total_ms {
                let _ = write!(line, " in {}", duration(total));
            }
            if let Some(blackout) = blackout(r) {
                let _ = write!(line, "; blackout {}", paint.strong(&blackout));
            }
            line + "\n"
        }
        Outcome::Failed => {
            format!("{container} {} to {destination}; {}\n", paint.bad("was not moved"), original(r))
        }
        Outcome::Cancelled => {
            format!("{container} {} to {destination}; {}\n", paint.strong("was not moved"), original(r))
        }
        Outcome::GivenUp => match r.original {
            None | Some(Original::Running) => format!(
                "{container} {} to {destination}; it runs on {source} again, as it was at the freeze\n",
                paint.bad("was not moved")
            ),
            Some(_) => format!("{container} {} to {destination}; {}\n", paint.bad("was not moved"), original(r)),
        },
        Outcome::Ended => {
            let how = r.ended.as_deref().unwrap_or("how is not known");
            format!(
                "{container} was moved from {source} to {destination}, and {} there before its last pages had come: {how}\n",
                paint.bad("ended")
            )
        }
    }
}

/// What there is of the original after a move that was undone, as it was found then.
fn original(r: &Report) -> String {
    let source = &r.source;
    match r.original {
        Some(Original::Running) => format!("it runs on {source}, unharmed"),
        Some(Original::Restarted) => format!("it runs on {source}, where it was started anew meanwhile"),
        Some(Original::Paused) => format!("it is paused on {source}"),
        Some(Original::Stopped) => format!("it has ended on {source}"),
        Some(Original::Gone) => format!("it is gone from {source}"),
        Some(Original::Unknown) => format!("what has become of it on {source} could not be seen"),
        None => format!("it stays on {source}"),
    }
}

/// How the move ended, or where it stands, and why.
pub fn ending(r: &Report, paint: Paint) -> String {
    let error = r.error.as_ref().map(|error| format!("{error}\n"));
    headline(r, paint) + &error.unwrap_or_default()
}

/// Of a move that has committed and not ended: what still depends on the source.
pub fn depends(r: &Report) -> Option<String> {
    let Report { container, source, destination, progress, .. } = r;
    (r.outcome == Outcome::Running && r.phase == Phase::Drain).then(|| {
        format!(
            "{container} runs on {destination}, and needs its frozen original on {source} until the last {} have arrived\n",
            bytes(progress.remaining_bytes)
        )
    })
}

/// Of a move that waits for its destination after the commit point: how the operator can end that.
pub fn in_doubt(r: &Report) -> Option<String> {
    let Report { id, container, source, destination, .. } = r;
    if let (Outcome::Running, Phase::Damaged, Some(why)) = (r.outcome, r.phase, &r.error) {
        return Some(format!("{container} ({id}, {source} to {destination}): {why}\n"));
    }
    let known_to_run = match (r.outcome, r.phase, &r.error) {
        (Outcome::Running, Phase::Resume, Some(_)) => "",
        (Outcome::Running, Phase::Drain, Some(_)) => " --host-is-down",
        _ => return None,
    };
    if r.waiting.as_ref().is_some_and(|waiting| waiting.kind == WaitKind::PagerGone) {
        // What it waits for says how to end that.
        return None;
    }
    Some(format!(
        "{container} stays frozen on {source} until {destination} answers; if {destination} is lost for good, `tranship \
         recover {id} --destination-lost{known_to_run}` lets it run on {source} again\n"
    ))
}

/// What a move waits for: what, since when, and what to do.
pub fn waits(r: &Report, now_unix_ms: u64) -> Option<String> {
    let Waiting { what, since_unix_ms, remedy, .. } = r.waiting.as_ref().filter(|_| r.outcome == Outcome::Running)?;
    let mut text = format!("{} waits for {what} (for {})\n", r.container, since(*since_unix_ms, now_unix_ms));
    if !remedy.is_empty() {
        let _ = writeln!(text, "  {remedy}");
    }
    Some(text)
}

/// The one sentence about a move that failed, or whose container has ended.
pub fn failure(r: &Report) -> String {
    let why = match (&r.error, r.blockers.as_slice()) {
        (Some(error), _) => error.clone(),
        (None, [one]) => one.to_string(),
        (None, many) => format!("{} things stand in the way", many.len()),
    };
    match (r.outcome, r.original) {
        (Outcome::Ended, _) => headline(r, Paint(false)).trim_end().to_owned(),
        (_, Some(Original::Running)) => {
            format!("{} was not moved to {} and runs on {}, unharmed: {why}", r.container, r.destination, r.source)
        }
        _ => format!("{} was not moved to {}; {}: {why}", r.container, r.destination, original(r)),
    }
}

/// Which part of their bytes compressed pages took on the wire, if there were any.
pub fn part(compressed: Compressed) -> Option<String> {
    let part = compressed.wire_bytes as f64 / compressed.page_bytes as f64;
    (compressed.page_bytes > 0).then(|| format!("{:.0} %", part * 100.0))
}

fn blackout(r: &Report) -> Option<String> {
    let blackout = duration(r.blackout_ms?);
    Some(match r.blackout_error_ms {
        Some(error) => format!("{blackout} (± {})", duration(error)),
        None => blackout,
    })
}

/// What was measured: the parts with their place in the blackout, then the amounts.
pub fn details(r: &Report, zone: &TimeZone) -> String {
    let mut text = String::new();
    if !r.parts.is_empty() {
        // What lies before and behind the blackout is in `timing`.
        text += &parts(r, r.parts.iter().filter(|part| r.blackout_ms.is_none() || within(part, r).is_some()));
        text.push('\n');
    }
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<14}{value}");
    };
    if let Some(blackout) = blackout(r) {
        line("blackout", blackout);
    }
    if let Some(total) = r.total_ms {
        line("total", duration(total));
    }
    let progress = &r.progress;
    if progress.memory_bytes > 0 {
        let moved = match progress.moved_bytes == progress.memory_bytes {
            true => String::new(),
            false => format!(", {} of it moved", bytes(progress.moved_bytes)),
        };
        line("memory", format!("{}{moved}", bytes(progress.memory_bytes)));
    }
    for (number, round) in r.rounds.iter().enumerate() {
        let (sent, took) = (bytes(round.bytes), duration(round.ms));
        let written = match number {
            0 => String::new(),
            _ => format!(", the container had written {}/s", bytes(round.dirty_rate as u64)),
        };
        line(&format!("round {}", number + 1), format!("{sent} in {took}{written}"));
    }
    if let Some(faults) = &r.remote_faults {
        let us = |us: f64| duration(us / 1e3);
        let (p50, p99, max) = (us(faults.p50_us), us(faults.p99_us), us(faults.max_us));
        line("remote faults", format!("{}; half within {p50}, 99 % within {p99}, the longest {max}", faults.count));
    }
    if let Some(huge) = r.huge_pages {
        line("huge pages", format!("{} of {} made anew on {}", huge.restored, huge.found, r.destination));
    }
    if r.skeleton_bytes > 0 {
        line("skeleton", bytes(r.skeleton_bytes));
    }
    if progress.wire_bytes > 0 {
        line("on the wire", bytes(progress.wire_bytes));
    }
    for (codec, compressed) in [("lz4", progress.lz4), ("zstd", progress.zstd)] {
        if let Some(part) = part(compressed) {
            let (pages, wire) = (bytes(compressed.page_bytes), bytes(compressed.wire_bytes));
            line("compressed", format!("{pages} of memory to {wire} with {codec} ({part})"));
        }
    }
    if progress.deduplicated_bytes > 0 {
        line("deduplicated", format!("{} of memory that tasks have in common", bytes(progress.deduplicated_bytes)));
    }
    if r.source_extra_bytes > 0 || r.destination_extra_bytes > 0 {
        let (source, destination) = (bytes(r.source_extra_bytes), bytes(r.destination_extra_bytes));
        line("extra memory", format!("{source} on {}, {destination} on {}", r.source, r.destination));
    }
    for way in &r.ways {
        line("way", way.clone());
    }
    for allowed in &r.allowed {
        line("allowed", super::allowed(allowed));
    }
    for leftover in &r.leftovers {
        line("left over", leftover.clone());
    }
    let mode = match r.mode_taken {
        Some(taken) if taken != r.mode => format!("{}: {taken}", r.mode),
        _ => r.mode.to_string(),
    };
    line("move", format!("{} ({mode}), begun {}", r.id, when(r.started_unix_ms, zone)));
    text
}

/// Everything about one move: `tranship status ID`.
pub fn report(r: &Report, now_unix_ms: u64, paint: Paint, zone: &TimeZone) -> String {
    let mut text = ending(r, paint);
    text += &depends(r).unwrap_or_default();
    text += &waits(r, now_unix_ms).unwrap_or_default();
    text += &in_doubt(r).unwrap_or_default();
    text += &super::blockers(&r.blockers);
    text + "\n" + &details(r, zone)
}

/// Every part of a move, and what of the blackout none of them accounts for: `tranship status ID --timing`.
pub fn timing(r: &Report, paint: Paint) -> String {
    let mut text = headline(r, paint) + "\n" + &parts(r, r.parts.iter());
    if let Some(blackout) = blackout(r) {
        let rest = unaccounted(r);
        let _ = writeln!(text, "\n  blackout      {blackout}, {rest:.1} ms of it in no part");
    }
    text
}

/// The share that a part has in the blackout, as begin and end.
fn within(part: &Part, r: &Report) -> Option<(f64, f64)> {
    let (start, end) = (part.start_ms.max(0.0), (part.start_ms + part.ms).min(r.blackout_ms?));
    (start <= end).then_some((start, end))
}

/// The time of the blackout that lies in no part, in ms.
fn unaccounted(r: &Report) -> f64 {
    let mut shares: Vec<_> = r.parts.iter().filter_map(|part| within(part, r)).collect();
    shares.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut at, mut rest) = (0.0, 0.0);
    for (start, end) in shares {
        rest += f64::max(start - at, 0.0);
        at = f64::max(at, end);
    }
    rest + f64::max(r.blackout_ms.unwrap_or(0.0) - at, 0.0)
}

fn parts<'a>(r: &Report, shown: impl Iterator<Item = &'a Part>) -> String {
    let columns = [
        Column::Text("PART"),
        Column::Text("NODE"),
        Column::Number("START"),
        Column::Number("TOOK"),
        Column::Text("BLACKOUT"),
    ];
    let row = |p: &Part| {
        let node = match p.side {
            Side::Source => &r.source,
            Side::Destination => &r.destination,
        };
        // A start is an offset into the blackout: the same unit on all lines lets the eye compare.
        let start = format!("{:.1} ms", p.start_ms);
        let took = format!("{:.1} ms", p.ms);
        vec![p.name.clone(), node.to_string(), start, took, r.blackout_ms.map(|b| bar(p, b)).unwrap_or_default()]
    };
    table("  ", &columns, shown.map(row))
}

/// The part's place within `[0, blackout]`; a part that has no share in it has no bar.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "0 to BAR")]
fn bar(part: &Part, blackout_ms: f64) -> String {
    let (start, end) = (part.start_ms.max(0.0), (part.start_ms + part.ms).min(blackout_ms));
    let inside = blackout_ms > 0.0 && end >= start && start < blackout_ms && part.start_ms + part.ms > 0.0;
    if !inside {
        return String::new();
    }
    let cell = |ms: f64| ms / blackout_ms * BAR as f64;
    let first = (cell(start).round() as usize).min(BAR - 1);
    match (cell(end).round() as usize).saturating_sub(first) {
        0 => " ".repeat(first) + "▏",
        cells => " ".repeat(first) + &"█".repeat(cells),
    }
}

#[cfg(test)]
pub mod tests {
    use tranship_types::{Blocker, BlockerKind, FaultReport, Mode, Progress};

    use super::*;

    const NOW: u64 = 1_700_000_000_000;

    fn part(name: &str, side: Side, start_ms: f64, ms: f64) -> Part {
        Part { name: name.into(), side, start_ms, ms }
    }

    fn begun(id: &str) -> Report {
        let (a, b) = ("a".parse().unwrap(), "b".parse().unwrap());
        Report::new(id.parse().unwrap(), "redis".into(), a, b, Mode::Cold, 1_700_000_000_000)
    }

    pub fn moved() -> Report {
        Report {
            phase: Phase::Done,
            outcome: Outcome::Moved,
            total_ms: Some(1840.0),
            blackout_ms: Some(213.4),
            blackout_error_ms: Some(0.2),
            parts: vec![
                part("prepare", Side::Destination, -120.0, 95.5),
                part("freeze", Side::Source, 0.0, 1.9),
                part("skeleton: dump", Side::Source, 1.9, 44.1),
                part("memory", Side::Source, 2.0, 148.0),
                part("restore", Side::Destination, 46.0, 160.0),
                part("resume", Side::Destination, 208.0, 5.4),
                part("release", Side::Source, 213.5, 80.0),
            ],
            progress: Progress {
                memory_bytes: 172_851_200,
                moved_bytes: 172_851_200,
                wire_bytes: 173_000_000,
                rate: 117_755_084.8,
                ..Default::default()
            },
            skeleton_bytes: 1_150_000,
            source_extra_bytes: 12_000_000,
            destination_extra_bytes: 180_000_000,
            ways: vec!["memory: page store".into()],
            ..begun("m-4k7tq0zd")
        }
    }

    pub fn failed() -> Report {
        Report {
            phase: Phase::Undone,
            outcome: Outcome::Failed,
            total_ms: Some(310.0),
            original: Some(Original::Running),
            error: Some(
                "node b went away while the skeleton travelled (connection reset); start its agent and move again"
                    .into(),
            ),
            ..begun("m-00000001")
        }
    }

    #[test]
    fn a_move_that_succeeded() {
        assert_eq!(
            report(&moved(), NOW, Paint(false), &TimeZone::UTC),
            "\
redis moved from a to b in 1.84 s; blackout 213.4 ms (± 0.2 ms)

  PART            NODE     START      TOOK  BLACKOUT
  freeze          a       0.0 ms    1.9 ms  ▏
  skeleton: dump  a       1.9 ms   44.1 ms  ███████
  memory          a       2.0 ms  148.0 ms  ██████████████████████
  restore         b      46.0 ms  160.0 ms         ████████████████████████
  resume          b     208.0 ms    5.4 ms                                 █

  blackout      213.4 ms (± 0.2 ms)
  total         1.84 s
  memory        164.8 MiB
  skeleton      1.1 MiB
  on the wire   165.0 MiB
  extra memory  11.4 MiB on a, 171.7 MiB on b
  way           memory: page store
  move          m-4k7tq0zd (cold), begun 2023-11-14 22:13:20
"
        );
    }

    #[test]
    fn timing_tells_every_part_and_what_none_accounts_for() {
        let text = timing(&moved(), Paint(false));
        for line in ["  prepare         b     -120.0 ms   95.5 ms", "  release         a      213.5 ms   80.0 ms"] {
            assert!(text.contains(line), "{text}");
        }
        // From the end of the restore at 206.0 ms to the resume.
        assert!(text.ends_with("  blackout      213.4 ms (± 0.2 ms), 2.0 ms of it in no part\n"), "{text}");
    }

    #[test]
    fn a_move_that_failed_says_where_the_container_runs_and_why() {
        assert_eq!(
            report(&failed(), NOW, Paint(false), &TimeZone::UTC),
            "\
redis was not moved to b; it runs on a, unharmed
node b went away while the skeleton travelled (connection reset); start its agent and move again

  total         310.0 ms
  move          m-00000001 (cold), begun 2023-11-14 22:13:20
"
        );
        assert_eq!(
            failure(&failed()),
            "redis was not moved to b and runs on a, unharmed: node b went away while the skeleton travelled (connection \
             reset); start its agent and move again"
        );
    }

    #[test]
    fn a_move_that_was_undone_is_told_as_the_original_was_found() {
        let mut r = failed();
        for (original, words) in [
            (Some(Original::Running), "redis was not moved to b and runs on a, unharmed: "),
            (
                Some(Original::Restarted),
                "redis was not moved to b; it runs on a, where it was started anew meanwhile: ",
            ),
            (Some(Original::Stopped), "redis was not moved to b; it has ended on a: "),
            (Some(Original::Gone), "redis was not moved to b; it is gone from a: "),
            (None, "redis was not moved to b; it stays on a: "),
        ] {
            r.original = original;
            assert!(failure(&r).starts_with(words), "{}", failure(&r));
            assert_eq!(headline(&r, Paint(false)).contains("unharmed"), original == Some(Original::Running));
        }
    }

    #[test]
    fn a_container_that_ended_in_the_drain_is_not_told_as_moved() {
        let mut r = moved();
        (r.outcome, r.ended) = (Outcome::Ended, Some("its first process (pid 7) ended on node b".into()));
        let line = "redis was moved from a to b, and ended there before its last pages had come: its first process (pid 7) \
                    ended on node b";
        assert_eq!(failure(&r), line);
        assert!(report(&r, NOW, Paint(false), &TimeZone::UTC).starts_with(line));
    }

    #[test]
    fn what_a_move_waits_for_says_since_when_and_what_to_do() {
        let mut r = moved();
        let (kind, since_unix_ms) = (WaitKind::Pager, NOW - 8000);
        let (what, remedy) = ("the pager on node b, which cannot be asked: no".into(), "`kill -CONT PID`".into());
        r.waiting = Some(Waiting { kind, what, since_unix_ms, remedy });
        assert_eq!(waits(&r, NOW), None, "it has ended");
        (r.outcome, r.phase) = (Outcome::Running, Phase::Drain);
        let text = "redis waits for the pager on node b, which cannot be asked: no (for 8 s)\n  `kill -CONT PID`\n";
        assert_eq!(waits(&r, NOW).as_deref(), Some(text));
        assert!(report(&r, NOW, Paint(false), &TimeZone::UTC).contains(text));
    }

    #[test]
    fn what_followed_the_resume_is_told() {
        let mut r = moved();
        (r.mode, r.mode_taken) = (Mode::Auto, Some(Mode::Hybrid));
        let (count, p50_us, p99_us, max_us) = (12, 250.0, 2900.0, 3100.0);
        r.remote_faults = Some(FaultReport { count, p50_us, p99_us, max_us, ..FaultReport::default() });
        let text = details(&r, &TimeZone::UTC);
        assert!(
            text.contains("  remote faults 12; half within 0.2 ms, 99 % within 2.9 ms, the longest 3.1 ms\n"),
            "{text}"
        );
        assert!(text.contains("m-4k7tq0zd (auto: hybrid), begun"), "{text}");
        assert_eq!(depends(&r), None);
        (r.outcome, r.phase, r.progress.remaining_bytes) = (Outcome::Running, Phase::Drain, 4096);
        let needs = "redis runs on b, and needs its frozen original on a until the last 4.0 KiB have arrived\n";
        assert_eq!(depends(&r).as_deref(), Some(needs));
        assert!(report(&r, NOW, Paint(false), &TimeZone::UTC).contains(needs));
    }

    #[test]
    fn what_was_compressed_is_told() {
        let mut r = moved();
        assert!(!details(&r, &TimeZone::UTC).contains("compressed"));
        r.progress.zstd = Compressed { page_bytes: 150 << 20, wire_bytes: 30 << 20 };
        let text = details(&r, &TimeZone::UTC);
        assert!(text.contains("  compressed    150.0 MiB of memory to 30.0 MiB with zstd (20 %)\n"), "{text}");
    }

    #[test]
    fn what_waits_for_a_lost_destination_says_how_to_end_that() {
        let mut r = begun("m-4k7tq0zd");
        (r.phase, r.error) = (Phase::Resume, Some("after the commit point, still trying: no answer".into()));
        let hint = "redis stays frozen on a until b answers; if b is lost for good, `tranship recover m-4k7tq0zd \
                    --destination-lost` lets it run on a again\n";
        assert_eq!(in_doubt(&r).as_deref(), Some(hint));
        assert!(report(&r, NOW, Paint(false), &TimeZone::UTC).contains(hint));
        r.phase = Phase::Drain;
        assert!(in_doubt(&r).unwrap().contains("m-4k7tq0zd --destination-lost --host-is-down`"));
        r.phase = Phase::Release;
        assert_eq!(in_doubt(&r), None);
        (r.outcome, r.phase, r.error) = (Outcome::GivenUp, Phase::Undone, Some("node b was given up as lost".into()));
        assert_eq!(in_doubt(&r), None);
        let text =
            "redis was not moved to b; it runs on a again, as it was at the freeze\nnode b was given up as lost\n";
        assert!(report(&r, NOW, Paint(false), &TimeZone::UTC).starts_with(text));
    }

    #[test]
    fn blockers_stand_on_a_line_each_with_pid_and_descriptor() {
        let blocker =
            Blocker::new(BlockerKind::Descriptor, "stdout is the host file /var/log/x", "start it with a pipe");
        let list = [blocker.clone().at(812, Some(1)), blocker.clone().at(812, None), blocker];
        assert_eq!(
            crate::show::blockers(&list),
            "  \
  pid 812 fd 1: stdout is the host file /var/log/x; start it with a pipe
  pid 812: stdout is the host file /var/log/x; start it with a pipe
  stdout is the host file /var/log/x; start it with a pipe
"
        );
    }

    #[test]
    fn bars_stay_within_the_blackout_whatever_the_numbers() {
        for start in [-1e9, -1.0, 0.0, 99.9, 100.0, 1e9, f64::NAN] {
            for ms in [0.0, 1.0, 100.0, 1e12, f64::NAN] {
                for blackout in [0.0, 100.0, f64::NAN] {
                    let bar = bar(&part("x", Side::Source, start, ms), blackout);
                    assert!(bar.chars().count() <= BAR, "{start} {ms} {blackout}: {bar}");
                }
            }
        }
    }

    #[test]
    fn colours_only_where_they_are_wanted() {
        assert!(headline(&moved(), Paint(true)).contains("\x1b[32;1mmoved\x1b[0m"));
        assert!(!headline(&moved(), Paint(false)).contains('\x1b'));
    }
}
