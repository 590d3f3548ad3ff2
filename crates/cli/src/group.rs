//! `tranship move-group`: the group file, and a group's moves from the first to the last.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use tranship_api::{GroupContainer, GroupRequest};
use tranship_types::{GroupId, GroupReport, MemberOutcome, NodeName, Outcome};

use crate::calls::{Calls, Exit};
use crate::follow::{Followed, follow};
use crate::plain::plain;
use crate::progress::GroupProgress;
use crate::screen::Screen;
use crate::show;

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
    let text = std::fs::read_to_string(path)
        .map_err(|e| format!("the group file {} cannot be read: {e}; check its name", path.display()))?;
    let file = parse(&text).map_err(|e| format!("the group file {} makes no sense: {e}", path.display()))?;
    request.containers.extend(file.containers.into_iter().map(|(name, entry)| {
        let entry = entry.unwrap_or_default();
        let depends_on: BTreeSet<String> = entry.depends_on.into_iter().collect();
        (name, GroupContainer { to: entry.to, depends_on })
    }));
    (request.levels, request.stop_levels) = (file.levels, file.stop_levels);
    request.to = request.to.take().or(file.to);
    Ok(())
}

/// Reads a group file's text.
pub fn parse(text: &str) -> Result<GroupFile, String> {
    // The first line says what and where; those below show the place in the file.
    serde_saphyr::from_str(text).map_err(|e| {
        let said = e.to_string();
        let first = said.lines().next().unwrap_or_default();
        format!("{}; docs/workflows.md shows one", first.strip_prefix("error: ").unwrap_or(first))
    })
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
        let plan = self.patiently(self.client.plan_group(request)).await;
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
        assert!(missing.contains("none.yaml cannot be read"), "{missing}");
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
        for (text, word) in [
            ("containers:\n  db:\n  db:\n", "db"),
            ("containers:\n  db: {too: b}\n", "too"),
            ("to: ../b\ncontainers:\n  db:\n", "node name"),
            ("to: b\n", "containers"),
            ("containers: [db, app\n", "line"),
            ("", "line 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text:?}: {error}");
        }
    }
}
