//! Files in memory move with their container, whatever they are and whoever is writing to them, and do not lengthen the blackout.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Guest, Stage, exactly_one_runs, move_container, move_with, nothing_left, remove, scenarios};
use tranship_lab::{Lab, RunOptions, find_program};
use tranship_types::Report;

const NAME: &str = "files";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 21);
const PORT: u16 = 7002;
const PATIENCE: Duration = Duration::from_secs(30);

/// Moves it in a mode of its own.
fn move_in(lab: &Lab, from: &str, to: &str, mode: &str) -> Result<Report> {
    let way = || format!("{from} → {to}, mode {mode}");
    let report = move_with(lab, from, NAME, to, &["--mode", mode]).with_context(way)?;
    ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
    nothing_left(lab, from, NAME)?;
    Ok(report)
}

fn goes_on(guest: &mut Guest) -> Result<()> {
    for _ in 0..60 {
        let line = guest.line(PATIENCE)?;
        ensure!(line.starts_with("ok "), "the program says {line}");
    }
    Ok(())
}

fn tmpfs_ways(report: &Report) -> Vec<&String> {
    report.ways.iter().filter(|way| way.starts_with("tmpfs: ")).collect()
}

fn files_of_every_kind_move_to_and_fro(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let mut options = RunOptions::new(IP, ["/opt/memory-files"]);
    options.binds.push((find_program("memory-files")?, "/opt/memory-files".into()));
    lab.run("a", NAME, &options)?;
    let mut guest = Guest::connect(lab, IP, PORT)?;
    goes_on(&mut guest).context("before the first move")?;
    for (n, mode) in ["cold", "precopy", "precopy", "cold"].into_iter().enumerate() {
        let (from, to) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let report = move_in(lab, from, to, mode)?;
        goes_on(&mut guest).with_context(|| format!("after move {n}, mode {mode}"))?;
        let ways = tmpfs_ways(&report);
        ensure!(!ways.iter().any(|way| way.contains("by criu")), "not all went its way: {ways:?}");
        eprintln!("move {n}, {mode}: blackout {:.0} ms, {ways:?}", report.blackout_ms.unwrap_or_default());
    }
    remove(lab, NAME)
}

/// A file that is open by a name that is gone while it has another one is the file of that name after a move.
fn a_file_whose_name_is_gone_goes_on_under_another_one(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let script = "echo here > /tmp/one; exec 3<> /tmp/one; ln /tmp/one /tmp/two; rm /tmp/one; \
                  while :; do sleep 0.1; done";
    lab.run("a", NAME, &RunOptions::new(IP, ["sh", "-c", script]))?;
    let inside = |node: &str, what: &str| lab.check(node, &["runc", "exec", NAME, "sh", "-c", what]);
    tranship_e2e::wait_until("the other name", PATIENCE, || {
        Ok(lab
            .exec("a", &["runc", "exec", NAME, "sh", "-c", "test -e /tmp/two && ! test -e /tmp/one"])?
            .status
            .success()
            .then_some(()))
    })?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = move_container(lab, from, NAME, to)?;
        let ways = tmpfs_ways(&report);
        ensure!(!ways.iter().any(|way| way.contains("by criu")), "{ways:?}");
        let same = "cat /tmp/two; ls /tmp; cat /proc/1/fd/3; readlink /proc/1/fd/3; \
                    stat -L -c %d:%i /tmp/two /proc/1/fd/3 | uniq | wc -l";
        let seen = inside(to, same)?;
        ensure!(seen == "here\ntwo\nhere\n/tmp/two\n1\n", "on {to} there is {seen:?}");
    }
    remove(lab, NAME)
}

/// What the freeze spends on files in memory, and what it sends of them, with a full /tmp. (Whole blackouts are for a benchmark: on a
/// machine that is busy with something else they differ by more than what is looked for here.)
fn a_gigabyte_in_tmp_does_not_lengthen_the_blackout(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["sleep", "1000000"]))?;
    lab.check("a", &["runc", "exec", NAME, "sh", "-c", "head -c 1G /dev/zero | tr '\\0' x > /tmp/big"])?;
    let mut spent = Vec::new();
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")] {
        let report = move_container(lab, from, NAME, to)?;
        let ways = tmpfs_ways(&report);
        ensure!(ways.len() == 1 && ways[0].contains("1073741824 bytes ahead of the freeze and 0 in it"), "{ways:?}");
        let parts = report.parts.iter().filter(|part| part.name.starts_with("tmpfs: "));
        spent.push(parts.map(|part| part.ms).sum::<f64>());
        eprintln!(
            "blackout {:.0} ms, {:.1} ms of it for files",
            report.blackout_ms.unwrap_or_default(),
            spent[spent.len() - 1]
        );
    }
    spent.sort_by(f64::total_cmp);
    ensure!(spent[1] < 15.0, "{spent:?} ms");
    let content =
        lab.check("a", &["runc", "exec", NAME, "sh", "-c", "tr -d x < /tmp/big | wc -c; wc -c < /tmp/big"])?;
    ensure!(content == "0\n1073741824\n", "{content}");
    remove(lab, NAME)
}

/// Of a large file that is written all the time the freeze reads just what was written last, and nothing is missing in the end.
fn a_large_file_that_is_written_all_the_time_does_not_lengthen_the_blackout(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let script = "head -c 256M /dev/zero | tr '\\0' x > /tmp/big; n=0; \
                  while ! test -e /tmp/stop; do \
                      n=$((n + 1)); k=$((n * 7919 % 32768)); \
                      printf %08d $n | dd of=/tmp/big bs=8192 seek=$k conv=notrunc 2>/dev/null; echo $k $n >> /tmp/log; \
                  done; touch /tmp/stopped; sleep 1000000";
    lab.run("a", NAME, &RunOptions::new(IP, ["sh", "-c", script]))?;
    let inside = |node: &str, what: &str| lab.check(node, &["runc", "exec", NAME, "sh", "-c", what]);
    let is_there = |node: &str, what: &str| {
        Ok(lab.exec(node, &["runc", "exec", NAME, "test", "-e", what])?.status.success().then_some(()))
    };
    tranship_e2e::wait_until("the first piece", PATIENCE, || is_there("a", "/tmp/log"))?;
    let mut spent = Vec::new();
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")] {
        let report = move_container(lab, from, NAME, to)?;
        let parts = report.parts.iter().filter(|part| part.name.starts_with("tmpfs: "));
        spent.push(parts.map(|part| part.ms).sum::<f64>());
        eprintln!("{:.1} ms for files, {:?}", spent[spent.len() - 1], tmpfs_ways(&report));
    }
    spent.sort_by(f64::total_cmp);
    // To compare all of it takes three times as long.
    ensure!(spent[1] < 30.0, "{spent:?} ms");
    inside("a", "touch /tmp/stop")?;
    tranship_e2e::wait_until("its end", PATIENCE, || is_there("a", "/tmp/stopped"))?;
    let is = inside("a", "tr -d x < /tmp/big | md5sum; wc -l < /tmp/log; wc -c < /tmp/big")?;
    let should = inside(
        "a",
        "sort -n /tmp/log | awk '{ printf \"%08d\", $2 }' | md5sum; \
         sort -n /tmp/log | awk '{ print $1 }' | uniq | wc -l; echo 268435456",
    )?;
    ensure!(is == should, "{is}, and not {should}");
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("files_of_every_kind_move_to_and_fro", files_of_every_kind_move_to_and_fro),
        ("a_file_whose_name_is_gone_goes_on_under_another_one", a_file_whose_name_is_gone_goes_on_under_another_one),
        ("a_gigabyte_in_tmp_does_not_lengthen_the_blackout", a_gigabyte_in_tmp_does_not_lengthen_the_blackout),
        (
            "a_large_file_that_is_written_all_the_time_does_not_lengthen_the_blackout",
            a_large_file_that_is_written_all_the_time_does_not_lengthen_the_blackout,
        ),
    ])
}
