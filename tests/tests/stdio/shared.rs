//! Streams that others use, too: a socket of several processes, a file that is rotated, and what a
//! user opens again.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Stage, remove, restart_agent, wait_until};
use tranship_lab::RunOptions;

use super::{COUNT, Heard, NAME, PATIENCE, ended, is_counted, lines_of, moved, pipe, runs_with, sh, talker};

/// All processes of a unit have one socket of the journal.
pub fn a_socket_outlives_the_container(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (ours, theirs) = UnixStream::pair()?;
    let mut other = theirs.try_clone()?;
    runs_with(lab, COUNT, &theirs.into())?;
    let heard = Heard::by(ours);
    heard.goes_on(10)?;
    moved(lab, "a", "b")?;
    heard.goes_on(50)?;
    ended(lab, "b")?;
    writeln!(other, "still here").context("the socket was shut down")?;
    heard.waits_for("still here")?;
    drop(other);
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 2])
}

pub fn a_removed_file_goes_on_under_its_name(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let path = lab.path("a", "/srv/gone.log")?;
    let mut file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path)?;
    let output: OwnedFd = file.try_clone()?.into();
    lab.run_with("a", NAME, &sh(COUNT), [Stdio::null(), output.into(), Stdio::null()])?;
    fs::remove_file(&path)?;
    let report = moved(lab, "a", "b")?;
    ensure!(report.ways.iter().any(|way| way.contains("has no name any more")), "{:?}", report.ways);
    let there = || lines_of(lab, "b", "/srv/gone.log").unwrap_or_default();
    wait_until("output under the name", PATIENCE, || Ok((there().len() > 30).then_some(())))?;
    lab.check("b", &["runc", "kill", NAME, "KILL"])?;
    let mut before = String::new();
    file.rewind()?;
    file.read_to_string(&mut before)?;
    let before = before.lines().map(str::to_owned);
    is_counted(&before.chain(there()).collect::<Vec<_>>())?;
    fs::remove_file(lab.path("b", "/srv/gone.log")?)?;
    remove(lab, NAME)
}

/// They may wait for a slow disk for longer than agents wait for an answer.
pub fn holders_that_do_not_answer_are_not_dead(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let heard = talker(lab, COUNT)?;
    moved(lab, "a", "b")?;
    heard.goes_on(20)?;
    let signal = |signal: &str| -> Result<()> {
        for (node, kind) in [("a", "out"), ("b", "in")] {
            let holders = format!("kill -{signal} $(cut -d ' ' -f 1 /run/tranship/stdio/*.{kind}/pid)");
            lab.check(node, &["sh", "-c", &holders])?;
        }
        Ok(())
    };
    signal("STOP")?;
    restart_agent(lab, "b", "")?;
    std::thread::sleep(Duration::from_secs(8));
    signal("CONT")?;
    heard.goes_on(50)?;
    ended(lab, "b")?;
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])
}

/// runc gives a container's streams to its user, who opens them again under their names.
pub fn a_user_opens_stdout_again(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let script = "i=0; while :; do i=$((i+1)); echo $i > /proc/self/fd/1 || exit 1; done";
    let as_user = RunOptions { user: (1000, 1000), ..sh(script) };
    let (hear, output) = pipe()?;
    lab.run_with("a", NAME, &as_user, [Stdio::null(), output.into(), Stdio::null()])?;
    let heard = Heard::by(File::from(hear));
    heard.goes_on(10)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        moved(lab, from, to)?;
        heard.goes_on(50).with_context(|| format!("on {to}"))?;
    }
    ended(lab, "a")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])?;

    let path = |node: &str| lab.path(node, "/srv/user.log");
    let output = OpenOptions::new().create(true).append(true).open(path("a")?)?;
    let script = COUNT.replace("echo $i", "echo $i >> /proc/self/fd/1");
    lab.run_with(
        "a",
        NAME,
        &RunOptions { user: (1000, 1000), ..sh(&script) },
        [Stdio::null(), output.into(), Stdio::null()],
    )?;
    moved(lab, "a", "b")?;
    let grown = || Ok((lines_of(lab, "b", "/srv/user.log").unwrap_or_default().len() > 30).then_some(()));
    wait_until("output of the user", PATIENCE, grown)?;
    let made = fs::metadata(path("b")?)?;
    ensure!(made.uid() == 1000 && made.mode() & 0o777 == fs::metadata(path("a")?)?.mode() & 0o777, "{made:?}");
    [path("a")?, path("b")?].iter().try_for_each(fs::remove_file)?;
    remove(lab, NAME)
}
