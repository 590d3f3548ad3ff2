//! Where both agents act, one at a time, and what befalls them.

use std::collections::VecDeque;
use std::fmt::Display;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};

use tranship_coordinator::{Ending, FaultPlan, Journal};
use tranship_types::Side;

use crate::agents;
use crate::world::World;

/// Actions after which a run is taken not to end at all. One without mishaps has about a hundred.
const ENOUGH: usize = 20_000;
/// The beginning of a line that was being written when its writer died.
const TORN: &[u8] = b"3c1f00aa 00000";

/// What the source asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    Offer,
    Ready,
    Commit,
    Abort,
    /// The migration was given up.
    Void,
    Drained,
    /// The last word: with its answer the destination may forget the migration.
    Released,
}

/// What the destination answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response {
    Prepared,
    Ready,
    Running,
    Aborted,
    Drained,
    Failed(String),
}

/// What befalls a run, just before one of its actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mishap {
    /// An agent is killed.
    Kill(Side),
    /// The link breaks, and what is on its way is lost.
    Cut,
    /// Not a mishap: somebody has made space on the disk.
    FreeSpace,
    /// The operator says that the destination is lost, truly or not.
    GiveUp,
}

/// What a run shall go through.
#[derive(Debug, Clone, Default)]
pub struct Case {
    /// Draws who acts when.
    pub seed: u64,
    /// Mishaps, each at the action of that number.
    pub mishaps: Vec<(usize, Mishap)>,
    /// Injected faults, as [`FaultPlan`] reads them.
    pub faults: String,
    /// A step of which the action has its effect but reports an error, once.
    pub failing_action: Option<(Side, String)>,
    /// A step of which the undo fails, once.
    pub failing_undo: Option<(Side, String)>,
    /// These two panic, and report no error.
    pub panics: bool,
    /// Who dies is just writing a line of its journal.
    pub torn: bool,
    /// Whose journal begins with a record that is longer than all others of the other side's.
    pub long: Option<Side>,
    /// The source's agent is told to stop when the first step after the commit point fails.
    pub stopping: bool,
    /// What was sent on a link that is no more comes late, in another order, and also twice.
    pub late: bool,
    /// A move that was undone is asked for once more.
    pub again: bool,
}

/// A request about the migration of this number.
pub type Word = (usize, Request);

/// A link; a new one takes the place of the one before.
#[derive(Debug, Default)]
struct Link {
    number: usize,
    requests: VecDeque<Word>,
    /// Those that were heard.
    heard: Vec<Word>,
    responses: VecDeque<Response>,
}

/// What the destination finds when it listens.
#[derive(Debug)]
pub enum Heard {
    Nothing,
    /// The link that it had broke.
    Lost,
    Request(Word),
    /// A request that was sent on a link that is no more.
    Late(Word),
    /// The source has nothing left to do.
    Finished,
}

/// All that is changed by actions.
#[derive(Debug)]
pub struct Scene {
    pub world: World,
    pub failing_action: Option<(Side, String)>,
    pub failing_undo: Option<(Side, String)>,
    pub stopping: bool,
    /// The user has asked for the move, and no agent has taken it up.
    pub asked: bool,
    /// The operator has said that the destination is lost, and the source has not heard it.
    pub word: bool,
    /// The migration whose word to commit the destination has heard and has not answered.
    committing: Option<usize>,
    /// What was sent on links that are no more, and will be heard.
    late: Vec<Word>,
    is_late: bool,
    /// Drawn by lot for this action.
    lot: usize,
    /// How many migrations there were.
    pub migrations: usize,
    /// How each attempt of the source to end the migration ended.
    pub endings: Vec<Ending>,
    /// What the destination could not undo.
    pub leftovers: Vec<String>,
    link: Option<Link>,
    links: usize,
    up: [bool; 2],
    finished: [bool; 2],
}

impl Scene {
    /// The source makes a new link.
    pub fn dial(&mut self) -> bool {
        self.hang_up();
        if self.up[Side::Destination as usize] {
            self.links += 1;
            self.link = Some(Link { number: self.links, ..Link::default() });
        }
        self.link.is_some()
    }

    pub fn linked(&self) -> bool {
        self.link.is_some()
    }

    /// The link is no more. What was sent on it may be on its way; each word that was heard may be so once more.
    pub fn hang_up(&mut self) {
        let Some(link) = self.link.take().filter(|_| self.is_late) else { return };
        let words = link.heard.into_iter().chain(link.requests);
        let on_their_way = words.enumerate().filter(|(at, _)| self.lot >> (at % 16) & 1 == 1).map(|(_, word)| word);
        self.late.extend(on_their_way);
    }

    /// The user asks for the move; the number of the migration, if an agent is to begin one.
    pub fn begin(&mut self) -> Option<usize> {
        let begins = std::mem::take(&mut self.asked).then_some(self.migrations);
        self.migrations += usize::from(begins.is_some());
        begins
    }

    /// The source asks; false if there is no link.
    pub fn ask(&mut self, migration: usize, request: Request) -> bool {
        self.link.as_mut().map(|link| link.requests.push_back((migration, request))).is_some()
    }

    /// Whether the word to commit a migration can be heard yet.
    fn may_commit(&self, migration: usize) -> bool {
        let word = (migration, Request::Commit);
        self.committing == Some(migration)
            || self.late.contains(&word)
            || self.is_late
                && self.link.as_ref().is_some_and(|link| link.requests.contains(&word) || link.heard.contains(&word))
    }

    /// The source looks for an answer; an error if the link broke.
    pub fn answered(&mut self) -> Result<Option<Response>, ()> {
        self.link.as_mut().map(|link| link.responses.pop_front()).ok_or(())
    }

    /// The destination listens; `known` is the number of the link that it has.
    pub fn hear(&mut self, known: &mut usize) -> Heard {
        if !self.late.is_empty() && (self.lot.is_multiple_of(3) || self.finished[Side::Source as usize]) {
            let word = self.late.swap_remove(self.lot / 3 % self.late.len());
            self.committing = (word.1 == Request::Commit).then_some(word.0);
            return Heard::Late(word);
        }
        let number = self.link.as_ref().map_or(0, |link| link.number);
        if number != *known {
            let had = std::mem::replace(known, number);
            return if had == 0 { Heard::Nothing } else { Heard::Lost };
        }
        match &mut self.link {
            Some(link) => {
                let request = link.requests.pop_front();
                link.heard.extend(request);
                self.committing = request.filter(|(_, request)| *request == Request::Commit).map(|(of, _)| of);
                request.map_or(Heard::Nothing, Heard::Request)
            }
            None if self.finished[Side::Source as usize] => Heard::Finished,
            None => Heard::Nothing,
        }
    }

    /// The destination answers on the link that it knows, if it is still there.
    pub fn answer(&mut self, known: usize, response: Response) {
        self.committing = None;
        if let Some(link) = self.link.as_mut().filter(|link| link.number == known) {
            link.responses.push_back(response);
        }
    }

    fn fall(&mut self, side: Side) {
        self.up[side as usize] = false;
        self.hang_up();
        if side == Side::Destination {
            // What had come to it goes with it.
            self.late.clear();
            self.committing = None;
            self.world.destination_dies();
        }
    }
}

/// How an agent's thread unwinds when it is killed.
struct Died;

struct State {
    scene: Scene,
    whose: Side,
    chance: Chance,
    actions: usize,
    doomed: [bool; 2],
    log: Vec<String>,
}

/// Where both agents act, one at a time.
pub struct Stage {
    pub case: Case,
    directory: PathBuf,
    pub plan: FaultPlan,
    state: Mutex<State>,
    turned: Condvar,
}

/// How a run ended.
#[derive(Debug)]
pub struct End {
    pub world: World,
    pub endings: Vec<Ending>,
    pub leftovers: Vec<String>,
    pub actions: usize,
}

/// Runs a migration until both ends are quiet, checks each action on the way, and that all is settled at the end.
pub fn run(case: &Case) -> End {
    // In memory where possible: a disk would be synced some ten thousand times.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory");
    let stage = Stage {
        case: case.clone(),
        directory: directory.path().to_owned(),
        plan: FaultPlan::parse(&case.faults).expect("a plan of faults"),
        state: Mutex::new(State {
            scene: Scene {
                world: World::new(),
                failing_action: case.failing_action.clone(),
                failing_undo: case.failing_undo.clone(),
                stopping: case.stopping,
                asked: true,
                word: false,
                committing: None,
                late: Vec::new(),
                is_late: case.late,
                lot: 0,
                migrations: 0,
                endings: Vec::new(),
                leftovers: Vec::new(),
                link: None,
                links: 0,
                up: [false; 2],
                finished: [false; 2],
            },
            whose: Side::Source,
            chance: Chance(case.seed),
            actions: 0,
            doomed: [false; 2],
            log: Vec::new(),
        }),
        turned: Condvar::new(),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stage.live(Side::Source, agents::source));
        scope.spawn(|| stage.live(Side::Destination, agents::destination));
    });
    let state = stage.state.into_inner().expect("both agents have ended well");
    let told = || format!("{case:?}\n{}", state.log.join("\n"));
    assert!(state.scene.world.is_settled(), "not settled: {:?}\n{}", state.scene.world, told());
    let journals = Journal::list(&directory.path().join("source"));
    assert!(journals.is_empty(), "the source's journal is left\n{}", told());
    let Scene { world, endings, leftovers, .. } = state.scene;
    End { world, endings, leftovers, actions: state.actions }
}

impl Stage {
    /// Where a side has its journal.
    pub fn directory(&self, side: Side) -> PathBuf {
        self.directory.join(if side == Side::Source { "source" } else { "destination" })
    }

    /// Lets an agent live, die, and start again, until it has nothing left to do.
    fn live(&self, side: Side, agent: fn(&Stage)) {
        loop {
            let life = AssertUnwindSafe(|| {
                self.act(side, "starts", |scene| scene.up[side as usize] = true);
                agent(self);
                self.act(side, "is quiet", |scene| {
                    scene.finished[side as usize] = true;
                    scene.hang_up();
                });
            });
            match catch_unwind(life) {
                Ok(()) => return,
                Err(how) if how.is::<Died>() => self.stay_down(side),
                Err(how) => {
                    // The other must not wait for a turn that never comes: it finds the lock poisoned.
                    let _lock = self.state.lock();
                    self.turned.notify_all();
                    resume_unwind(how);
                }
            }
        }
    }

    fn stay_down(&self, side: Side) {
        let turns = self.act(side, "is dead", |_| ()).1 % 12;
        for _ in 0..turns {
            self.act(side, "is dead", |_| ());
        }
    }

    /// Does one action when it is this side's turn, and checks the world. Returns also a number drawn by lot.
    fn act<R>(&self, side: Side, what: impl Display, effect: impl FnOnce(&mut Scene) -> R) -> (R, usize) {
        let waited = self.turned.wait_while(self.state.lock().expect("the other is well"), |s| s.whose != side);
        let mut state = waited.expect("the other is well");
        state.actions += 1;
        let now = state.actions;
        for (_, mishap) in self.case.mishaps.iter().filter(|(at, _)| *at == now) {
            state.log.push(format!("{now:4} -- {mishap:?}"));
            match mishap {
                Mishap::Kill(side) => state.doomed[*side as usize] = state.scene.up[*side as usize],
                Mishap::Cut => state.scene.hang_up(),
                Mishap::FreeSpace => crate::full_disk::free_space(),
                Mishap::GiveUp => state.scene.word = true,
            }
        }
        if std::mem::take(&mut state.doomed[side as usize]) {
            self.die_here(state, side);
        }
        state.log.push(format!("{now:4} {side:?}: {what}"));
        if self.case.late {
            state.scene.lot = state.chance.draw();
        }
        let result = effect(&mut state.scene);
        for migration in self.source_has_noted("commit") {
            state.scene.world.decide(migration);
        }
        for migration in self.source_has_noted("given-up") {
            if !state.scene.world.was_given_up(migration) {
                let committing = state.scene.may_commit(migration);
                state.scene.world.give_up(migration, committing);
            }
        }
        let broken = state.scene.world.broken_rule().or((now > ENOUGH).then_some("it does not end"));
        if let Some(broken) = broken {
            panic!("{broken}: {:?}\n{:?}\n{}", state.scene.world, self.case, state.log.join("\n"));
        }
        let lot = state.chance.draw();
        state.pass_turn();
        self.turned.notify_all();
        (result, lot)
    }

    /// The migrations of which the source's journal has a whole record of this kind.
    fn source_has_noted(&self, record: &str) -> Vec<usize> {
        let begins = format!("{{\"record\":\"{record}\"");
        // Behind its checksum and its other numbers.
        let json = |line: &[u8]| line.iter().position(|b| *b == b'{').map(|at| line[at..].to_vec()).unwrap_or_default();
        let noted = |line: &[u8]| json(line).starts_with(begins.as_bytes()) && line.ends_with(b"\n");
        let has =
            |path: &PathBuf| std::fs::read(path).is_ok_and(|text| text.split_inclusive(|b| *b == b'\n').any(noted));
        Journal::list(&self.directory(Side::Source))
            .iter()
            .filter(|path| has(path))
            .map(|path| number_of(path))
            .collect()
    }

    /// Does one action, as [`act`](Self::act).
    pub fn turn<R>(&self, side: Side, what: impl Display, effect: impl FnOnce(&mut Scene) -> R) -> R {
        self.act(side, what, effect).0
    }

    /// Kills the agent that calls it.
    pub fn die(&self, side: Side) -> ! {
        let waited = self.turned.wait_while(self.state.lock().expect("the other is well"), |s| s.whose != side);
        self.die_here(waited.expect("the other is well"), side)
    }

    fn die_here(&self, mut state: MutexGuard<'_, State>, side: Side) -> ! {
        let now = state.actions;
        state.log.push(format!("{now:4} {side:?} dies"));
        state.scene.fall(side);
        state.doomed[side as usize] = false;
        if self.case.torn {
            tear(&self.directory(side));
        }
        state.pass_turn();
        drop(state);
        self.turned.notify_all();
        resume_unwind(Box::new(Died))
    }
}

impl State {
    fn pass_turn(&mut self) {
        let other = if self.whose == Side::Source { Side::Destination } else { Side::Source };
        let waiting = !self.scene.finished[other as usize];
        if waiting && (self.scene.finished[self.whose as usize] || self.chance.draw().is_multiple_of(2)) {
            self.whose = other;
        }
    }
}

/// The number of the migration that a journal is of, by its name.
pub fn number_of(journal: &Path) -> usize {
    let name = journal.file_stem().and_then(|name| name.to_str()).expect("a name");
    name.strip_prefix("m-").and_then(|number| number.parse().ok()).expect("the name of a migration")
}

fn tear(journals: &Path) {
    for path in Journal::list(journals) {
        // In the place of the next record, in which there are zeros.
        let text = std::fs::read(&path).expect("a journal");
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("a journal");
        file.write_all_at(TORN, end as u64).expect("a journal can be written");
        // Where it may be a decision it is damage, which the other side is asked about.
        if Journal::read(&path).is_err() {
            file.write_all_at(&text[end..(end + TORN.len()).min(text.len())], end as u64).expect("a journal");
            file.set_len(text.len() as u64).expect("a journal");
        }
    }
}

/// Numbers by lot: splitmix64 (Steele, Lea, Flood 2014), which has no bad seeds.
struct Chance(u64);

impl Chance {
    fn draw(&mut self) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 33) as usize
    }
}
