//! `tranship evacuate`: all running containers of a node, each moved to one of several nodes.

use std::collections::VecDeque;

use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tranship_api::{Begun, Client, ClientError, ContainerInfo, ContainerState, ErrorBody, MoveRequest};
use tranship_types::{MigrationId, MoveOptions, NodeName, Outcome, Report};

use crate::calls::{Calls, Exit, error_of};
use crate::follow::{AWAY_AT_MOST, TRY_EVERY, interrupted};
use crate::plain::plain;
use crate::progress::EvacuationProgress;
use crate::screen::Screen;
use crate::show;

/// What to evacuate.
#[derive(Debug, Clone, PartialEq)]
pub struct Evacuation {
    /// The destinations, each once.
    pub to: Vec<NodeName>,
    /// No more moves than this at the same time.
    pub max_parallel: u32,
    /// Whether to look only.
    pub dry_run: bool,
    /// The options of each move.
    pub options: MoveOptions,
}

/// What happened to one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// It waits for its turn.
    Waiting,
    /// Its move is under way.
    Moving,
    /// It runs on the destination.
    Moved,
    /// It was moved, and ended on the destination before its last pages had come.
    Ended,
    /// It would be moved (dry run).
    Movable,
    /// Something stands in the way of its move.
    Blocked,
    /// Its move failed, or could not be followed to its end.
    Failed,
    /// It does not run.
    Skipped,
}

/// One container of the node.
#[derive(Debug, Clone, PartialEq, Serialize, serde::Deserialize)]
pub struct Row {
    /// Its name.
    pub container: String,
    /// Its engine.
    pub engine: String,
    /// Its move, where one is under way or has ended.
    pub migration: Option<MigrationId>,
    /// Its resident memory in bytes, where that is known.
    pub memory_bytes: Option<u64>,
    /// The destination.
    pub to: Option<NodeName>,
    /// What happened to it.
    pub fate: Fate,
    /// Why it was not moved.
    pub error: Option<ErrorBody>,
    /// The report of its move.
    pub report: Option<Report>,
}

impl Row {
    /// Whether nothing of it is left to be moved.
    fn is_done(&self) -> bool {
        matches!(self.fate, Fate::Moved | Fate::Movable | Fate::Skipped)
    }
}

/// A move of an evacuation, as it ended: its place in the list, and what happened.
type Ended = (usize, Result<Report, ClientError>);

impl Calls<'_> {
    /// `tranship evacuate`.
    pub async fn evacuate(&self, evacuation: &Evacuation, json: bool) -> Exit {
        let node = match self.patiently(self.client.node()).await {
            Ok(node) => node,
            Err(e) => return self.refused(&e, json),
        };
        let unknown = evacuation.to.iter().find(|to| node.peers.iter().all(|peer| peer.name != **to));
        if let Some(to) = unknown {
            let (message, remedy) = match *to == node.name {
                true => (format!("node {to} cannot be emptied to itself"), "name another node after --to".to_owned()),
                false => (format!("node {} does not know a node {to}", node.name), "see `tranship node`".to_owned()),
            };
            return self.refuse(&ErrorBody { message, remedy, blockers: Vec::new() }, json, Exit::Blocked);
        }
        let mut rows = match self.patiently(self.client.containers()).await {
            Ok(containers) => placed(containers, &evacuation.to),
            Err(e) => return self.refused(&e, json),
        };
        let exit = match evacuation.dry_run {
            true => self.look(evacuation, &mut rows).await,
            false => self.move_all(evacuation, &node.name, &mut rows, json).await,
        };
        if json {
            let stay = rows.iter().filter(|row| !row.is_done()).count();
            let error = (exit != Exit::Done).then(|| ErrorBody {
                message: format!("{stay} of {} containers of node {} were not moved", rows.len(), node.name),
                remedy: "see `error` of each, and repeat the command".to_owned(),
                blockers: Vec::new(),
            });
            self.screen.json_of(&rows, error.as_ref());
        } else {
            Screen::print(&show::evacuation(&plain(&rows), &node.name, evacuation.dry_run));
        }
        exit
    }

    /// Looks what stands in the way of each move.
    async fn look(&self, evacuation: &Evacuation, rows: &mut [Row]) -> Exit {
        for row in rows.iter_mut().filter(|row| row.fate == Fate::Waiting) {
            if row.migration.is_some() {
                row.fate = Fate::Moving;
                continue;
            }
            let Some(mut request) = request(evacuation, row) else { continue };
            request.dry_run = true;
            let blockers = match self.patiently(self.client.begin_move(&request)).await {
                Ok(Begun::Planned(plan)) => plan.blockers,
                Ok(Begun::Started(_)) => Vec::new(),
                Err(error) => {
                    (row.fate, row.error) = (Fate::Blocked, Some(error_of(&error)));
                    continue;
                }
            };
            row.fate = if blockers.is_empty() { Fate::Movable } else { Fate::Blocked };
            row.error = blockers.first().map(|first| ErrorBody {
                message: first.cause.clone(),
                remedy: first.remedy.clone(),
                blockers: blockers.clone(),
            });
        }
        if rows.iter().any(|row| row.fate == Fate::Blocked) { Exit::Blocked } else { Exit::Done }
    }

    /// Moves all, some at a time, and skips what cannot be moved.
    async fn move_all(&self, evacuation: &Evacuation, here: &NodeName, rows: &mut [Row], json: bool) -> Exit {
        let mut waiting: VecDeque<usize> = (0..rows.len()).filter(|n| rows[*n].fate == Fate::Waiting).collect();
        let mut moves: JoinSet<Ended> = JoinSet::new();
        let mut progress = EvacuationProgress::new(self.screen, json);
        let mut interrupt = std::pin::pin!(interrupted());
        let mut was_interrupted = false;
        loop {
            while moves.len() < evacuation.max_parallel as usize && !was_interrupted {
                let Some(next) = waiting.pop_front() else { break };
                rows[next].fate = Fate::Moving;
                moves.spawn(one(
                    self.client.clone(),
                    next,
                    request(evacuation, &rows[next]),
                    rows[next].migration.clone(),
                ));
            }
            progress.show(&plain(&rows.to_vec()));
            tokio::select! {
                ended = moves.join_next() => match ended {
                    Some(Ok((place, ended))) => settle(&mut rows[place], ended, here),
                    Some(Err(error)) => self.screen.error(&format!("a move could not be followed: {error}")),
                    None => break,
                },
                () = &mut interrupt, if !was_interrupted => {
                    was_interrupted = true;
                    break;
                }
            }
        }
        progress.finish();
        match was_interrupted {
            true => {
                Screen::tell("\nno more moves are asked for; those that were go on: see `tranship status`\n");
                Exit::Interrupted
            }
            false if rows.iter().all(Row::is_done) => Exit::Done,
            false => Exit::Failed,
        }
    }
}

/// The containers with their destinations: the largest first, each to the node that has got the least memory so far.
fn placed(mut containers: Vec<ContainerInfo>, to: &[NodeName]) -> Vec<Row> {
    containers.sort_by_key(|c| std::cmp::Reverse(c.memory_bytes));
    let mut given: Vec<(u64, &NodeName)> = to.iter().map(|node| (0, node)).collect();
    let row = |container: ContainerInfo| {
        let runs = matches!(container.state, ContainerState::Running | ContainerState::Paused);
        let mut row = Row {
            container: container.name,
            engine: container.engine,
            migration: container.migration,
            memory_bytes: container.memory_bytes,
            to: None,
            fate: Fate::Skipped,
            error: None,
            report: None,
        };
        if !runs {
            let remedy = "start it and run the command again, or remove it".to_owned();
            row.error = Some(ErrorBody { message: "it does not run".into(), remedy, blockers: Vec::new() });
        } else if let Some((memory, node)) = given.iter_mut().min_by_key(|(memory, _)| *memory) {
            // One byte more, so that containers whose memory is not known are shared out, too.
            *memory += row.memory_bytes.unwrap_or_default() + 1;
            (row.to, row.fate) = (Some(node.clone()), Fate::Waiting);
        }
        row
    };
    containers.into_iter().map(row).collect()
}

fn request(evacuation: &Evacuation, row: &Row) -> Option<MoveRequest> {
    let engine = row.engine.parse().ok();
    let options = MoveOptions { engine: evacuation.options.engine.or(engine), ..evacuation.options.clone() };
    Some(MoveRequest { options, ..MoveRequest::new(row.container.clone(), row.to.clone()?) })
}

/// Begins a move, or takes up the one that is under way already, and follows it to its end.
async fn one(client: Client, place: usize, request: Option<MoveRequest>, under_way: Option<MigrationId>) -> Ended {
    let request = request.unwrap_or_else(|| unreachable!("a container that waits has a destination"));
    let began = match under_way {
        Some(id) if is_of(&client, &id, &request).await => Ok(id),
        _ => begin(&client, &request).await,
    };
    let ended = match began {
        Ok(id) => followed(&client, &id).await,
        Err(error) => Err(error),
    };
    (place, ended)
}

/// Whether a move under way is that of this container, and not of another engine's container of its name.
async fn is_of(client: &Client, id: &MigrationId, request: &MoveRequest) -> bool {
    let engine = |report: Report| report.options.engine;
    client
        .report(id)
        .await
        .is_ok_and(|report| engine(report).is_none_or(|engine| Some(engine) == request.options.engine))
}

/// Begins a move, once the agent is there.
async fn begin(client: &Client, request: &MoveRequest) -> Result<MigrationId, ClientError> {
    let asked = Instant::now();
    loop {
        match client.begin_move(request).await {
            Ok(Begun::Started(report)) => return Ok(report.id),
            Ok(Begun::Planned(_)) => unreachable!("a move was asked for, not a plan"),
            // Nothing was sent.
            Err(ClientError::NotRunning(_)) if asked.elapsed() < AWAY_AT_MOST => tokio::time::sleep(TRY_EVERY).await,
            Err(error) => return Err(error),
        }
    }
}

/// The last report of a move, also through a restart of the agent.
async fn followed(client: &Client, id: &MigrationId) -> Result<Report, ClientError> {
    let mut away: Option<Instant> = None;
    loop {
        match client.follow(id, |_: &Report| away = None).await {
            Err(error) if error.is_unreachable() && away.get_or_insert_with(Instant::now).elapsed() < AWAY_AT_MOST => {
                tokio::time::sleep(TRY_EVERY).await;
            }
            ended => return ended,
        }
    }
}

/// Writes down how a move ended.
fn settle(row: &mut Row, ended: Result<Report, ClientError>, here: &NodeName) {
    let report = match ended {
        Ok(report) => report,
        Err(error) => {
            let refused = matches!(error, ClientError::Refused { .. });
            row.fate = if refused { Fate::Blocked } else { Fate::Failed };
            row.error = Some(error_of(&error));
            return;
        }
    };
    row.migration = Some(report.id.clone());
    row.fate = match report.outcome {
        _ if report.source != *here => Fate::Failed,
        Outcome::Moved => Fate::Moved,
        Outcome::Ended => Fate::Ended,
        _ if !report.blockers.is_empty() => Fate::Blocked,
        _ => Fate::Failed,
    };
    row.error = match report.source != *here {
        true => {
            let (message, remedy) = ("it was just arriving".to_owned(), "run the command again".to_owned());
            Some(ErrorBody { message, remedy, blockers: Vec::new() })
        }
        false => show::error_of(&report),
    };
    row.to = Some(report.destination.clone());
    row.report = Some(report);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, memory: Option<u64>, state: ContainerState) -> ContainerInfo {
        ContainerInfo {
            name: name.into(),
            engine: "runc".into(),
            state,
            pid: None,
            memory_bytes: memory,
            created_unix_ms: None,
            migration: None,
        }
    }

    #[test]
    fn memory_is_shared_out_over_the_nodes() {
        let running = |name, memory| container(name, Some(memory), ContainerState::Running);
        let stopped = container("old", None, ContainerState::Stopped);
        let list = vec![running("small", 10), running("big", 100), stopped, running("middle", 60), running("half", 50)];
        let rows = placed(list, &["b".parse().unwrap(), "c".parse().unwrap()]);
        let to = |row: &Row| (row.container.clone(), row.to.as_ref().map(ToString::to_string));
        let expected =
            [("big", Some("b")), ("middle", Some("c")), ("half", Some("c")), ("small", Some("b")), ("old", None)];
        assert_eq!(rows.iter().map(to).collect::<Vec<_>>(), expected.map(|(n, to)| (n.into(), to.map(Into::into))));
        assert_eq!(rows[4].fate, Fate::Skipped);
        assert!(rows[4].error.as_ref().unwrap().message.contains("does not run"));
    }

    #[test]
    fn containers_whose_memory_is_not_known_are_shared_out_too() {
        let unknown = |name| container(name, None, ContainerState::Running);
        let rows = placed(vec![unknown("x"), unknown("y")], &["b".parse().unwrap(), "c".parse().unwrap()]);
        assert_ne!(rows[0].to, rows[1].to);
    }

    #[test]
    fn each_container_is_asked_of_its_own_engine() {
        let evacuation = Evacuation {
            to: vec!["b".parse().unwrap()],
            max_parallel: 1,
            dry_run: false,
            options: MoveOptions::default(),
        };
        let rows = placed(vec![container("x", None, ContainerState::Running)], &evacuation.to);
        let request = request(&evacuation, &rows[0]).unwrap();
        assert_eq!(request.options.engine, Some(tranship_types::EngineName::Runc));
    }
}
