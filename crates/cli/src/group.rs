//! `tranship move-group`: the group file, and a group's moves from the first to the last.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tranship_api::{GroupContainer, GroupRequest};
use tranship_types::{GroupId, GroupReport, MemberOutcome, NodeName, Outcome};

use crate::calls::{Calls, Exit};
use crate::follow::{Followed, follow};
use crate::plain::plain;
use crate::progress::GroupProgress;
use crate::screen::Screen;
use crate::show;

/// The remedy for a file that is no group file.
const EXAMPLE: &str = "see the example in docs/workflows.md";

/// Time that a plan of a small group takes.
const GROUP_PLAN: Duration = Duration::from_secs(10);

/// A group as people write it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupFile {
    /// Where to, for those that say nothing else.
    to: Option<NodeName>,
    /// The containers by name.
    containers: BTreeMap<String, Option<Entry>>,
    /// Names in levels, in place of dependencies.
    #[serde(default)]
    levels: Vec<Vec<String>>,
    /// Names in levels, in which containers are frozen where all move or none does.
    #[serde(default)]
    stop_levels: Vec<Vec<String>>,
    /// Whether paths to those that stay on a bridge are kept.
    keep_path: Option<bool>,
}

/// What a group file says of a container.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    to: Option<NodeName>,
    #[serde(default)]
    depends_on: Vec<String>,
}

/// Adds to a request what a group file says.
///
/// # Errors
/// One sentence that says what is wrong with the file, and where.
pub fn add_file(request: &mut GroupRequest, path: &Path) -> Result<(), String> {
    let file = read(path)
        .and_then(|text| parse(&text))
        .map_err(|wrong| format!("the group file {} {wrong}", path.display()))?;
    request.containers.extend(file.containers.into_iter().map(|(name, entry)| {
        let entry = entry.unwrap_or_default();
        let depends_on: BTreeSet<String> = entry.depends_on.into_iter().collect();
        (name, GroupContainer { to: entry.to, depends_on })
    }));
    (request.levels, request.stop_levels) = (file.levels, file.stop_levels);
    request.to = request.to.take().or(file.to);
    request.options.keep_path = request.options.keep_path.or(file.keep_path);
    Ok(())
}

/// Reads a group file; the error follows the file's name in a sentence.
fn read(path: &Path) -> Result<String, String> {
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "does not exist; check its name".to_owned(),
        ErrorKind::IsADirectory => "is a directory; name a file in it".to_owned(),
        _ => format!("cannot be read: {error}; check its owner and mode"),
    })?;
    String::from_utf8(bytes).map_err(|_| format!("is not a text file (UTF-8); {EXAMPLE}"))
}

/// Parses the text of a group file; the error follows the file's name in a sentence.
pub fn parse(text: &str) -> Result<GroupFile, String> {
    serde_saphyr::from_str(text).map_err(|error| shape(text).unwrap_or_else(|| place(&error.to_string())))
}

/// What a file is that is no group file at all.
fn shape(text: &str) -> Option<String> {
    let content = serde_saphyr::from_str::<serde_json::Value>(text).ok();
    match content {
        _ if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) => {
            Some(format!("is empty; {EXAMPLE}"))
        }
        Some(serde_json::Value::Array(_)) => Some(format!(
            "holds a list; a group file is a mapping: write each name and a colon below `containers:`, {EXAMPLE}"
        )),
        Some(serde_json::Value::Object(keys)) if keys.contains_key("services") => Some(
            "is a Compose file; give the name of the running project instead: --compose-project PROJECT".to_owned(),
        ),
        Some(serde_json::Value::Object(keys)) if !keys.contains_key("containers") => {
            Some(format!("names no containers; list them below `containers:`, {EXAMPLE}"))
        }
        _ => None,
    }
}

/// The place of a syntax error or unknown field, and what is wrong there: the first line of what the parser reports.
fn place(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    if let Some((place, key)) = first.split_once("duplicate mapping key: ") {
        let key = key.split(", set ").next().unwrap_or(key);
        return format!("is wrong at {place}{key} is there a second time; remove one of them");
    }
    format!("is wrong at {first}; {EXAMPLE}")
}

impl Calls<'_> {
    /// `tranship move-group`.
    pub async fn move_group(&self, request: &GroupRequest, json: bool) -> Exit {
        match self.patiently(self.client.begin_group(request)).await {
            Ok(report) => self.see_group_through(report, json).await,
            Err(e) => self.not_begun(&e, json),
        }
    }

    /// `tranship move-group --dry-run`.
    pub async fn plan_group(&self, request: &GroupRequest, json: bool) -> Exit {
        let doing = "waiting for the agent to look at each container of the group, and to measure what it writes";
        let plan = self.patiently_with(doing, GROUP_PLAN, self.client.plan_group(request)).await;
        let blocked = plan.as_ref().is_ok_and(|plan| plan.members.iter().any(|member| !member.blockers.is_empty()));
        let exit = match plan {
            Ok(plan) => self.print(Ok(plan), json, |plan| show::group_plan(plan, self.screen.out)),
            Err(error) => return self.not_begun(&error, json),
        };
        if blocked { Exit::Blocked } else { exit }
    }

    /// `tranship status g-…`.
    pub async fn group(&self, id: &GroupId, json: bool) -> Exit {
        self.print(self.patiently(self.client.group(id)).await, json, |r| show::group(r, self.screen.out))
    }

    /// `tranship status --follow g-…`.
    pub async fn follow_group(&self, id: &GroupId, json: bool) -> Exit {
        match self.patiently(self.client.group(id)).await {
            Ok(report) => self.see_group_through(report, json).await,
            Err(e) => self.refused(&e, json),
        }
    }

    /// `tranship cancel g-…`, once the agent has begun to undo the moves.
    pub async fn see_group_cancelled(&self, first: GroupReport, json: bool) -> Exit {
        match self.see_group_to_end(first, json).await {
            (Exit::Failed, Outcome::Cancelled) => Exit::Done,
            // All had moved, after all.
            (Exit::Done, _) => Exit::Failed,
            (exit, _) => exit,
        }
    }

    async fn see_group_through(&self, first: GroupReport, json: bool) -> Exit {
        self.see_group_to_end(first, json).await.0
    }

    /// Says how it ended, for the shell, and the last outcome that was seen.
    async fn see_group_to_end(&self, first: GroupReport, json: bool) -> (Exit, Outcome) {
        let id = first.id.clone();
        let mut progress = GroupProgress::new(self.screen, json);
        let (report, exit) = match follow(&self.client, first, &mut progress).await {
            Followed::Ended(report) => {
                let exit = if report.outcome == Outcome::Moved { Exit::Done } else { Exit::Failed };
                (report, exit)
            }
            Followed::Interrupted(report) => {
                Screen::tell(&format!("\nthe group goes on; follow it with `tranship status --follow {id}`\n"));
                (report, Exit::Interrupted)
            }
            Followed::Lost(report, error) => {
                self.screen.error(&format!(
                    "lost sight of the group ({error}); once the agent runs again it finishes or undoes the moves that \
                     have begun: see `tranship status {id}`"
                ));
                (report, if error.is_unreachable() { Exit::NoAgent } else { Exit::Failed })
            }
        };
        if json {
            self.screen.json(&report);
        } else if report.outcome != Outcome::Running {
            Screen::print(&show::group(&plain(&report), self.screen.out));
        }
        if matches!(report.outcome, Outcome::Failed | Outcome::Cancelled) {
            let not = report.members.iter().filter(|m| m.outcome != MemberOutcome::Moved).count();
            self.screen.error(&format!("{not} of {} containers were not moved", report.members.len()));
        }
        (exit, report.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
to: b
containers:
  db:
  cache: {to: c}
  app:
    depends_on: [db, cache]
";

    #[test]
    fn a_file_becomes_a_request() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shop.yaml");
        std::fs::write(&path, FILE).unwrap();
        let mut request = GroupRequest::default();
        add_file(&mut request, &path).unwrap();
        assert_eq!(request.to, Some("b".parse().unwrap()));
        assert_eq!(request.containers["db"], GroupContainer::default());
        assert_eq!(request.containers["cache"].to, Some("c".parse().unwrap()));
        assert_eq!(request.containers["app"].depends_on, ["db", "cache"].map(str::to_owned).into());
        let missing = add_file(&mut request, &directory.path().join("none.yaml")).unwrap_err();
        assert!(missing.contains("none.yaml does not exist"), "{missing}");
    }

    #[test]
    fn the_command_line_names_the_destination_before_the_file_does() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shop.yaml");
        std::fs::write(&path, FILE).unwrap();
        let mut request = GroupRequest { to: Some("d".parse().unwrap()), ..GroupRequest::default() };
        add_file(&mut request, &path).unwrap();
        assert_eq!(request.to, Some("d".parse().unwrap()));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_its_place() {
        let example = "see the example in docs/workflows.md";
        for (text, expected) in [
            (
                "to: b\ncontainers:\n  db:\n  db:\n",
                "is wrong at line 4 column 3: db is there a second time; remove one of them",
            ),
            (
                "containers:\n  db: {too: b}\n",
                "is wrong at line 2 column 8: unknown field `too`, expected one of to, depends_on; EXAMPLE",
            ),
            (
                "- db\n- app\n",
                "holds a list; a group file is a mapping: write each name and a colon below `containers:`, EXAMPLE",
            ),
            ("", "is empty; EXAMPLE"),
            ("# nothing\n\n", "is empty; EXAMPLE"),
            ("to: b\n", "names no containers; list them below `containers:`, EXAMPLE"),
            (
                "services:\n  db:\n    image: redis\n",
                "is a Compose file; give the name of the running project instead: --compose-project PROJECT",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), expected.replace("EXAMPLE", example), "{text:?}");
        }
        for (text, word) in [("to: ../b\ncontainers:\n  db:\n", "node name"), ("containers: [db, app\n", "line")] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_said_to_be_so() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("binary");
        std::fs::write(&binary, [0xff, 0, 1]).unwrap();
        for (path, words) in [
            (directory.path(), "is a directory; name a file in it"),
            (&binary, "binary is not a text file (UTF-8)"),
            (&directory.path().join("none.yaml"), "none.yaml does not exist; check its name"),
        ] {
            let error = add_file(&mut GroupRequest::default(), path).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
