//! `tranship evacuate`: all running containers of a node, each moved to one of several nodes.
//!
//! Containers that belong together go to one node; those that share namespaces, or have connections with each other, are a group of which all move or none.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tranship_api::{
    Begun, Client, ClientError, Companions, ContainerInfo, ContainerState, ErrorBody, GroupContainer, GroupRequest,
    MoveRequest, Watched,
};
use tranship_types::{
    GroupMember, GroupOrder, GroupReport, MemberOutcome, MigrationId, MoveOptions, NodeName, Outcome, Report,
};

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
    /// The others with which it moves as a whole, or not at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub together_with: Vec<String>,
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

/// What moves as a whole: a container, or a group of which all move or none. Numbers are places in the list of containers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Whole {
    /// What is moved.
    movers: Vec<usize>,
    /// What is made anew where these go.
    made_anew: Vec<usize>,
}

/// A move of an evacuation, as it ended: the place in the list, and the report, or what is known without one.
type Ended = (usize, Result<Report, Unreported>);

/// What happened to a container of whose move there is no report.
#[derive(Debug, Clone)]
struct Unreported {
    fate: Fate,
    error: Option<ErrorBody>,
}

impl From<&ClientError> for Unreported {
    fn from(error: &ClientError) -> Self {
        let refused = matches!(error, ClientError::Refused { .. });
        Self { fate: if refused { Fate::Blocked } else { Fate::Failed }, error: Some(error_of(error)) }
    }
}

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
        let containers = match self.patiently(self.client.containers()).await {
            Ok(containers) => containers,
            Err(e) => return self.refused(&e, json),
        };
        let companions = match self.patiently(self.client.companions(&evacuation.to)).await {
            Ok(companions) => companions,
            // An agent that does not know the call.
            Err(ClientError::Refused { status: 404, .. }) => {
                self.screen.error(&format!(
                    "the agent of node {} is older, and does not tell which containers belong together",
                    node.name
                ));
                Vec::new()
            }
            Err(e) => return self.refused(&e, json),
        };
        let (mut rows, wholes) = placed(containers, &companions, &evacuation.to);
        let exit = match evacuation.dry_run {
            true => self.look(evacuation, &mut rows, &wholes).await,
            false => self.move_all(evacuation, &node.name, (&mut rows, &wholes), json).await,
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
    async fn look(&self, evacuation: &Evacuation, rows: &mut [Row], wholes: &[Whole]) -> Exit {
        for whole in wholes {
            if whole.movers.iter().any(|place| rows[*place].migration.is_some()) {
                whole.all().for_each(|place| rows[place].fate = Fate::Moving);
                continue;
            }
            let asked = match whole.movers.as_slice() {
                [place] => {
                    let request = MoveRequest { dry_run: true, ..request(evacuation, &rows[*place]) };
                    self.patiently(self.client.begin_move(&request)).await.map(|begun| match begun {
                        Begun::Planned(plan) => vec![(*place, plan.blockers)],
                        Begun::Started(_) => vec![(*place, Vec::new())],
                    })
                }
                _ => self.client.plan_group(&group(evacuation, rows, whole)).await.map(|plan| {
                    let place = |name: &str| whole.movers.iter().copied().find(|place| rows[*place].container == name);
                    plan.members.into_iter().filter_map(|one| Some((place(&one.container)?, one.blockers))).collect()
                }),
            };
            let looked = match asked {
                Ok(looked) => looked,
                Err(error) => {
                    let Unreported { error, .. } = Unreported::from(&error);
                    whole
                        .all()
                        .for_each(|place| (rows[place].fate, rows[place].error) = (Fate::Blocked, error.clone()));
                    continue;
                }
            };
            for (place, blockers) in looked {
                rows[place].fate = if blockers.is_empty() { Fate::Movable } else { Fate::Blocked };
                rows[place].error = blockers.first().map(|first| ErrorBody {
                    message: first.cause.clone(),
                    remedy: first.remedy.clone(),
                    blockers: blockers.clone(),
                });
            }
            whole.hold_together(rows);
        }
        if rows.iter().any(|row| row.fate == Fate::Blocked) { Exit::Blocked } else { Exit::Done }
    }

    /// Moves all, some at a time, and skips what cannot be moved.
    async fn move_all(
        &self,
        evacuation: &Evacuation,
        here: &NodeName,
        (rows, wholes): (&mut [Row], &[Whole]),
        json: bool,
    ) -> Exit {
        let mut waiting = wholes.iter().enumerate().peekable();
        // With the number of the whole that has ended.
        let mut moves: JoinSet<(usize, Vec<Ended>)> = JoinSet::new();
        let mut progress = EvacuationProgress::new(self.screen, json);
        let mut interrupt = std::pin::pin!(interrupted());
        let mut was_interrupted = false;
        loop {
            let has_room = |whole: &Whole, rows: &[Row]| {
                let moving = rows.iter().filter(|row| row.fate == Fate::Moving).count();
                moving == 0 || moving + whole.movers.len() <= evacuation.max_parallel as usize
            };
            while !was_interrupted && let Some((number, whole)) = waiting.next_if(|(_, whole)| has_room(whole, rows)) {
                whole.movers.iter().for_each(|place| rows[*place].fate = Fate::Moving);
                let client = self.client.clone();
                match whole.movers.as_slice() {
                    [place] => {
                        let under_way = rows[*place].migration.clone();
                        let moving = one(client, *place, request(evacuation, &rows[*place]), under_way);
                        moves.spawn(async move { (number, moving.await) })
                    }
                    _ => {
                        let members =
                            whole.movers.iter().map(|place| (rows[*place].container.clone(), *place)).collect();
                        let moving = several(client, members, group(evacuation, rows, whole));
                        moves.spawn(async move { (number, moving.await) })
                    }
                };
            }
            progress.show(&plain(&rows.to_vec()));
            tokio::select! {
                ended = moves.join_next() => match ended {
                    Some(Ok((number, ended))) => {
                        ended.into_iter().for_each(|(place, ended)| settle(&mut rows[place], ended, here));
                        wholes[number].hold_together(rows);
                    }
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

impl Whole {
    /// The places of all that belongs to it.
    fn all(&self) -> impl Iterator<Item = usize> {
        self.movers.iter().chain(&self.made_anew).copied()
    }

    /// What is made anew shares the fate of what it is made for; where one cannot be moved, none of the others is.
    fn hold_together(&self, rows: &mut [Row]) {
        let is_done = |fate: Fate| matches!(fate, Fate::Movable | Fate::Moved | Fate::Ended);
        let stays = self.movers.iter().find(|place| !is_done(rows[**place].fate));
        if let Some(stays) = stays {
            let (fate, name) = (rows[*stays].fate, rows[*stays].container.clone());
            let remedy = "see what is said of that one".to_owned();
            let error =
                ErrorBody { message: format!("it moves with {name}, which does not"), remedy, blockers: Vec::new() };
            for place in self.all().filter(|place| place != stays && rows[*place].error.is_none()).collect::<Vec<_>>() {
                if !matches!(rows[place].fate, Fate::Moved | Fate::Ended) {
                    (rows[place].fate, rows[place].error) = (fate, Some(error.clone()));
                }
            }
        } else if let Some(first) = self.movers.first() {
            let fate = rows[*first].fate;
            self.made_anew.iter().for_each(|place| rows[*place].fate = fate);
        }
    }
}

/// The containers with their destinations, and what moves as a whole: those that belong together one after the other, the
/// largest first, and to the node that has got the least memory so far.
fn placed(containers: Vec<ContainerInfo>, companions: &[Companions], to: &[NodeName]) -> (Vec<Row>, Vec<Whole>) {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    containers.iter().for_each(|one| *names.entry(one.name.as_str()).or_default() += 1);
    // Of two engines' containers with one name, it is not said which one is meant.
    let twice: BTreeSet<String> =
        names.into_iter().filter(|(_, times)| *times > 1).map(|(name, _)| name.to_owned()).collect();
    let set_of = |name: &str| {
        let is_in = |companions: &Companions| companions.containers.iter().any(|one| one == name);
        companions.iter().position(is_in).filter(|_| !twice.contains(name))
    };
    let mut sets: BTreeMap<Result<usize, usize>, Vec<ContainerInfo>> = BTreeMap::new();
    for (number, container) in containers.into_iter().enumerate() {
        let set = set_of(&container.name).filter(|_| runs(&container));
        sets.entry(set.ok_or(number)).or_default().push(container);
    }
    // One byte more for each, so that containers whose memory is not known are shared out, too.
    let memory = |set: &[ContainerInfo]| set.iter().map(|one| one.memory_bytes.unwrap_or_default() + 1).sum::<u64>();
    let mut sets: Vec<Vec<ContainerInfo>> = sets.into_values().collect();
    sets.sort_by_key(|set| std::cmp::Reverse(memory(set)));
    let mut given: Vec<(u64, &NodeName)> = to.iter().map(|node| (0, node)).collect();
    let mut rows = Vec::new();
    for mut set in sets {
        set.sort_by_key(|one| std::cmp::Reverse(one.memory_bytes));
        let place = match set.iter().any(runs) {
            true => given.iter_mut().min_by_key(|(memory, _)| *memory),
            false => None,
        };
        let to = place.map(|(given, node)| {
            *given += memory(&set);
            node.clone()
        });
        rows.extend(set.into_iter().map(|one| row(one, to.as_ref())));
    }
    let wholes = wholes(&mut rows, companions, &twice);
    (rows, wholes)
}

fn runs(container: &ContainerInfo) -> bool {
    matches!(container.state, ContainerState::Running | ContainerState::Paused)
}

/// A container that goes to a node if it runs.
fn row(container: ContainerInfo, to: Option<&NodeName>) -> Row {
    let runs = runs(&container);
    let does_not_run = || {
        let remedy = "start it and run the command again, or remove it".to_owned();
        ErrorBody { message: "it does not run".into(), remedy, blockers: Vec::new() }
    };
    Row {
        container: container.name,
        engine: container.engine,
        migration: container.migration,
        memory_bytes: container.memory_bytes,
        to: to.filter(|_| runs).cloned(),
        together_with: Vec::new(),
        fate: if runs { Fate::Waiting } else { Fate::Skipped },
        error: (!runs).then(does_not_run),
        report: None,
    }
}

/// What of the containers that wait moves as a whole, in their order.
fn wholes(rows: &mut [Row], companions: &[Companions], twice: &BTreeSet<String>) -> Vec<Whole> {
    let set_of = |name: &String| {
        let mut sets = companions.iter().flat_map(|companions| &companions.as_a_whole);
        sets.find(|set| set.contains(name)).filter(|_| !twice.contains(name))
    };
    let mut found: Vec<Whole> = Vec::new();
    let mut listed: BTreeSet<usize> = BTreeSet::new();
    for place in 0..rows.len() {
        if rows[place].fate != Fate::Waiting || !listed.insert(place) {
            continue;
        }
        let is_with = |other: &usize| {
            let set = set_of(&rows[place].container);
            rows[*other].fate == Fate::Waiting && set.is_some_and(|set| set_of(&rows[*other].container) == Some(set))
        };
        let others = (place + 1..rows.len()).filter(is_with);
        let all: Vec<usize> = std::iter::once(place).chain(others).collect();
        listed.extend(&all);
        let is_made_anew = |place: &usize| companions.iter().any(|one| one.made_anew.contains(&rows[*place].container));
        let (made_anew, movers): (Vec<usize>, Vec<usize>) = all.iter().partition(|place| is_made_anew(place));
        // A pod of which nothing else runs.
        let whole = if movers.is_empty() {
            Whole { movers: made_anew, made_anew: movers }
        } else {
            Whole { movers, made_anew }
        };
        let names: Vec<String> = all.iter().map(|place| rows[*place].container.clone()).collect();
        for (place, own) in all.iter().zip(&names) {
            rows[*place].together_with = names.iter().filter(|name| *name != own).cloned().collect();
        }
        found.push(whole);
    }
    found
}

/// The move of a container that has a destination.
fn request(evacuation: &Evacuation, row: &Row) -> MoveRequest {
    let engine = row.engine.parse().ok();
    let options = MoveOptions { engine: evacuation.options.engine.or(engine), ..evacuation.options.clone() };
    let to = row.to.clone().unwrap_or_else(|| unreachable!("a container that waits has a destination"));
    MoveRequest { options, ..MoveRequest::new(row.container.clone(), to) }
}

/// The move of several containers, of which all move or none.
fn group(evacuation: &Evacuation, rows: &[Row], whole: &Whole) -> GroupRequest {
    let members = || whole.movers.iter().map(|place| &rows[*place]);
    let first = members().next().map(|row| row.engine.clone());
    let engine = first.filter(|first| members().all(|row| row.engine == *first)).and_then(|engine| engine.parse().ok());
    GroupRequest {
        containers: members().map(|row| (row.container.clone(), GroupContainer::default())).collect(),
        to: members().find_map(|row| row.to.clone()),
        order: GroupOrder::Atomic,
        options: MoveOptions { engine: evacuation.options.engine.or(engine), ..evacuation.options.clone() },
        ..GroupRequest::default()
    }
}

/// Begins a move, or takes up the one that is under way already, and follows it to its end.
async fn one(client: Client, place: usize, request: MoveRequest, under_way: Option<MigrationId>) -> Vec<Ended> {
    let began = match under_way {
        Some(id) if is_of(&client, &id, &request).await => Ok(id),
        _ => begin(&client, &request).await,
    };
    let ended = match began {
        Ok(id) => followed::<Report>(&client, &id).await,
        Err(error) => Err(error),
    };
    vec![(place, ended.map_err(|error| Unreported::from(&error)))]
}

/// The same of a group, whose members have these places.
async fn several(client: Client, members: BTreeMap<String, usize>, request: GroupRequest) -> Vec<Ended> {
    let ended = match begin_group(&client, &request).await {
        Ok(group) => followed::<GroupReport>(&client, &group.id).await,
        Err(error) => Err(error),
    };
    let report = match ended {
        Ok(report) => report,
        Err(error) => {
            let why = Unreported::from(&error);
            return members.into_values().map(|place| (place, Err(why.clone()))).collect();
        }
    };
    let mut all = Vec::new();
    for (member, place) in report.members.iter().filter_map(|one| Some((one, *members.get(&one.container)?))) {
        let own = match &member.migration {
            Some(id) => followed::<Report>(&client, id).await.ok(),
            None => None,
        };
        all.push((place, own.ok_or_else(|| unreported(member))));
    }
    all
}

/// What a group's report tells of a member.
fn unreported(member: &GroupMember) -> Unreported {
    let fate = match member.outcome {
        MemberOutcome::Moved => return Unreported { fate: Fate::Moved, error: None },
        MemberOutcome::Ended => Fate::Ended,
        _ => Fate::Failed,
    };
    let message = member.error.clone().unwrap_or_else(|| "one of those that move with it was not moved".to_owned());
    let error = ErrorBody { message, remedy: "run the command again".to_owned(), blockers: Vec::new() };
    Unreported { fate, error: Some(error) }
}

/// Takes up the moves of just this group where they are under way, or begins them once the agent is there.
async fn begin_group(client: &Client, request: &GroupRequest) -> Result<GroupReport, ClientError> {
    let is_member = |one: &GroupMember| {
        request.containers.contains_key(&one.container) && Some(&one.destination) == request.to.as_ref()
    };
    let is_it = |group: &GroupReport| {
        group.outcome == Outcome::Running
            && group.members.len() == request.containers.len()
            && group.members.iter().all(is_member)
    };
    let asked = Instant::now();
    loop {
        let running = client.groups().await.map(|groups| groups.into_iter().find(is_it));
        let began = match running {
            Ok(Some(group)) => return Ok(group),
            Ok(None) => client.begin_group(request).await,
            Err(error) => Err(error),
        };
        match began {
            // Nothing was sent.
            Err(ClientError::NotRunning(_)) if asked.elapsed() < AWAY_AT_MOST => tokio::time::sleep(TRY_EVERY).await,
            began => return began,
        }
    }
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

/// The last report of a move or group, also through a restart of the agent.
async fn followed<R: Watched>(client: &Client, id: &R::Id) -> Result<R, ClientError> {
    let mut away: Option<Instant> = None;
    loop {
        match client.follow(id, |_: &R| away = None).await {
            Err(error) if error.is_unreachable() && away.get_or_insert_with(Instant::now).elapsed() < AWAY_AT_MOST => {
                tokio::time::sleep(TRY_EVERY).await;
            }
            ended => return ended,
        }
    }
}

/// Writes down how a move ended.
fn settle(row: &mut Row, ended: Result<Report, Unreported>, here: &NodeName) {
    let report = match ended {
        Ok(report) => report,
        Err(Unreported { fate, error }) => {
            (row.fate, row.error) = (fate, error);
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
        let (rows, _) = placed(list, &[], &["b".parse().unwrap(), "c".parse().unwrap()]);
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
        let (rows, _) = placed(vec![unknown("x"), unknown("y")], &[], &["b".parse().unwrap(), "c".parse().unwrap()]);
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
        let (rows, wholes) = placed(vec![container("x", None, ContainerState::Running)], &[], &evacuation.to);
        assert_eq!(wholes, [Whole { movers: vec![0], made_anew: vec![] }]);
        let request = request(&evacuation, &rows[0]);
        assert_eq!(request.options.engine, Some(tranship_types::EngineName::Runc));
    }

    #[test]
    fn what_belongs_together_goes_to_one_node_and_what_is_linked_as_a_whole() {
        let running = |name, memory| container(name, Some(memory), ContainerState::Running);
        let list =
            vec![running("alone", 50), running("app", 30), running("db", 20), running("infra", 1), running("web", 9)];
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let companions = [Companions {
            containers: names(&["app", "db", "infra", "web"]),
            as_a_whole: vec![names(&["app", "db", "infra"])],
            made_anew: names(&["infra"]),
        }];
        let (mut rows, wholes) = placed(list, &companions, &["b".parse().unwrap(), "c".parse().unwrap()]);
        let order: Vec<_> =
            rows.iter().map(|row| (row.container.as_str(), row.to.as_ref().unwrap().as_str())).collect();
        assert_eq!(order, [("app", "b"), ("db", "b"), ("web", "b"), ("infra", "b"), ("alone", "c")]);
        let whole =
            |movers: &[usize], made_anew: &[usize]| Whole { movers: movers.into(), made_anew: made_anew.into() };
        assert_eq!(wholes, [whole(&[0, 1], &[3]), whole(&[2], &[]), whole(&[4], &[])]);
        assert_eq!(rows[0].together_with, ["db", "infra"]);
        assert!(rows[2].together_with.is_empty());

        (rows[0].fate, rows[1].fate) = (Fate::Moved, Fate::Moved);
        wholes[0].hold_together(&mut rows);
        assert_eq!(rows[3].fate, Fate::Moved);
        (rows[0].fate, rows[1].fate, rows[3].fate) = (Fate::Movable, Fate::Blocked, Fate::Waiting);
        wholes[0].hold_together(&mut rows);
        assert_eq!((rows[0].fate, rows[3].fate), (Fate::Blocked, Fate::Blocked));
        assert!(rows[0].error.as_ref().unwrap().message.contains("it moves with db"));
    }
}
