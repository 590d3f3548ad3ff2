//! What a suite's log says, and the table at the end.

use std::fmt::Write;

use crate::isolation::USED;

/// How many tests of a suite passed, failed and were left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
}

impl Counts {
    /// From the lines by which test programs end: `test result: ok. 5 passed; 0 failed; 1 ignored; …`.
    pub fn of(log: &str) -> Self {
        let mut counts = Self::default();
        for line in log.lines().filter_map(|line| line.trim_start().strip_prefix("test result: ")) {
            let number = |what: &str| {
                let words: Vec<&str> = line.split([' ', ';']).collect();
                let pair = words.windows(2).find(|pair| pair[1] == what);
                pair.and_then(|pair| pair[0].parse::<usize>().ok()).unwrap_or(0)
            };
            counts.passed += number("passed");
            counts.failed += number("failed");
            counts.skipped += number("ignored");
        }
        counts
    }
}

/// The lines that say what could not run here, each once.
pub fn skips(log: &str) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for line in log.lines() {
        let lower = line.to_ascii_lowercase();
        let says = ["skipped", "skip:", "skip "].iter().any(|word| lower.starts_with(word));
        let ignored = line.starts_with("test ") && line.contains(" ... ignored");
        if (says || ignored) && !found.contains(&line) {
            found.push(line);
        }
    }
    found
}

/// The tests that failed, with the first words of what each says: `NAME: MESSAGE`, of one line.
pub fn failures(log: &str) -> Vec<String> {
    const WORDS: usize = 300;
    let lines: Vec<&str> = log.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if line.starts_with("scenario ") && line.contains(" did not end within ") {
            found.push((*line).to_owned());
        }
        let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" ----")) else { continue };
        let says: Vec<&str> = lines[at + 1..]
            .iter()
            .take_while(|line| !line.starts_with("---- ") && **line != "failures:")
            .map(|line| line.trim())
            .filter(|line| !line.is_empty())
            .take(3)
            .collect();
        let message: String = says.join(" ").chars().take(WORDS).collect();
        found.push(format!("{}: {message}", name.strip_suffix(" stdout").unwrap_or(name)));
    }
    found
}

/// The end of a log.
pub fn end(log: &str, lines: usize) -> String {
    let all: Vec<&str> = log.lines().collect();
    let mut text = String::new();
    for line in &all[all.len().saturating_sub(lines)..] {
        let _ = writeln!(text, "    {line}");
    }
    text
}

/// A line of the table.
#[derive(Debug, Clone)]
pub struct Row {
    pub suite: String,
    pub result: &'static str,
    pub seconds: f64,
    /// Seconds of CPU time, where they are known.
    pub cpu: Option<f64>,
    pub counts: Counts,
}

/// The seconds of CPU time that a suite's log tells of.
pub fn cpu_seconds(log: &str) -> Option<f64> {
    log.lines().rev().find_map(|line| line.strip_prefix(USED))?.parse().ok()
}

/// The table, its columns as wide as they have to be.
pub fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.suite.len()).max().unwrap_or(0).max("suite".len());
    let mut text = format!(
        "{:width$}  {:6}  {:>7}  {:>7}  {:>6}  {:>6}  {:>7}\n",
        "suite", "result", "seconds", "CPU s", "passed", "failed", "skipped"
    );
    for Row { suite, result, seconds, cpu, counts } in rows {
        let Counts { passed, failed, skipped } = counts;
        let cpu = cpu.map_or_else(|| "-".into(), |cpu| format!("{cpu:.1}"));
        let _ =
            writeln!(text, "{suite:width$}  {result:6}  {seconds:7.1}  {cpu:>7}  {passed:6}  {failed:6}  {skipped:7}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
running 3 tests
skipped: needs root
skipped: needs root
test a ... ok
test b ... ignored, no such tool
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s
test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";

    #[test]
    fn the_tests_of_all_programs_are_counted() {
        assert_eq!(Counts::of(LOG), Counts { passed: 12, failed: 2, skipped: 1 });
    }

    #[test]
    fn what_was_left_out_is_told_once() {
        assert_eq!(skips(LOG), ["skipped: needs root", "test b ... ignored, no such tool"]);
    }

    #[test]
    fn each_test_that_failed_is_named_with_what_it_says() {
        let log = "\
failures:

---- moves_twice ----
the second move: no space
---- tests::counts stdout ----

thread 'tests::counts' panicked at src/lib.rs:3:5:
left is not right

failures:
    moves_twice
    tests::counts
scenario hangs did not end within 600 s; what runs on this machine:
";
        assert_eq!(
            failures(log),
            [
                "moves_twice: the second move: no space",
                "tests::counts: thread 'tests::counts' panicked at src/lib.rs:3:5: left is not right",
                "scenario hangs did not end within 600 s; what runs on this machine:",
            ]
        );
    }

    #[test]
    fn the_end_of_a_log_is_indented() {
        assert_eq!(end("a\nb\nc\n", 2), "    b\n    c\n");
    }
}
