//! Standard streams of bare runc containers that lead to files, pipes, sockets and terminals of the
//! node go on after moves: not a byte is lost or doubled, and none changes places.

mod foreground;
mod shared;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{
    Stage, exactly_one_runs, is_gone, move_container, move_with, nothing_left, refused_move_with, remove,
    restart_agent, scenarios, wait_until,
};
use tranship_lab::{Lab, RunOptions};
use tranship_types::Report;

const NAME: &str = "talker";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 21);
const PATIENCE: Duration = Duration::from_secs(30);
/// Prints numbers without a pause that a person would notice.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done";

/// What a reader has read, line by line.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Heard {
    /// Reads until the end, on a thread of its own.
    fn by(from: impl Read + Send + 'static) -> Self {
        let heard = Self::default();
        let all = heard.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                all.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
            all.0.lock().unwrap_or_else(PoisonError::into_inner).push("END".to_owned());
        });
        heard
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has so many more lines.
    fn goes_on(&self, more: usize) -> Result<()> {
        let before = self.all().len();
        let grown = || Ok((self.all().len() >= before + more).then_some(()));
        wait_until("more output", PATIENCE, grown)
            .with_context(|| format!("it has {:?}", self.all().iter().rev().take(3).collect::<Vec<_>>()))
    }

    fn waits_for(&self, line: &str) -> Result<()> {
        wait_until(line, PATIENCE, || Ok(self.all().iter().any(|one| one == line).then_some(())))
            .with_context(|| format!("it has {:?}", self.all()))
    }
}

/// Checks that lines are the numbers from 1 on.
fn is_counted(lines: &[String]) -> Result<()> {
    ensure!(!lines.is_empty(), "there is no output");
    for (at, line) in lines.iter().enumerate() {
        ensure!(
            *line == (at + 1).to_string(),
            "line {} is {line:?}, behind {:?}",
            at + 1,
            &lines[at.saturating_sub(2)..at]
        );
    }
    Ok(())
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe()?)
}

fn sh(script: &str) -> RunOptions {
    RunOptions::new(IP, ["sh", "-c", script])
}

/// Starts a program whose output is read here.
fn talker(lab: &Lab, script: &str) -> Result<Heard> {
    let (reading, writing) = pipe()?;
    lab.run_with("a", NAME, &sh(script), [Stdio::null(), writing.into(), Stdio::null()])?;
    let heard = Heard::by(File::from(reading));
    heard.goes_on(10).context("before the first move")?;
    Ok(heard)
}

fn moved(lab: &Lab, from: &str, to: &str) -> Result<Report> {
    let report = move_container(lab, from, NAME, to).with_context(|| format!("{from} → {to}"))?;
    ensure!(exactly_one_runs(lab, NAME)? == to);
    nothing_left(lab, from, NAME)?;
    Ok(report)
}

/// Ends the program, and waits until no process holds anything of its streams.
fn ended(lab: &Lab, on: &str) -> Result<()> {
    lab.check(on, &["runc", "kill", NAME, "KILL"])?;
    for node in lab.nodes() {
        let directory = lab.path(&node, "/run/tranship/stdio")?;
        wait_until("holders to end", PATIENCE, || {
            let left: Vec<_> =
                fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
            Ok(left.is_empty().then_some(()))
        })
        .with_context(|| format!("on node {node}"))?;
    }
    remove(lab, NAME)
}

fn a_pipe_is_relayed_to_and_fro(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        let report = moved(lab, from, to)?;
        ensure!(report.ways.iter().any(|way| way.starts_with("stdio: stdout is relayed")), "{:?}", report.ways);
        heard.goes_on(50).with_context(|| format!("on {to}"))?;
    }
    ended(lab, "b")?;
    let mut all = heard.all();
    ensure!(all.pop().as_deref() == Some("END"), "the reader has no end");
    is_counted(&all)
}

fn input_and_errors_are_relayed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ((input, say), (hear, output), (complaints, errors)) = (pipe()?, pipe()?, pipe()?);
    let mut say = File::from(say);
    let script = "while read line; do echo \"$line\"; echo \"not $line\" >&2; done; echo over";
    lab.run_with("a", NAME, &sh(script), [input.into(), output.into(), errors.into()])?;
    let (heard, complaints) = (Heard::by(File::from(hear)), Heard::by(File::from(complaints)));
    let mut number = 0;
    let mut talk = |say: &mut File| -> Result<()> {
        for _ in 0..200 {
            number += 1;
            writeln!(say, "{number}")?;
        }
        heard.waits_for(&number.to_string())
    };
    talk(&mut say)?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        moved(lab, from, to)?;
        talk(&mut say).with_context(|| format!("on {to}"))?;
    }
    drop(say);
    heard.waits_for("over").context("the end of the input")?;
    heard.waits_for("END")?;
    is_counted(&heard.all()[..800])?;
    complaints.waits_for("not 800")?;
    remove(lab, NAME)
}

fn a_fifo_is_relayed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let path = lab.path("a", "/srv/fifo")?;
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600))?;
    let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
    let writer = OpenOptions::new().write(true).open(&path)?;
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()))?;
    lab.run_with("a", NAME, &sh(COUNT), [Stdio::null(), writer.into(), Stdio::null()])?;
    let heard = Heard::by(reader);
    heard.goes_on(10)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moved(lab, from, to)?;
        heard.goes_on(50).with_context(|| format!("on {to}"))?;
    }
    ended(lab, "a")?;
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])
}

fn lines_of(lab: &Lab, node: &str, path: &str) -> Result<Vec<String>> {
    Ok(fs::read_to_string(lab.path(node, path)?)?.lines().map(str::to_owned).collect())
}

/// Each node's own file goes on at its end.
fn a_file_goes_on_under_the_same_name(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let grows = |node: &str| {
        let before = lines_of(lab, node, "/srv/out.log").unwrap_or_default().len();
        wait_until("more output", PATIENCE, || {
            Ok((lines_of(lab, node, "/srv/out.log").unwrap_or_default().len() > before + 30).then_some(()))
        })
        .with_context(|| format!("on {node}"))
    };
    let output = OpenOptions::new().create(true).write(true).truncate(true).open(lab.path("a", "/srv/out.log")?)?;
    lab.run_with("a", NAME, &sh(COUNT), [Stdio::null(), output.try_clone()?.into(), output.into()])?;
    grows("a")?;
    moved(lab, "a", "b")?;
    let on_a = lines_of(lab, "a", "/srv/out.log")?;
    grows("b")?;
    moved(lab, "b", "a")?;
    let on_b = lines_of(lab, "b", "/srv/out.log")?;
    grows("a")?;
    lab.check("a", &["runc", "kill", NAME, "KILL"])?;
    let all = lines_of(lab, "a", "/srv/out.log")?;
    ensure!(all.starts_with(&on_a), "what was there is not there any more");
    let in_order: Vec<String> = on_a.iter().chain(&on_b).chain(&all[on_a.len()..]).cloned().collect();
    is_counted(&in_order)?;
    remove(lab, NAME)
}

/// A file that both nodes see is gone on with in the same place.
fn a_shared_file_goes_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let directory = tempfile_in_target()?;
    let path = directory.join("shared.log");
    let output = File::create(&path)?;
    lab.run_with("a", NAME, &sh(COUNT), [Stdio::null(), output.into(), Stdio::null()])?;
    let length = || -> Result<usize> { Ok(fs::read_to_string(&path)?.lines().count()) };
    for (from, to) in [("a", "b"), ("b", "a")] {
        let before = length()?;
        moved(lab, from, to)?;
        wait_until("more output", PATIENCE, || Ok((length()? > before + 30).then_some(())))?;
    }
    lab.check("a", &["runc", "kill", NAME, "KILL"])?;
    let all: Vec<String> = fs::read_to_string(&path)?.lines().map(str::to_owned).collect();
    fs::remove_dir_all(&directory)?;
    is_counted(&all)?;
    remove(lab, NAME)
}

fn tempfile_in_target() -> Result<std::path::PathBuf> {
    let program = std::env::current_exe()?;
    let directory = program.with_file_name(format!("stdio-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    Ok(directory)
}

fn output_goes_where_the_user_wants_it(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    move_with(lab, "a", NAME, "b", &["--stdio", "file:/srv/own.log"])?;
    heard.waits_for("END")?;
    let grown = || Ok((lines_of(lab, "b", "/srv/own.log").unwrap_or_default().len() > 30).then_some(()));
    wait_until("output in the file", PATIENCE, grown)?;
    move_with(lab, "b", NAME, "a", &["--stdio", "null"])?;
    let heard = heard.all();
    let there = lines_of(lab, "b", "/srv/own.log")?;
    is_counted(&heard[..heard.len() - 1].iter().chain(&there).cloned().collect::<Vec<_>>())?;
    moved(lab, "a", "b")?;
    ended(lab, "b")
}

fn a_missing_directory_is_refused(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    fs::create_dir_all(lab.path("a", "/srv/only-here")?)?;
    let output = File::create(lab.path("a", "/srv/only-here/out.log")?)?;
    lab.run_with("a", NAME, &sh(COUNT), [Stdio::null(), output.into(), Stdio::null()])?;
    let refusal = refused_move_with(lab, "a", NAME, "b", &[])?;
    ensure!(refusal.text.contains("/srv/only-here/out.log cannot be made"), "{}", refusal.text);
    let refusal = refused_move_with(lab, "a", NAME, "b", &["--stdio", "journal"])?;
    ensure!(refusal.text.contains("has no journal"), "{}", refusal.text);
    let refusal = refused_move_with(lab, "a", NAME, "b", &["--stdio", "file:/srv/none/x"])?;
    ensure!(refusal.text.contains("/srv/none/x cannot be made"), "{}", refusal.text);
    move_with(lab, "a", NAME, "b", &["--stdio", "null"])?;
    remove(lab, NAME)
}

fn agents_may_be_restarted(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    moved(lab, "a", "b")?;
    for node in ["a", "b", "a", "b"] {
        heard.goes_on(20)?;
        restart_agent(lab, node, "")?;
    }
    heard.goes_on(50)?;
    moved(lab, "b", "a")?;
    heard.goes_on(50)?;
    ended(lab, "a")?;
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])
}

fn a_move_that_fails_changes_nothing(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    for fault in ["destination.restore.after.error", "source.transfer.after.error", "destination.engine.after.error"] {
        let node = if fault.starts_with("source") { "a" } else { "b" };
        restart_agent(lab, node, fault)?;
        ensure!(move_container(lab, "a", NAME, "b").is_err(), "{fault}");
        heard.goes_on(50).context(fault)?;
        restart_agent(lab, node, "")?;
    }
    moved(lab, "a", "b")?;
    heard.goes_on(50)?;
    ended(lab, "b")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])
}

/// An agent that dies in the middle of a move, and is started again, neither loses nor doubles a
/// line.
fn agents_may_die_in_a_move(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    let mut from = "a".to_owned();
    for place in [
        "source.transfer.after",
        "source.drain.before",
        "source.release.before",
        "destination.restore.after",
        "destination.resume.after",
    ] {
        let to = if from == "a" { "b" } else { "a" };
        let dies = if place.starts_with("source") { from.as_str() } else { to };
        restart_agent(lab, dies, &format!("{place}.die"))?;
        let agent = lab.agent_pid(dies)?.context("there is no agent")?;
        let mut moving = lab.move_command(&from, NAME, to)?.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(()))).context(place)?;
        restart_agent(lab, dies, "")?;
        moving.wait()?;
        heard.goes_on(50).context(place)?;
        let settled = || {
            let moves = lab.check(&from, &["tranship", "status"])?;
            Ok(moves.contains("no move is under way").then(|| exactly_one_runs(lab, NAME).ok()).flatten())
        };
        from = wait_until("the move to end", PATIENCE, settled).context(place)?;
    }
    heard.goes_on(50)?;
    ended(lab, &from)?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])
}

/// Programs that nobody listens to are told so, as before the move.
fn a_reader_that_goes_is_noticed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (reading, writing) = pipe()?;
    let script = "trap '' PIPE; while echo here; do sleep 0.01; done; touch /tmp/unheard; sleep 1000000";
    lab.run_with("a", NAME, &sh(script), [Stdio::null(), writing.into(), Stdio::null()])?;
    moved(lab, "a", "b")?;
    let mut some = [0; 5];
    File::from(reading.try_clone()?).read_exact(&mut some)?;
    drop(reading);
    let noticed =
        || Ok(lab.exec("b", &["runc", "exec", NAME, "test", "-e", "/tmp/unheard"])?.status.success().then_some(()));
    wait_until("the program to notice", PATIENCE, noticed)?;
    ended(lab, "b")
}

/// A reader that does not read stops the program, wherever that is, and loses nothing.
fn a_slow_reader_slows_the_program_down(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (reading, writing) = pipe()?;
    let script = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /tmp/at; done";
    lab.run_with("a", NAME, &sh(script), [Stdio::null(), writing.into(), Stdio::null()])?;
    let at = |node: &str| -> Result<u64> {
        let text = lab.check(node, &["runc", "exec", NAME, "cat", "/tmp/at"])?;
        Ok(text.trim().parse().unwrap_or_default())
    };
    // It stands when the count is the same twice.
    let stands = |node: &'static str| {
        let mut before = 0;
        wait_until("the program to wait", PATIENCE, || {
            std::thread::sleep(Duration::from_millis(300));
            let now = at(node)?;
            Ok((std::mem::replace(&mut before, now) == now && now > 0).then_some(now))
        })
    };
    let on_a = stands("a")?;
    moved(lab, "a", "b")?;
    let on_b = stands("b")?;
    ensure!(on_b > on_a && on_b < on_a + 500_000, "{on_a} lines were printed before the move, {on_b} behind it");
    let heard = Heard::by(File::from(reading));
    heard.waits_for(&(on_b + 10_000).to_string())?;
    lab.check("b", &["runc", "kill", NAME, "KILL"])?;
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 2])?;
    remove(lab, NAME)
}

/// Starts the program with one open file for all three streams.
fn runs_with(lab: &Lab, script: &str, all: &OwnedFd) -> Result<()> {
    let one = || -> Result<Stdio> { Ok(all.try_clone()?.into()) };
    Ok(lab.run_with("a", NAME, &sh(script), [one()?, one()?, one()?])?)
}

const ECHO: &str = "while read line; do echo \"$line\"; done";

/// Says numbers, and waits until the last one has come back.
fn talk(say: &mut impl Write, heard: &Heard, numbers: std::ops::Range<u32>) -> Result<()> {
    let last = numbers.end - 1;
    numbers.into_iter().try_for_each(|number| writeln!(say, "{number}"))?;
    heard.waits_for(&last.to_string())
}

fn a_socket_is_relayed_both_ways(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (mut ours, theirs) = UnixStream::pair()?;
    runs_with(lab, ECHO, &theirs.into())?;
    let heard = Heard::by(ours.try_clone()?);
    talk(&mut ours, &heard, 1..100)?;
    for (at, (from, to)) in (1u32..).zip([("a", "b"), ("b", "a"), ("a", "b")]) {
        moved(lab, from, to)?;
        talk(&mut ours, &heard, at * 100..at * 100 + 100).with_context(|| format!("on {to}"))?;
    }
    ours.shutdown(std::net::Shutdown::Write)?;
    heard.waits_for("END").context("the program does not see the end of its input")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])?;
    remove(lab, NAME)
}

fn output_to_a_terminal_goes_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let pty = nix::pty::openpty(None, None)?;
    runs_with(lab, COUNT, &pty.slave)?;
    let heard = Heard::by(File::from(pty.master));
    heard.goes_on(10)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moved(lab, from, to)?;
        heard.goes_on(50).with_context(|| format!("on {to}"))?;
    }
    let kind = lab.check("a", &["runc", "exec", NAME, "stat", "--dereference", "--format=%F", "/proc/1/fd/1"])?;
    ensure!(kind.trim() == "character special file", "stdout is a {kind}");
    ended(lab, "a")?;
    is_counted(&heard.all())
}

fn output_goes_to_the_journal(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let directory = lab.path("b", "/run/systemd/journal")?;
    fs::create_dir_all(&directory)?;
    let journal = UnixListener::bind(directory.join("stdout"))?;
    let heard = talker(lab, COUNT)?;
    move_with(lab, "a", NAME, "b", &["--stdio", "journal"])?;
    let journal = Heard::by(journal.accept()?.0);
    journal.goes_on(50)?;
    heard.waits_for("END")?;
    ended(lab, "b")?;
    journal.waits_for("END")?;
    let (heard, told) = (heard.all(), journal.all());
    ensure!(told[..7] == [NAME, "", "6", "0", "0", "0", "0"], "{:?}", &told[..7]);
    let lines = heard[..heard.len() - 1].iter().chain(&told[7..told.len() - 1]);
    is_counted(&lines.cloned().collect::<Vec<_>>())?;
    fs::remove_dir_all(&directory)?;
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_pipe_is_relayed_to_and_fro", a_pipe_is_relayed_to_and_fro),
        ("input_and_errors_are_relayed", input_and_errors_are_relayed),
        ("a_fifo_is_relayed", a_fifo_is_relayed),
        ("a_file_goes_on_under_the_same_name", a_file_goes_on_under_the_same_name),
        ("a_shared_file_goes_on", a_shared_file_goes_on),
        ("output_goes_where_the_user_wants_it", output_goes_where_the_user_wants_it),
        ("a_missing_directory_is_refused", a_missing_directory_is_refused),
        ("agents_may_be_restarted", agents_may_be_restarted),
        ("a_move_that_fails_changes_nothing", a_move_that_fails_changes_nothing),
        ("agents_may_die_in_a_move", agents_may_die_in_a_move),
        ("a_reader_that_goes_is_noticed", a_reader_that_goes_is_noticed),
        ("a_slow_reader_slows_the_program_down", a_slow_reader_slows_the_program_down),
        ("a_socket_is_relayed_both_ways", a_socket_is_relayed_both_ways),
        ("output_to_a_terminal_goes_on", output_to_a_terminal_goes_on),
        ("what_a_runtime_in_the_foreground_wrote_to_goes_on", foreground::what_it_wrote_to_goes_on),
        ("files_of_a_runtime_in_the_foreground_go_on", foreground::its_files_go_on),
        ("input_of_a_runtime_in_the_foreground_is_read_once", foreground::its_input_is_read_once),
        ("a_shell_has_its_terminal_back", foreground::its_shell_has_the_terminal_back),
        ("a_shared_socket_outlives_the_container", shared::a_socket_outlives_the_container),
        ("a_removed_file_goes_on_under_its_name", shared::a_removed_file_goes_on_under_its_name),
        ("a_user_opens_stdout_again", shared::a_user_opens_stdout_again),
        ("holders_that_do_not_answer_are_not_dead", shared::holders_that_do_not_answer_are_not_dead),
        ("output_goes_to_the_journal", output_goes_to_the_journal),
    ])
}
