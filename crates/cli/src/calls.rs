//! What each command does with the agent, and the exit status that says how it went.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tranship_api::{Begun, Client, ClientError, ErrorBody, MoveRequest, Plan, PlanRequest, RecoverRequest};
use tranship_types::{GroupId, Outcome, Report};

use crate::command::Filter;
use crate::follow::{Followed, follow, interrupted};
use crate::plain::plain;
use crate::progress::Progress;
use crate::screen::Screen;
use crate::show;
use crate::units::duration;

/// How it went, as `tranship --help` lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    Blocked = 3,
    NoAgent = 4,
    Ended = 5,
    Interrupted = 130,
}

/// Time after which a wait is explained.
const SOON: Duration = Duration::from_millis(300);
/// Time after which an answer is late.
const LONG: Duration = Duration::from_secs(1);
/// Between two attempts of a move.
const PAUSE: Duration = Duration::from_millis(500);

/// Talks to one agent for one command.
pub struct Calls<'a> {
    /// The agent.
    pub client: Client,
    /// Where to print.
    pub screen: &'a Screen,
}

impl Calls<'_> {
    /// `tranship ls`.
    pub async fn containers(&self, json: bool) -> Exit {
        self.print(self.patiently(self.client.containers()).await, json, |list| show::containers(list, now_unix_ms()))
    }

    /// `tranship history`.
    pub async fn history(&self, filter: &Filter, json: bool) -> Exit {
        let reports = self.patiently(self.client.reports()).await.map(|list| filtered(ended(list, true), filter));
        self.print(reports, json, |list| show::history(list, &self.screen.zone))
    }

    /// `tranship status`.
    pub async fn under_way(&self, json: bool) -> Exit {
        let reports = self.patiently(self.client.reports()).await.map(|list| ended(list, false));
        // An older agent keeps none.
        let paths = if json { Vec::new() } else { self.client.kept_paths().await.unwrap_or_default() };
        self.print(reports, json, |list| show::under_way(list, now_unix_ms()) + &show::kept_paths(&plain(&paths)))
    }

    /// A migration by its id; or the one of a container that is under way, or else that ended last.
    pub async fn report_of(&self, of: &str) -> Result<Report, ClientError> {
        let mut unknown = None;
        if let Ok(id) = of.parse() {
            match self.client.report(&id).await {
                // Names of containers and ids look alike.
                Err(error @ ClientError::Refused { status: 404, .. }) => unknown = Some(error),
                report => return report,
            }
        }
        let mut reports = self.client.reports().await?;
        reports.retain(|report| report.container == of);
        reports.sort_by_key(|report| (report.outcome != Outcome::Running, std::cmp::Reverse(report.started_unix_ms)));
        let no_such_move = || ErrorBody {
            message: format!("no move of {of:?} is known on this node"),
            remedy: "see `tranship history` for the moves that are, or ask the other node".into(),
            blockers: Vec::new(),
        };
        reports.into_iter().next().ok_or_else(|| match unknown {
            Some(error) if of.starts_with("m-") => error,
            _ => ClientError::Refused { status: 404, body: no_such_move() },
        })
    }

    /// `tranship status NAME|ID`.
    pub async fn status(&self, of: &str, json: bool) -> Exit {
        let report = self.patiently(self.report_of(of)).await;
        self.print(report, json, |r| show::report(r, now_unix_ms(), self.screen.out, &self.screen.zone))
    }

    /// `tranship status --timing NAME|ID`.
    pub async fn timing(&self, of: &str) -> Exit {
        self.print(self.patiently(self.report_of(of)).await, false, |r| show::timing(r, self.screen.out))
    }

    /// `tranship status --trace NAME|ID`.
    pub async fn trace(&self, of: &str) -> Exit {
        self.print(self.patiently(self.report_of(of)).await, false, show::trace)
    }

    /// `tranship node`.
    pub async fn node(&self, json: bool) -> Exit {
        let node = self.patiently(self.client.node()).await;
        let usable = node.as_ref().is_ok_and(show::usable);
        match self.print(node, json, |n| show::node(n, self.screen.out)) {
            Exit::Done if !usable => Exit::Failed,
            exit => exit,
        }
    }

    /// `tranship doctor`.
    pub async fn doctor(&self, fix: bool, json: bool) -> Exit {
        let found = match fix {
            true => self.patiently(self.client.remove_leftovers()).await,
            false => self.patiently(self.client.leftovers()).await,
        };
        let clean = found.as_ref().is_ok_and(|list| list.iter().all(|leftover| leftover.removed || leftover.warning));
        match self.print(found, json, |list| show::leftovers(list)) {
            Exit::Done if !clean => Exit::Failed,
            exit => exit,
        }
    }

    /// `tranship release`.
    pub async fn held_addresses(&self, json: bool) -> Exit {
        let held = self.patiently(self.client.held_addresses()).await;
        self.print(held, json, |list| show::held_addresses(list, now_unix_ms()))
    }

    /// `tranship release NAME`.
    pub async fn release(&self, container: &str, even_if_alive: bool, json: bool) -> Exit {
        let released = self.patiently(self.client.release(container, even_if_alive)).await;
        self.print(released, json, |list| match list.as_slice() {
            [] => format!("the path that was kept for {container} has ended\n"),
            list => show::released(list),
        })
    }

    /// Waits for an answer, and reports it when that takes more than a second.
    pub async fn patiently<T>(&self, answer: impl Future<Output = T>) -> T {
        self.patiently_with("", Duration::ZERO, answer).await
    }

    /// Waits for an answer that takes the `expected` time; soon tells what takes it, and later that it is late.
    pub async fn patiently_with<T>(&self, doing: &str, expected: Duration, answer: impl Future<Output = T>) -> T {
        tokio::pin!(answer);
        let late = "the agent has not answered yet; waiting for it";
        for (wait, text) in [(SOON, doing), (expected + LONG - SOON, late)] {
            tokio::select! {
                answer = &mut answer => return answer,
                () = tokio::time::sleep(wait) => {}
            }
            if !text.is_empty() {
                Screen::tell(&format!("{text}\n"));
            }
        }
        answer.await
    }

    /// `tranship move`, so often again where what stands in the way passes by itself.
    pub async fn begin_move(&self, request: &MoveRequest, retry: u32, json: bool) -> Exit {
        for left in (1..=retry).rev() {
            match self.attempt(request, json, true).await {
                Attempt::Over(exit) => return exit,
                Attempt::Passing(cause) => {
                    Screen::tell(&format!("{} was not moved: {cause}; trying again, {left} left\n", request.container));
                }
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = interrupted() => return Exit::Interrupted,
            }
        }
        match self.attempt(request, json, false).await {
            Attempt::Over(exit) => exit,
            Attempt::Passing(_) => Exit::Blocked,
        }
    }

    /// Moves it once. Where it may be `repeated`, a failure by what passes is not told.
    async fn attempt(&self, request: &MoveRequest, json: bool, repeated: bool) -> Attempt {
        let begun = tokio::select! {
            begun = self.patiently(self.client.begin_move(request)) => begun,
            () = interrupted() => {
                let message = format!(
                    "interrupted while the agent looked for blockers; the move of {} may begin all the same",
                    request.container
                );
                let remedy = "see `tranship status`".to_owned();
                let error = ErrorBody { message, remedy, blockers: Vec::new() };
                return Attempt::Over(self.refuse(&error, json, Exit::Interrupted));
            }
        };
        Attempt::Over(match begun {
            Ok(Begun::Started(report)) => {
                let followed = follow(&self.client, *report, &mut Progress::new(self.screen, json)).await;
                match &followed {
                    Followed::Ended(report) if repeated && report.outcome == Outcome::Failed => {
                        if let Some(cause) = passing(&report.blockers) {
                            return Attempt::Passing(cause);
                        }
                    }
                    _ => {}
                }
                self.seen_through(followed, json).0
            }
            Ok(Begun::Planned(plan)) => self.planned(*plan, json),
            Err(e) => self.not_begun(&e, json),
        })
    }

    /// `tranship plan`.
    pub async fn plan(&self, request: &PlanRequest, json: bool) -> Exit {
        let watched = Duration::from_millis(request.sample_ms.into());
        let time = duration(watched.as_secs_f64() * 1e3);
        let doing =
            format!("waiting for the agent to measure for {time} what {} writes, and the link", request.container);
        match self.patiently_with(&doing, watched, self.client.plan(request)).await {
            Ok(plan) => self.planned(plan, json),
            Err(e) => self.not_begun(&e, json),
        }
    }

    /// `tranship recover`.
    pub async fn recover(&self, request: &RecoverRequest, json: bool) -> Exit {
        let report = match self.patiently(self.client.recover(request)).await {
            Ok(report) => report,
            Err(e) => return self.not_begun(&e, json),
        };
        match (self.see_through(report, json).await, request.keep) {
            // The original goes on, or the copy does: nobody knew which one was decided for.
            ((Exit::Failed | Exit::Done, outcome), Some(_)) if outcome != Outcome::Running => Exit::Done,
            (ended, _) => Self::given_up(ended),
        }
    }

    /// The exit status of a move that was to be given up.
    fn given_up(ended: (Exit, Outcome)) -> Exit {
        match ended {
            // It was meant to end so.
            (Exit::Failed, Outcome::GivenUp) => Exit::Done,
            // The destination has answered after all.
            (Exit::Done, _) => Exit::Failed,
            (exit, _) => exit,
        }
    }

    /// `tranship cancel`: a group if there is one of this id, else the migration of this id, or of the container of this name.
    pub async fn cancel(&self, name: &str, json: bool) -> Exit {
        if name.starts_with(GroupId::PREFIX)
            && let Ok(id) = name.parse()
        {
            match self.patiently(self.client.cancel_group(&id)).await {
                Ok(report) => return self.see_group_cancelled(report, json).await,
                Err(ClientError::Refused { status: 404, .. }) => {}
                Err(e) => return self.not_begun(&e, json),
            }
        }
        let report = match self.patiently(self.client.cancel(name)).await {
            Ok(report) => report,
            Err(e) => return self.not_begun(&e, json),
        };
        match self.see_through(report, json).await {
            (Exit::Failed, Outcome::Cancelled) => Exit::Done,
            (exit, _) => exit,
        }
    }

    fn planned(&self, plan: Plan, json: bool) -> Exit {
        let blocked = !plan.blockers.is_empty();
        if json && blocked {
            let error = show::error_of_blockers(&plan.container, &plan.blockers);
            self.screen.json_of(&plan, Some(&error));
            return Exit::Blocked;
        }
        let printed = self.print(Ok(plan), json, |p| show::plan(p, self.screen.out));
        if blocked { Exit::Blocked } else { printed }
    }

    pub fn not_begun(&self, error: &ClientError, json: bool) -> Exit {
        match (self.refused(error, json), error) {
            // Refusals of a move come before anything is touched.
            (Exit::Failed, ClientError::Refused { status: 403 | 404 | 409 | 422 | 503, .. }) => Exit::Blocked,
            (Exit::Failed, ClientError::Refused { status: 400, .. }) => Exit::Usage,
            (exit, _) => exit,
        }
    }

    /// `tranship status --follow NAME|ID`.
    pub async fn follow(&self, of: &str, json: bool) -> Exit {
        match self.patiently(self.report_of(of)).await {
            Ok(report) => self.see_through(report, json).await.0,
            Err(e) => self.refused(&e, json),
        }
    }

    /// Follows a move until it has ended; says how it is told to the shell, and the last outcome that was seen.
    async fn see_through(&self, first: Report, json: bool) -> (Exit, Outcome) {
        let followed = follow(&self.client, first, &mut Progress::new(self.screen, json)).await;
        self.seen_through(followed, json)
    }

    /// Tells how what was followed has ended.
    fn seen_through(&self, followed: Followed<Report>, json: bool) -> (Exit, Outcome) {
        let (report, exit) = match followed {
            Followed::Ended(report) => {
                let exit = self.ended(&report, json);
                (report, exit)
            }
            Followed::Interrupted(report) => {
                let id = &report.id;
                Screen::tell(&format!(
                    "\nthe move of {} goes on; see `tranship status {id}`, or follow it with `tranship status --follow {id}`\n",
                    report.container
                ));
                (report, Exit::Interrupted)
            }
            Followed::Lost(report, error) => {
                self.screen.error(&format!(
                    "lost sight of the move of {} ({error}); once the agent runs again it finishes or undoes the move: see \
                     `tranship status {}`",
                    report.container, report.id
                ));
                (report, if error.is_unreachable() { Exit::NoAgent } else { Exit::Failed })
            }
        };
        if json {
            self.screen.json_of(&report, show::error_of(&report).as_ref());
        }
        (exit, report.outcome)
    }

    /// Tells people how a move ended.
    fn ended(&self, report: &Report, json: bool) -> Exit {
        let report = &plain(report);
        // That a move was cancelled or given up is what somebody wanted, if hardly who waits for it.
        let told = matches!(report.outcome, Outcome::Moved | Outcome::GivenUp | Outcome::Cancelled);
        if told && !json {
            Screen::print(&show::ending(report, self.screen.out));
        }
        if !told {
            self.screen.error(&show::failure(report));
            Self::tell_blockers(&report.blockers);
        }
        if !json && (told || !report.parts.is_empty()) {
            Screen::print(&format!("\n{}", show::details(report, &self.screen.zone)));
        }
        match (report.outcome, report.blockers.is_empty()) {
            (Outcome::Moved, _) => Exit::Done,
            (Outcome::Ended, _) => Exit::Ended,
            (_, true) => Exit::Failed,
            (_, false) => Exit::Blocked,
        }
    }

    /// Lists blockers below the sentence that has said the first of them: where that was not all there is to say.
    fn tell_blockers(blockers: &[tranship_types::Blocker]) {
        if blockers.len() > 1 || blockers.iter().any(|b| b.pid.is_some()) {
            Screen::tell(&show::blockers(&plain(&blockers.to_vec())));
        }
    }

    /// Prints an answer as JSON or as text, or says why there is none.
    pub fn print<T: Serialize + DeserializeOwned + Clone>(
        &self,
        answer: Result<T, ClientError>,
        json: bool,
        text: impl FnOnce(&T) -> String,
    ) -> Exit {
        match answer {
            Ok(answer) if json => self.screen.json(&answer),
            Ok(answer) => Screen::print(&text(&plain(&answer))),
            Err(e) => return self.refused(&e, json),
        }
        Exit::Done
    }

    /// Says why there is no answer; with `json`, to programs too.
    pub fn refused(&self, error: &ClientError, json: bool) -> Exit {
        self.screen.error(&error.to_string());
        if let ClientError::Refused { body, .. } = error {
            // A single blocker is the sentence itself, but its pid and descriptor are not in it.
            Self::tell_blockers(&body.blockers);
        }
        if json {
            self.screen.json_error(&error_of(error));
        }
        if error.is_unreachable() { Exit::NoAgent } else { Exit::Failed }
    }

    /// Reports an error that was found here; with `json`, to programs too.
    pub fn refuse(&self, error: &ErrorBody, json: bool, exit: Exit) -> Exit {
        self.screen.error(&error.to_string());
        if json {
            self.screen.json_error(error);
        }
        exit
    }
}

/// How an attempt to move a container ended.
enum Attempt {
    /// There is nothing to try again.
    Over(Exit),
    /// What stood in the way passes by itself: the cause.
    Passing(String),
}

/// The cause of a failure that passes by itself.
fn passing(blockers: &[tranship_types::Blocker]) -> Option<String> {
    let all_pass = blockers.iter().all(|blocker| blocker.passes);
    blockers.first().filter(|_| all_pass).map(|blocker| blocker.cause.clone())
}

/// An error as the API describes one.
pub fn error_of(error: &ClientError) -> ErrorBody {
    match error {
        ClientError::Refused { body, .. } => body.clone(),
        other => show::split(&other.to_string(), &[]),
    }
}

fn ended(mut list: Vec<Report>, ended: bool) -> Vec<Report> {
    list.retain(|r| (r.outcome != Outcome::Running) == ended);
    list
}

/// The newest of those that are asked for; `list` has the newest first.
fn filtered(mut list: Vec<Report>, filter: &Filter) -> Vec<Report> {
    list.retain(|r| filter.container.as_ref().is_none_or(|name| *name == r.container));
    list.retain(|r| filter.since_unix_ms.is_none_or(|since| r.started_unix_ms >= since));
    list.truncate(filter.last.map_or(usize::MAX, |last| last as usize));
    list
}

#[allow(clippy::cast_possible_truncation, reason = "64 bits of ms last for 500 million years")]
pub fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}
