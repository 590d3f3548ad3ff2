//! Memory of kinds that few programs have is as it was after a move in any mode, or the move is refused by name before the freeze.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tranship_e2e::{
    Guest, Moving, Stage, asked, copies, exactly_one_runs, move_with, nothing_left, processes, quiet, refused_move,
    remove, scenarios, send, state,
};
use tranship_lab::{Lab, RunOptions, find_program};
use tranship_types::Mode;

const NAME: &str = "kinds";
const PORT: u16 = 7003;
/// How often a process of the pager is killed in one move.
const KILLS: usize = 25;
/// How often a move may fail because the first kill was before the decision.
const TRIES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);

fn run(lab: &Lab, kinds: &[&str], host: u8) -> Result<Guest> {
    let ip = Ipv4Addr::new(10, 77, 0, host);
    let mut options = RunOptions::new(ip, [&["/opt/memory-kinds"], kinds].concat());
    options.binds.push((find_program("memory-kinds")?, "/opt/memory-kinds".into()));
    lab.run("a", NAME, &options)?;
    Guest::connect(lab, ip, PORT)
}

/// Lines that were said after all that had been said until now.
fn goes_on(guest: &mut Guest) -> Result<()> {
    guest.lines(PATIENCE)?;
    for _ in 0..20 {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
    }
    Ok(())
}

/// Moves it to the other node in each mode.
fn right_in_every_mode(lab: &Lab, guest: &mut Guest) -> Result<()> {
    goes_on(guest).context("before the first move")?;
    for mode in ["auto", "cold", "precopy", "postcopy", "hybrid"] {
        let from = exactly_one_runs(lab, NAME)?;
        let to = if from == "a" { "b" } else { "a" };
        let report = move_with(lab, &from, NAME, to, &["--mode", mode]).with_context(|| format!("mode {mode}"))?;
        goes_on(guest).with_context(|| format!("after a move in mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
        nothing_left(lab, &from, NAME)?;
        eprintln!("mode {mode}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
    }
    Ok(())
}

fn guard_pages_stay_guards_in_every_mode(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let kinds = ["guard-anon", "guard-shared", "guard-file", "guard-file-shared", "guard-memfd"];
    let mut guest = run(lab, &kinds, 61)?;
    right_in_every_mode(lab, &mut guest)?;
    remove(lab, NAME)
}

fn pages_that_were_guards_are_zeros_though_their_content_comes_later(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, &["guards-for-a-moment"], 67)?;
    goes_on(&mut guest).context("before the first move")?;
    for (mode, from, to) in [("postcopy", "a", "b"), ("hybrid", "b", "a"), ("precopy", "a", "b")] {
        let options = ["--mode", mode, "--bandwidth", "100mbit"];
        move_with(lab, from, NAME, to, &options).with_context(|| format!("mode {mode}"))?;
        goes_on(&mut guest).with_context(|| format!("after a move in mode {mode}"))?;
        nothing_left(lab, from, NAME)?;
    }
    remove(lab, NAME)
}

fn a_mapping_that_is_protected_in_part_stays_one_mapping(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, &["part-protected"], 66)?;
    right_in_every_mode(lab, &mut guest)?;
    remove(lab, NAME)
}

fn memory_that_cannot_be_read_is_refused_by_name(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, &["poisoned"], 62)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(
        refusal.sentence.contains("memory-kinds (pid ") && refusal.sentence.contains("cannot be read"),
        "{}",
        refusal.sentence
    );
    goes_on(&mut guest)?;
    remove(lab, NAME)
}

/// Kills the pager or its keeper where both are alive: whether they were.
fn kill_one(lab: &Lab, node: &str, kind: &str) -> Result<bool> {
    let helpers = processes(lab, node)?;
    let one = |kind: &str| helpers.iter().find(|helper| helper.kind == kind && state(helper.pid) != Some('Z'));
    match (one(kind), ["pager", "keeper"].iter().all(|kind| one(kind).is_some())) {
        (Some(victim), true) => send(Signal::SIGKILL, victim.pid).map(|()| true),
        _ => Ok(false),
    }
}

/// Kills processes of these kinds in turn while the container is moved. Returns how many, or none where one of the first
/// kills was before the decision and the move has failed, which is undone then.
fn moved_under_kills(lab: &Lab, guest: &mut Guest, from: &str, to: &str, kinds: [&str; 2]) -> Result<Option<usize>> {
    let mut moving = Moving::begin_with(lab, NAME, from, to, Mode::Postcopy, &["--bandwidth", "64mbit"])?;
    let (mut kills, mut pause) = (0, 7);
    let deadline = Instant::now() + PATIENCE / 2;
    while kills < KILLS && Instant::now() < deadline && moving.goes_on()? {
        kills += usize::from(kill_one(lab, to, kinds[kills % 2])?);
        // Now soon after the last one has taken over, now later.
        pause = pause * 31 % 257;
        std::thread::sleep(Duration::from_millis(pause));
    }
    let ended = moving.end()?;
    let at = exactly_one_runs(lab, NAME)?;
    ended.fits(from, to, &at).with_context(|| ended.error().to_owned())?;
    if at == to {
        return Ok(Some(kills));
    }
    goes_on(guest).with_context(|| format!("after a move that failed: {}", ended.error()))?;
    nothing_left(lab, to, NAME)?;
    Ok(None)
}

/// A program checks and writes its memory, forks and moves mappings while its pages follow it over a slow link; meanwhile the process that
/// supplies them is killed, again and again, or the one that keeps its descriptors.
fn nobody_reads_zeros_whichever_process_of_the_pager_is_killed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut guest = run(lab, &["forks"], 63)?;
    goes_on(&mut guest).context("before the first move")?;
    for (round, kinds) in [["pager", "pager"], ["keeper", "keeper"], ["pager", "keeper"]].into_iter().enumerate() {
        let (from, to) = if round % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let kills = (0..TRIES).find_map(|_| moved_under_kills(lab, &mut guest, from, to, kinds).transpose());
        let kills = kills.with_context(|| format!("{TRIES} moves failed before the decision"))??;
        ensure!(kills > 5, "there were {kills} kills only");
        goes_on(&mut guest).with_context(|| format!("after {kills} kills of {kinds:?}"))?;
        nothing_left(lab, from, NAME)?;
        eprintln!("{kills} kills of {kinds:?}: no zeros, and every page has come");
    }
    ensure!(quiet(lab, NAME)? == "b", "{NAME} is not on b");
    remove(lab, NAME)
}

/// Reserved huge pages, more than there were, until it is dropped.
struct Reserved(u64);

impl Reserved {
    const SETTING: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn change(by: i64) -> Result<()> {
        let now: u64 = std::fs::read_to_string(Self::SETTING)?.trim().parse()?;
        let wanted = now.saturating_add_signed(by);
        std::fs::write(Self::SETTING, wanted.to_string())?;
        let got: u64 = std::fs::read_to_string(Self::SETTING)?.trim().parse()?;
        ensure!(by < 0 || got >= wanted, "the machine has only {got} of {wanted} huge pages");
        Ok(())
    }

    fn take(pages: u64) -> Result<Self> {
        let reserved = Self(pages);
        Self::change(pages.cast_signed())?;
        Ok(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = Self::change(-self.0.cast_signed());
    }
}

/// The memory in reserved huge pages of all the container's processes, in kB.
fn huge_kib(lab: &Lab) -> Result<u64> {
    let mut all = 0;
    for pid in copies(lab, NAME)?.into_iter().flat_map(|copy| copy.pids) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let value = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:")?.trim().strip_suffix(" kB"));
        all += value.context("no HugetlbPages")?.parse::<u64>()?;
    }
    Ok(all)
}

/// Each kind by itself, in each mode: written all the time, and most of it is on the destination before the freeze. `TRANSHIP_HUGE_PAGES=64` takes so
/// many huge pages instead of 8.
fn huge_pages_move_in_rounds(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let pages: u64 = asked("TRANSHIP_HUGE_PAGES", |text| text.parse().ok())?.unwrap_or(8);
    let bytes = pages * (2 << 20);
    let reserved = Reserved::take(2 * pages)?;
    for kind in ["huge-private", "huge-shared", "huge-memfd", "huge-segment", "huge-grown", "huge-changed"] {
        let mut guest = run(lab, &[&format!("{kind}:{pages}")], 68)?;
        goes_on(&mut guest)?;
        for mode in ["auto", "cold", "precopy", "postcopy", "hybrid"] {
            let from = exactly_one_runs(lab, NAME)?;
            let to = if from == "a" { "b" } else { "a" };
            let report = move_with(lab, &from, NAME, to, &["--mode", mode])?;
            goes_on(&mut guest).with_context(|| format!("{kind} after a move in mode {mode}"))?;
            nothing_left(lab, &from, NAME)?;
            let (images, frozen) = (report.skeleton_bytes, report.frozen_bytes);
            eprintln!(
                "{kind}, {mode}: blackout {:.0} ms, {frozen} bytes frozen, {images} of images",
                report.blackout_ms.unwrap_or_default()
            );
            ensure!(images < bytes / 3, "{kind}, mode {mode}: {images} bytes of images");
            let ahead = mode != "cold";
            ensure!(!ahead || frozen < bytes / 3, "{kind}, mode {mode}: {frozen} bytes were sent in the freeze");
        }
        drop(guest);
        remove(lab, NAME)?;
    }
    drop(reserved);
    Ok(())
}

fn huge_pages_are_counted_and_move_in_every_mode(stage: &mut Stage) -> Result<()> {
    const KINDS: [&str; 4] = ["huge-private", "huge-shared", "huge-memfd", "huge-segment"];
    const PAGES: u64 = 8 * KINDS.len() as u64;
    let lab = &stage.lab;
    let here = Reserved::take(PAGES)?;
    let mut guest = run(lab, &KINDS, 63)?;
    goes_on(&mut guest)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.sentence.contains(&format!("memory in {PAGES} huge pages of 2048 kB")), "{}", refusal.sentence);
    goes_on(&mut guest).context("after the refusal")?;
    let there = Reserved::take(PAGES)?;
    right_in_every_mode(lab, &mut guest)?;
    ensure!(huge_kib(lab)? == PAGES * 2048, "{} kB are in huge pages after all moves", huge_kib(lab)?);
    drop(guest);
    remove(lab, NAME)?;
    drop((here, there));
    Ok(())
}

/// What is forked counts twice, since it is after a restore; what is not reserved counts as far as it is there.
fn huge_pages_that_are_forked_or_not_reserved_are_counted(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let here = Reserved::take(8 + 2)?;
    let mut guest = run(lab, &["huge-forked", "huge-unreserved"], 69)?;
    goes_on(&mut guest)?;
    let refusal = refused_move(lab, "a", NAME, "b")?;
    ensure!(refusal.sentence.contains("memory in 18 huge pages of 2048 kB"), "{}", refusal.sentence);
    let there = Reserved::take(18)?;
    move_with(lab, "a", NAME, "b", &[])?;
    goes_on(&mut guest).context("after the move")?;
    nothing_left(lab, "a", NAME)?;
    remove(lab, NAME)?;
    drop((here, there));
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("guard_pages_stay_guards_in_every_mode", guard_pages_stay_guards_in_every_mode),
        (
            "a_mapping_that_is_protected_in_part_stays_one_mapping",
            a_mapping_that_is_protected_in_part_stays_one_mapping,
        ),
        (
            "pages_that_were_guards_are_zeros_though_their_content_comes_later",
            pages_that_were_guards_are_zeros_though_their_content_comes_later,
        ),
        (
            "nobody_reads_zeros_whichever_process_of_the_pager_is_killed",
            nobody_reads_zeros_whichever_process_of_the_pager_is_killed,
        ),
        ("huge_pages_move_in_rounds", huge_pages_move_in_rounds),
        (
            "huge_pages_that_are_forked_or_not_reserved_are_counted",
            huge_pages_that_are_forked_or_not_reserved_are_counted,
        ),
        ("huge_pages_are_counted_and_move_in_every_mode", huge_pages_are_counted_and_move_in_every_mode),
        ("memory_that_cannot_be_read_is_refused_by_name", memory_that_cannot_be_read_is_refused_by_name),
    ])
}
