//! The soak: three nodes, eight containers, and moves of all kinds at once, while processes of ours are killed and
//! moves cancelled at moments drawn by a seed. At most one copy of each container ever runs, none is lost, no connection is
//! lost, every command returns, and nothing is left behind.
//!
//! `TRANSHIP_MOVES=500` asks for so many moves, `TRANSHIP_SEED=7` repeats a run as far as time can be repeated.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    Ended, Lives, MODES, Moving, Stage, asked, connection_alive, is_gone, processes, quiet, remove, scenarios, send,
    wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, UpOptions, patience};
use tranship_types::{Mode, Outcome};

const MOVES: usize = 10;
/// The seed of a run that is given none: the same in each `make test`.
const SEED: u64 = 11;
const NODES: [&str; 3] = ["a", "b", "c"];
const CROWD: usize = 8;
const KEYS: u64 = 2000;
/// When something happens to a move, from its beginning: a move takes about so long.
const SPREAD_MS: u64 = 900;
/// For how long an agent is not there.
const OUTAGE_MS: u64 = 800;
/// For how long a move may freeze by default.
const FREEZE: Duration = Duration::from_secs(10);
/// How long the end of a move may take when its command has returned.
const OVER: Duration = Duration::from_secs(20);

/// splitmix64
struct Chance(u64);

impl Chance {
    fn draw(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    }

    fn millis(&mut self, below: u64) -> Duration {
        Duration::from_millis(self.draw(below as usize) as u64)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.draw(all.len())]
    }

    /// Some other node.
    fn other(&mut self, than: &str) -> &'static str {
        let others: Vec<_> = NODES.into_iter().filter(|node| *node != than).collect();
        self.of(&others)
    }
}

struct Member {
    name: String,
    at: &'static str,
    counter: CounterClient,
    redis: Redis,
    /// Number of keys, and their checksum.
    truth: (u64, String),
}

/// A move that is asked for.
#[derive(Debug, Clone, Copy)]
struct Wish {
    member: usize,
    from: &'static str,
    to: &'static str,
    mode: Mode,
    /// Its pages follow slowly.
    slow: bool,
}

/// What happens beside the moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mishap {
    None,
    KillAgent(&'static str),
    /// A process of this kind on this node.
    Kill(&'static str, &'static str),
    /// The move of this member.
    Cancel(usize),
    /// As soon as this member runs elsewhere it is asked to move on.
    MoveOn(usize, &'static str),
}

#[derive(Debug)]
struct Round {
    kind: &'static str,
    wishes: Vec<Wish>,
    mishap: Mishap,
    after: Duration,
    outage: Duration,
}

/// For how long a container may be frozen: longer than by default where the machine has other work.
fn freeze_limit() -> String {
    format!("{}s", patience(FREEZE).as_secs())
}

fn draw(chance: &mut Chance, members: &[Member], number: usize) -> Round {
    let wish = |chance: &mut Chance, member: usize| {
        let from = members[member].at;
        Wish { member, from, to: chance.other(from), mode: chance.of(&MODES), slow: false }
    };
    let first = chance.draw(CROWD);
    // In `make test` every kind has its turn.
    let kind = ["one", "twice", "opposite", "chain", "one", "one", "crowd", "opposite", "twice", "chain"][number % 10];
    let mut wishes = vec![wish(chance, first)];
    let (from, to) = (wishes[0].from, wishes[0].to);
    match kind {
        "twice" => {
            let to = if chance.draw(2) == 0 { to } else { chance.other(from) };
            wishes.push(Wish { to, ..wishes[0] });
        }
        "opposite" => {
            // Where nobody is there to come the other way, another one goes the same way.
            let back = (0..CROWD).find(|m| *m != first && members[*m].at == to);
            let second = back.unwrap_or((first + 1) % CROWD);
            let to = if back.is_some() { from } else { chance.other(members[second].at) };
            wishes.push(Wish { member: second, from: members[second].at, to, mode: chance.of(&MODES), slow: false });
        }
        "crowd" => wishes = (0..CROWD).map(|member| wish(chance, member)).collect(),
        "chain" => (wishes[0].mode, wishes[0].slow) = (Mode::Postcopy, true),
        _ => {}
    }
    let node = chance.of(&[from, to]);
    let mishap = match chance.draw(6) {
        _ if kind == "chain" => Mishap::MoveOn(first, chance.other(to)),
        0 => Mishap::KillAgent(node),
        // A criu that is killed in the middle of a dump has the connections in repair mode: so on the destination only.
        1 => Mishap::Kill(chance.of(&["criu", "pager", "keeper", "front"]), to),
        2 => Mishap::Kill("front", from),
        3 => Mishap::Cancel(first),
        _ => Mishap::None,
    };
    Round { kind, wishes, mishap, after: chance.millis(SPREAD_MS), outage: chance.millis(OUTAGE_MS) }
}

impl Round {
    fn play(&self, lab: &Lab, lives: &Lives, members: &mut [Member]) -> Result<String> {
        let begun = Instant::now();
        let mut moves = Vec::new();
        for wish in &self.wishes {
            let limit = freeze_limit();
            let slow: &[&str] = if wish.slow { &["--bandwidth", "20mbit", "--compress", "off"] } else { &[] };
            let options = [&["--freeze-timeout", &limit], slow].concat();
            let name = &members[wish.member].name;
            moves.push((*wish, Moving::begin_with(lab, name, wish.from, wish.to, wish.mode, &options)?));
        }
        // The passing of time is what this is about.
        while begun.elapsed() < self.after && moves[0].1.goes_on()? {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(more) = self.befall(lab, members, &mut moves[0].1)? {
            let name = &members[more.member].name;
            let limit = ["--freeze-timeout", &freeze_limit()];
            moves.push((more, Moving::begin_with(lab, name, more.from, more.to, more.mode, &limit)?));
        }
        let mut ended = Vec::new();
        for (wish, moving) in moves {
            ended.push((wish, moving.end().with_context(|| format!("{wish:?}"))?));
        }
        // While its last pages follow, it is not moved on; then it is.
        if let (Mishap::MoveOn(..), [(first, there), (more, refused)]) = (self.mishap, ended.as_slice())
            && there.success
            && !refused.success
        {
            ensure!(
                refused.report.is_none() && refused.error().contains("is being moved already"),
                "{more:?}: {refused:?}"
            );
            let name = &members[first.member].name;
            wait_until("the first move to be over", OVER, || {
                let text = lab.check(more.from, &["tranship", "status", "--json"])?;
                Ok((!text.contains(&format!("\"{name}\""))).then_some(()))
            })?;
            let limit = ["--freeze-timeout", &freeze_limit()];
            let again = Moving::begin_with(lab, name, more.from, more.to, more.mode, &limit)?.end()?;
            ensure!(again.success, "{more:?}: {}", again.error());
            let more = *more;
            ended.push((more, again));
        }
        let mut told = Vec::new();
        let mut involved: Vec<usize> = ended.iter().map(|(wish, _)| wish.member).collect();
        involved.dedup();
        for number in involved {
            let own: Vec<_> = ended.iter().filter(|(wish, _)| wish.member == number).collect();
            told.push(self.check(lab, &mut members[number], &own)?);
            lives.check(&number.to_string()).with_context(|| members[number].name.clone())?;
        }
        Ok(format!("{} in {:.1} s", told.join(", "), begun.elapsed().as_secs_f64()))
    }

    /// Lets the mishap happen; the move that it asks for.
    fn befall(&self, lab: &Lab, members: &[Member], first: &mut Moving) -> Result<Option<Wish>> {
        match self.mishap {
            Mishap::None => {}
            Mishap::KillAgent(node) => {
                let agent = lab.agent_pid(node)?.context("there is no agent to be killed")?;
                send(Signal::SIGKILL, agent)?;
                wait_until("the agent to die", Duration::from_secs(5), || Ok(is_gone(agent).then_some(())))?;
                std::thread::sleep(self.outage);
                lab.start_agent(node, &[])?;
            }
            Mishap::Kill(kind, node) => {
                while first.goes_on()? {
                    if let Some(victim) = processes(lab, node)?.into_iter().find(|p| p.kind == kind) {
                        send(Signal::SIGKILL, victim.pid)?;
                        break;
                    }
                }
            }
            Mishap::Cancel(member) => {
                let Member { name, at, .. } = &members[member];
                let output = lab.exec(at, &["timeout", "30", "tranship", "cancel", name, "--json"])?;
                ensure!(output.status.code() != Some(124), "cancel does not return");
            }
            Mishap::MoveOn(member, to) => {
                let from = self.wishes[0].to;
                let name = &members[member].name;
                while first.goes_on()? {
                    let state = lab.exec(from, &["runc", "state", name])?;
                    if String::from_utf8_lossy(&state.stdout).contains("\"running\"") {
                        return Ok(Some(Wish { member, from, to, mode: Mode::Hybrid, slow: false }));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Where a container is now is where what was said of its moves leads.
    fn check(&self, lab: &Lab, member: &mut Member, ended: &[&(Wish, Ended)]) -> Result<String> {
        let at = quiet(lab, &member.name).with_context(|| member.name.clone())?;
        let at = NODES.into_iter().find(|node| *node == at).context("an unknown node")?;
        let mut expected = member.at;
        for (wish, end) in ended {
            let moved = end.report.as_ref().map(|report| report.outcome == Outcome::Moved);
            ensure!(moved.is_none_or(|moved| moved == end.success), "{wish:?}: {end:?}");
            if end.success {
                ensure!(
                    wish.from == expected,
                    "{} was moved from {} and was on {expected}: {end:?}",
                    member.name,
                    wish.from
                );
                expected = wish.to;
            } else if self.mishap == Mishap::None && self.wishes.iter().filter(|w| w.member == wish.member).count() == 1
            {
                bail!("a move without a mishap failed: {wish:?}: {}", end.error());
            } else {
                eprintln!("    {wish:?}: {}", end.error());
            }
        }
        ensure!(at == expected, "{} is on {at}, not on {expected}: {ended:?}", member.name);
        member.at = at;
        connection_alive(&mut member.counter).with_context(|| member.name.clone())?;
        Ok(format!("{} on {at}", member.name))
    }
}

fn start(lab: &Lab, lives: &Lives, number: usize) -> Result<Member> {
    let (name, ip) = (format!("soak-{number}"), Ipv4Addr::new(10, 77, 0, 110 + number as u8));
    let at = NODES[number % NODES.len()];
    lab.run(at, &name, &RunOptions::new(ip, lives.redis(&number.to_string())))?;
    let mut redis = Redis::connect(lab, ip, Duration::from_secs(10))?;
    redis.populate(KEYS, "key", 100)?;
    let truth = redis.verify_without("counter")?;
    let counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_millis(5))?;
    Ok(Member { name, at, counter, redis, truth })
}

fn moves_of_all_kinds_under_kills_and_cancels(stage: &mut Stage) -> Result<()> {
    let seed = asked("TRANSHIP_SEED", |text| text.parse().ok())?.unwrap_or(SEED);
    let wanted = asked("TRANSHIP_MOVES", |text| text.parse().ok())?.unwrap_or(MOVES);
    // Two labs cannot be up at a time, and dropping the old one would take down the new one.
    let old = std::mem::replace(&mut stage.lab, Lab::attach()?);
    old.down()?;
    let options = UpOptions { nodes: NODES.len(), wait: Duration::from_secs(60), ..UpOptions::default() };
    stage.lab = Lab::up(&options)?;
    let lab = &stage.lab;
    let lives = Lives::watch()?;
    let mut members: Vec<_> = (0..CROWD).map(|number| start(lab, &lives, number)).collect::<Result<_>>()?;
    let (mut chance, mut done, mut number) = (Chance(seed), 0, 0);
    eprintln!("TRANSHIP_SEED={seed} TRANSHIP_MOVES={wanted}");
    while done < wanted {
        let round = draw(&mut chance, &members, number);
        (done, number) = (done + round.wishes.len(), number + 1);
        let what = format!(
            "round {number}, move {done} of {wanted}: {}, {:?} after {:?}",
            round.kind, round.mishap, round.after
        );
        let how = round
            .play(lab, &lives, &mut members)
            .with_context(|| format!("{what}; {round:?}; TRANSHIP_SEED={seed}"))?;
        eprintln!("{what}: {how}");
    }
    for (number, mut member) in members.into_iter().enumerate() {
        lives.check(&number.to_string()).with_context(|| member.name.clone())?;
        ensure!(quiet(lab, &member.name)? == member.at, "{} is not on {}", member.name, member.at);
        member.counter.pause()?;
        let now = member.redis.verify_without("counter").context("on the connection that was idle")?;
        ensure!(now == member.truth, "keys and checksum of {} were {:?} and are {now:?}", member.name, member.truth);
        member.counter.resume()?;
        let last = member.counter.stop()?;
        ensure!(last.error.is_none() && last.same_connection, "{}: {last:?}", member.name);
        remove(lab, &member.name)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[("moves_of_all_kinds_under_kills_and_cancels", moves_of_all_kinds_under_kills_and_cancels)])
}
