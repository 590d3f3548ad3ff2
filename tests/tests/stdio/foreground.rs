//! `runc run` in the foreground passes on what its container reads and writes, and ends with it.
//! What it had open itself goes on.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, poll};
use tranship_e2e::{Stage, remove, wait_until};
use tranship_lab::Lab;

use super::{COUNT, ECHO, Heard, NAME, PATIENCE, ended, is_counted, lines_of, moved, pipe, sh, talk};

/// Starts `runc run` on node a, as a shell does.
fn runs(lab: &Lab, script: &str, [input, output]: [Stdio; 2]) -> Result<Child> {
    lab.run("a", NAME, &sh(script))?;
    lab.check("a", &["runc", "delete", "--force", NAME])?;
    let mut runc = lab.command("a", &["runc", "run", "--bundle", &format!("/run/containers/{NAME}"), NAME])?;
    Ok(runc.stdin(input).stdout(output).stderr(Stdio::null()).spawn()?)
}

pub fn what_it_wrote_to_goes_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let ((input, say), (hear, output)) = (pipe()?, pipe()?);
    let mut runc = runs(lab, ECHO, [input.into(), output.into()])?;
    let (mut say, heard) = (File::from(say), Heard::by(File::from(hear)));
    talk(&mut say, &heard, 1..100)?;
    for (at, (from, to)) in (1u32..).zip([("a", "b"), ("b", "a")]) {
        moved(lab, from, to)?;
        talk(&mut say, &heard, at * 100..at * 100 + 100).with_context(|| format!("on {to}"))?;
    }
    ensure!(runc.wait()?.code().is_some(), "runc was killed");
    drop(say);
    heard.waits_for("END")?;
    let all = heard.all();
    is_counted(&all[..all.len() - 1])?;
    remove(lab, NAME)
}

/// Neither is overwritten: a file that others write to, too, nor one that is appended to.
pub fn its_files_go_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (path, appends) in [("/srv/run.log", false), ("/srv/appended.log", true)] {
        let file = lab.path("a", path)?;
        let mut output = OpenOptions::new().create(true).append(appends).write(true).open(&file)?;
        writeln!(output, "before")?;
        let mut runc = runs(lab, COUNT, [Stdio::null(), output.try_clone()?.into()])?;
        let grows = |more: usize| {
            let before = lines_of(lab, "a", path)?.len();
            let grown = || Ok((lines_of(lab, "a", path)?.len() >= before + more).then_some(()));
            wait_until("more output", PATIENCE, grown).with_context(|| path.to_owned())
        };
        grows(20)?;
        moved(lab, "a", "b")?;
        ensure!(runc.wait()?.code().is_some(), "runc was killed");
        grows(50)?;
        if appends {
            writeln!(OpenOptions::new().append(true).open(&file)?, "between")?;
            grows(50)?;
        }
        ended(lab, "b")?;
        writeln!(output, "behind")?;
        let all = lines_of(lab, "a", path)?;
        let (numbers, words): (Vec<String>, Vec<String>) =
            all.into_iter().partition(|line| line.parse::<u32>().is_ok());
        is_counted(&numbers)?;
        let expected: &[&str] = if appends { &["before", "between", "behind"] } else { &["before", "behind"] };
        ensure!(words == expected, "{path} has {words:?}");
        fs::remove_file(&file)?;
    }
    Ok(())
}

pub fn its_input_is_read_once(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let path = lab.path("a", "/srv/input")?;
    // More than pipes hold: runc has not read all of it.
    fs::write(&path, (1..=600).map(|number| format!("{number} {:3000}\n", "")).collect::<String>())?;
    let (hear, output) = pipe()?;
    let script = "while read line rest; do echo \"$line\"; sleep 0.005; done; echo over";
    let mut runc = runs(lab, script, [File::open(&path)?.into(), output.into()])?;
    let heard = Heard::by(File::from(hear));
    heard.goes_on(10)?;
    moved(lab, "a", "b")?;
    ensure!(runc.wait()?.code().is_some(), "runc was killed");
    heard.waits_for("END")?;
    let mut all = heard.all();
    let end = all.split_off(600.min(all.len()));
    is_counted(&all)?;
    ensure!(end == ["over", "END"], "behind the input came {end:?}");
    remove(lab, NAME)
}

/// What is typed when `runc run` has ended is for the shell; the program is at the end of its input.
pub fn its_shell_has_the_terminal_back(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let pty = nix::pty::openpty(None, None)?;
    let (mut keyboard, mut shell): (File, File) = (pty.master.into(), pty.slave.into());
    let (hear, output) = pipe()?;
    let input: OwnedFd = shell.try_clone()?.into();
    let script = format!("{ECHO}; echo over; sleep 1000000");
    let mut runc = runs(lab, &script, [input.into(), output.into()])?;
    let heard = Heard::by(File::from(hear));
    talk(&mut keyboard, &heard, 1..10)?;
    moved(lab, "a", "b")?;
    ensure!(runc.wait()?.code().is_some(), "runc was killed");
    heard.waits_for("over")?;
    for number in 0..20 {
        writeln!(keyboard, "command {number}")?;
        // Whoever else reads there has the time to.
        std::thread::sleep(Duration::from_millis(20));
        let mut ready = [PollFd::new(shell.as_fd(), PollFlags::POLLIN)];
        ensure!(poll(&mut ready, 1000u16)? == 1, "somebody else has read command {number}");
        let mut line = [0; 64];
        let count = shell.read(&mut line)?;
        ensure!(line[..count] == *format!("command {number}\n").as_bytes(), "{:?}", &line[..count]);
    }
    ended(lab, "b")?;
    let all = heard.all();
    is_counted(&all[..9])?;
    ensure!(all[9..] == ["over", "END"], "{all:?}");
    Ok(())
}
