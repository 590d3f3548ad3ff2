//! The program as users run it, against a scripted agent.

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use support::{Agent, ID, err, out, tranship};
use tranship_api::{ApiError, GroupPlan, Plan};
use tranship_types::{Blocker, BlockerKind, GroupReport, Original, Outcome, Phase, Report};

#[test]
fn a_move_prints_its_phases_and_what_was_measured() {
    let agent = Agent::start();
    let child = agent.command("move redis --to b").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| r.phase = Phase::Freeze);
    agent.service.succeed();
    let output = child.wait_with_output().unwrap();
    let text = out(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", err(&output));
    assert!(text.lines().next().unwrap().ends_with(" s  plan"), "{text}");
    assert!(text.contains("redis moved from a to b in 1.84 s; blackout 213.4 ms (± 0.2 ms)\n"), "{text}");
    assert!(text.contains("\n  total         1.84 s\n") && !text.contains('\x1b'), "{text}");
    assert_eq!(err(&output), "");
}

#[test]
fn a_line_a_second_shows_that_a_move_lives() {
    let agent = Agent::start();
    let mut child = agent.command("move redis --to b").stdout(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| {
        r.phase = Phase::Transfer;
        (r.progress.memory_bytes, r.progress.moved_bytes) = (2 << 20, 1 << 20);
    });
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let expected = "transfer  1.0 MiB of 2.0 MiB (50 %), 0 B/s, 0 B on the wire";
    assert_eq!(lines.filter(|l| l.ends_with(expected)).take(3).count(), 3);
    agent.service.succeed();
    assert_eq!(child.wait().unwrap().code(), Some(0), "a closed stdout is no failure of the move");
}

#[test]
fn json_is_one_line_and_nothing_else() {
    let agent = Agent::start();
    let child =
        agent.command("move redis --to b --json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    agent.service.succeed();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), err(&output), out(&output).lines().count()), (Some(0), "", 1));
    assert_eq!(serde_json::from_str::<Report>(out(&output)).unwrap().outcome, Outcome::Moved);
}

#[test]
fn a_move_that_fails_says_so_in_one_sentence() {
    let agent = Agent::start();
    for (arguments, json) in [("move redis --to b", false), ("move redis --to b --json", true)] {
        let child = agent.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        agent.service.change(|r| {
            (r.phase, r.outcome, r.original) = (Phase::Undone, Outcome::Failed, Some(Original::Running));
            r.error = Some("node b went away; start its agent and move again".into());
        });
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            err(&output),
            "error: redis was not moved to b and runs on a, unharmed: node b went away; start its agent and move again\n"
        );
        assert_eq!(serde_json::from_str::<Report>(out(&output)).is_ok(), json, "{}", out(&output));
    }
}

#[test]
fn a_recovery_ends_well_when_the_move_was_given_up() {
    let agent = Agent::start();
    agent.service.begin();
    let refused = agent.run("recover redis --destination-lost");
    assert_eq!(refused.status.code(), Some(3));
    let sentence = "error: redis was heard to run on node b, which does not answer now; add --host-is-down\n";
    assert_eq!(err(&refused), sentence);

    let line = "recover redis --destination-lost --host-is-down";
    let ends = [(Outcome::GivenUp, 0, "redis was not moved to b; it runs on a again, as it was at the freeze\nlost\n")];
    for (outcome, status, text) in ends.into_iter().chain([(Outcome::Moved, 1, "redis moved from a to b")]) {
        agent.service.begin();
        let child = agent.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        agent.service.change(|r| {
            (r.phase, r.outcome) = (Phase::Undone, outcome);
            r.error = (outcome == Outcome::GivenUp).then(|| "lost".into());
        });
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), err(&output)), (Some(status), ""), "{}", out(&output));
        assert!(out(&output).contains(text), "{}", out(&output));
    }
}

#[test]
fn a_cancel_ends_well_when_the_container_stays() {
    let agent = Agent::start();
    agent.service.begin();
    for (line, sentence) in [
        (
            "cancel late",
            "migration m-late is past its commit point: late runs on node b, and its last pages follow; wait for it",
        ),
        ("cancel nobody", "no migration \"nobody\" is known; see `tranship status`"),
    ] {
        let refused = agent.run(line);
        assert_eq!((refused.status.code(), err(&refused)), (Some(3), format!("error: {sentence}\n").as_str()));
    }
    // A container may be called like a group: there is no group of that id.
    for line in ["cancel redis", "cancel g-redis"] {
        agent.service.begin();
        let child = agent.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        agent.service.change(|r| {
            (r.phase, r.outcome, r.original) = (Phase::Undone, Outcome::Cancelled, Some(Original::Running));
            r.error = Some("the move was cancelled".into());
        });
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), err(&output)), (Some(0), ""), "{}", out(&output));
        let text = "redis was not moved to b; it runs on a, unharmed\nthe move was cancelled\n";
        assert!(out(&output).contains(text), "{}", out(&output));
    }
}

#[test]
fn blockers_end_with_status_3_wherever_they_were_found() {
    let agent = Agent::start();
    let line = "  pid 812 fd 1: stdout is the host file /var/log/x; use a pipe\n";

    let refused = agent.run("move blocked --to b");
    assert_eq!(refused.status.code(), Some(3));
    assert_eq!(err(&refused), format!("error: stdout is the host file /var/log/x; use a pipe\n{line}"));
    assert_eq!(out(&refused), "");

    let refused = agent.run("move blocked --to b --json");
    assert_eq!(refused.status.code(), Some(3));
    assert_eq!(serde_json::from_str::<ApiError>(out(&refused)).unwrap().error.blockers[0].fd, Some(1));

    let nobody = agent.run("move nobody --to b");
    assert_eq!(nobody.status.code(), Some(3));
    assert_eq!(err(&nobody), "error: node a has no container \"nobody\"; see `tranship ls`\n");

    let planned = agent.run("move plan-blocked --to b --dry-run");
    assert_eq!(planned.status.code(), Some(3));
    assert!(out(&planned).starts_with("plan-blocked cannot be moved from a to b"), "{}", out(&planned));
    assert!(out(&planned).contains(line));

    let child = agent.command("move redis --to b").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| {
        r.outcome = Outcome::Failed;
        let blocker = Blocker::new(BlockerKind::Descriptor, "stdout is the host file /var/log/x", "use a pipe");
        r.blockers = vec![blocker.at(812, Some(1))];
    });
    let found_later = child.wait_with_output().unwrap();
    assert_eq!(found_later.status.code(), Some(3));
    assert!(err(&found_later).ends_with(line), "{}", err(&found_later));
}

#[test]
fn a_dry_run_plans() {
    let agent = Agent::start();
    let text = agent.run("move redis --to b --dry-run");
    assert_eq!(text.status.code(), Some(0));
    assert!(out(&text).starts_with("redis can be moved from a to b (auto); nothing was touched\n"));
    let json = agent.run("move redis --to b --dry-run --json");
    assert_eq!(serde_json::from_str::<Plan>(out(&json)).unwrap().tasks, 4);
}

#[test]
fn ctrl_c_leaves_the_move_alone_and_says_how_to_follow_it() {
    let agent = Agent::start();
    let mut child = agent.command("move redis --to b").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().ends_with("plan"));
    // The line above is printed before the signal is waited for; a change that was seen comes after.
    agent.service.change(|r| r.phase = Phase::Prepare);
    assert!(lines.next().unwrap().unwrap().ends_with("prepare"));
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(err(&output).contains("the move of redis goes on"), "{}", err(&output));
    assert!(err(&output).contains(&format!("tranship status {ID}")), "{}", err(&output));

    let child = agent.command(&format!("status --follow {ID}")).stdout(Stdio::piped()).spawn().unwrap();
    agent.service.succeed();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(out(&output).contains("redis moved from a to b"));
}

#[test]
fn the_doctor_says_what_is_left_and_whether_anything_is() {
    let agent = Agent::start();
    let output = agent.command("doctor").output().unwrap();
    let text = out(&output);
    assert_eq!(output.status.code(), Some(1), "{text}{}", err(&output));
    assert!(text.contains("migrations/m-1  `tranship doctor --fix` removes it\n"), "{text}");
    let output = agent.command("doctor --fix").output().unwrap();
    let text = out(&output);
    assert!(text.contains("migrations/m-1  removed\n") && text.contains("`runc resume redis`"), "{text}");
    assert_eq!(output.status.code(), Some(1), "the container is left");
}

#[test]
fn an_agent_that_restarts_is_waited_for() {
    let mut agent = Agent::start();
    let mut child = agent.command("move redis --to b").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    agent.service.change(|r| r.phase = Phase::Transfer);
    agent.die();
    assert_eq!(messages.next().unwrap().unwrap(), "the agent does not answer any more; waiting up to 30 s for it …");
    agent.serve();
    agent.service.succeed();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}

#[test]
fn an_agent_that_forgot_the_move_ends_the_waiting() {
    let mut agent = Agent::start();
    let child = agent.command("move redis --to b").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| r.phase = Phase::Transfer);
    agent.die();
    agent.service = std::sync::Arc::default();
    agent.serve();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("lost sight of the move of redis (this node knows no migration"), "{}", err(&output));
}

#[test]
fn lists_and_reports() {
    let agent = Agent::start();
    let kept = "network shop (bridge br-15a3) is held together with node b by VXLAN tship-00000a, not encrypted, for app (on b)";
    assert_eq!(out(&agent.run("status")), format!("no move is under way\n{kept}\n"));
    assert_eq!(out(&agent.run("history")), "no move has ended on this node yet\n");
    assert!(out(&agent.run("ls")).contains("redis  runc    running  812  4.0 KiB"));
    assert!(out(&agent.run("ls --json")).starts_with(r#"[{"name":"redis""#));
    let node = agent.run("node");
    assert_eq!(node.status.code(), Some(1), "a node without criu is not healthy");
    assert!(out(&node).contains("problem: criu: `criu check` fails; install criu 4.1.1 or later\n"), "{}", out(&node));

    agent.service.begin();
    assert!(out(&agent.run("status")).contains(ID));
    assert!(out(&agent.run(&format!("status {ID}"))).starts_with("redis moves from a to b: plan\n"));
    assert_eq!(out(&agent.run("history --json")), "[]\n");
    let unknown = agent.run("status m-unknown");
    assert_eq!(unknown.status.code(), Some(1));
    assert_eq!(
        err(&unknown),
        "error: this node knows no migration m-unknown; see `tranship history` for those that it knows\n"
    );
}

#[test]
fn without_an_agent_one_sentence_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    for arguments in ["ls", "status", "history", "node", "move redis --to b", "status --follow m-1"] {
        let output = tranship(&socket, arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{arguments}");
        assert_eq!(err(&output).lines().count(), 1, "{arguments}");
        assert!(
            err(&output).contains("start it with `systemctl start transhipd` or `tranship agent`"),
            "{}",
            err(&output)
        );
        assert_eq!(out(&output), "");
    }
    let json = tranship(&socket, "move redis --to b --json").output().unwrap();
    assert_eq!((json.status.code(), out(&json).lines().count()), (Some(4), 1));
    assert!(serde_json::from_str::<ApiError>(out(&json)).unwrap().error.message.contains("is not running"));
}

#[test]
fn wrong_use_ends_with_status_2() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in ["", "move redis", "move redis --to ../b", "move a/b --to b", "status ../x", "frobnicate"] {
        assert_eq!(tranship(dir.path(), arguments).output().unwrap().status.code(), Some(2), "{arguments}");
    }
    let help = tranship(dir.path(), "--help").output().unwrap();
    assert!(out(&help).contains("Exit status:") && out(&help).contains("3  `move` is blocked"));
}

#[test]
fn the_agent_is_found_on_path_and_gets_its_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let ours = dir.path().join("tranship");
    std::fs::copy(env!("CARGO_BIN_EXE_tranship"), &ours).unwrap();
    let run = |path: &str| {
        std::process::Command::new(&ours).args(["agent", "--config", "x.toml"]).env("PATH", path).output().unwrap()
    };
    let missing = run("/nonexistent");
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        err(&missing).starts_with("error: transhipd is neither beside this program nor on PATH"),
        "{}",
        err(&missing)
    );

    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let agent = bin.join("transhipd");
    std::fs::write(&agent, "#!/bin/sh\necho \"$0 $*\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755)).unwrap();
    let found = run(bin.to_str().unwrap());
    assert_eq!(found.status.code(), Some(7));
    assert_eq!(out(&found), format!("{} --config x.toml\n", agent.display()));

    std::fs::rename(&agent, dir.path().join("transhipd")).unwrap();
    let beside = run("/nonexistent");
    assert_eq!(out(&beside), format!("{} --config x.toml\n", dir.path().join("transhipd").display()));
}

#[test]
fn completions_for_the_usual_shells() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let output = tranship(dir.path(), &format!("completions {shell}")).output().unwrap();
        assert!(out(&output).contains("TRANSHIP_COMPLETE"), "{shell}");
    }
}

/// What bash is offered after these words.
fn completed(agent: &Agent, words: &[&str]) -> Vec<String> {
    let last = (words.len() - 1).to_string();
    let output = agent
        .command("")
        .args(["--"])
        .args(words)
        .env("TRANSHIP_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", last)
        .env("_CLAP_IFS", "\n")
        .output()
        .unwrap();
    out(&output).lines().map(str::to_owned).collect()
}

#[test]
fn containers_nodes_and_ids_are_completed() {
    let agent = Agent::start();
    agent.service.begin();
    assert_eq!(completed(&agent, &["tranship", "move", "re"]), ["redis"]);
    assert_eq!(completed(&agent, &["tranship", "move", "redis", "--to", ""]), ["b", "c"]);
    assert!(completed(&agent, &["tranship", "status", ""]).contains(&ID.to_owned()));
    assert!(completed(&agent, &["tranship", "his"]).contains(&"history".to_owned()));
}

#[test]
fn a_move_is_found_by_its_container() {
    let agent = Agent::start();
    agent.service.begin();
    assert!(out(&agent.run("status redis")).starts_with("redis moves from a to b: plan\n"));
    let unknown = agent.run("status nginx");
    assert_eq!(unknown.status.code(), Some(1));
    assert!(err(&unknown).starts_with("error: no move of \"nginx\" is known on this node; see"), "{}", err(&unknown));
    agent.service.succeed_unwatched();
    assert!(out(&agent.run("status redis")).starts_with("redis moved from a to b"));
    for (filter, count) in [
        ("", 1),
        ("-n 1", 1),
        ("--container redis", 1),
        ("--container nginx", 0),
        ("--since 1h", 1),
        ("--since 2999-01-01", 0),
    ] {
        let list: Vec<Report> = serde_json::from_str(out(&agent.run(&format!("history --json {filter}")))).unwrap();
        assert_eq!(list.len(), count, "{filter}");
    }
}

#[test]
fn a_status_is_shown_again_when_it_has_changed() {
    let agent = Agent::start();
    agent.service.begin();
    let mut child = agent.command("status redis --watch").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "redis moves from a to b: plan");
    agent.service.succeed_unwatched();
    assert!(lines.any(|line| line.starts_with("redis moved from a to b")));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn json_with_its_schema_has_errors_of_one_shape() {
    let agent = Agent::start();
    let read = |arguments: &str| {
        let output = agent.run(arguments);
        let value: serde_json::Value = serde_json::from_str(out(&output)).unwrap();
        assert_eq!((value["schema_version"].as_u64(), out(&output).lines().count()), (Some(1), 1), "{arguments}");
        value
    };
    assert_eq!(read("ls --output json")["data"][0]["name"], "redis");
    assert_eq!(read("--output json status")["data"], serde_json::json!([]));
    for arguments in ["move blocked --to b", "status m-unknown", "move redis", "history -n 0", "cancel nobody"] {
        let error = &read(&format!("{arguments} --output json"))["error"];
        let texts = ["message", "remedy"].map(|field| error[field].as_str().is_some_and(|text| !text.is_empty()));
        assert!(texts == [true; 2] && error["blockers"].is_array(), "{arguments}: {error}");
    }
    let child = agent.command("move redis --to b --output json").stdout(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| {
        (r.phase, r.outcome, r.original) = (Phase::Undone, Outcome::Failed, Some(Original::Running));
        r.error = Some("node b went away; start its agent and move again".into());
    });
    let value: serde_json::Value = serde_json::from_str(out(&child.wait_with_output().unwrap())).unwrap();
    assert_eq!(value["error"]["remedy"], "start its agent and move again");
    assert_eq!(value["data"]["outcome"], "failed");
}

#[test]
fn an_evacuation_moves_all_that_runs() {
    let agent = Agent::start();
    let child = agent.command("evacuate --to b").stdout(Stdio::piped()).spawn().unwrap();
    agent.service.succeed();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", out(&output));
    assert!(out(&output).starts_with("redis → b  under way\nredis → b  moved\n"), "{}", out(&output));
    assert!(out(&output).ends_with("\n1 of 1 containers were moved from a\n"), "{}", out(&output));
    for (to, why) in [("a", "node a cannot be emptied to itself"), ("z", "node a does not know a node z")] {
        let refused = agent.run(&format!("evacuate --to {to}"));
        assert_eq!(refused.status.code(), Some(3));
        assert!(err(&refused).contains(why), "{}", err(&refused));
    }
    assert!(out(&agent.run("evacuate --to b --dry-run")).contains("redis      4.0 KiB  b   can be moved"));
}

#[test]
fn an_evacuation_lists_and_skips_what_fails() {
    let agent = Agent::start();
    let child = agent.command("evacuate --to b --json").stdout(Stdio::piped()).spawn().unwrap();
    agent.service.change(|r| {
        (r.phase, r.outcome) = (Phase::Undone, Outcome::Failed);
        r.error = Some("node b went away; start its agent and move again".into());
    });
    let output = child.wait_with_output().unwrap();
    let rows: serde_json::Value = serde_json::from_str(out(&output)).unwrap();
    assert_eq!((output.status.code(), &rows[0]["fate"]), (Some(1), &serde_json::json!("failed")));
    assert_eq!(rows[0]["error"]["message"], "node b went away");
}

#[test]
fn init_makes_certificates_once_and_adds_nodes_later() {
    let dir = tempfile::tempdir().unwrap();
    let pki = dir.path().join("pki");
    let init =
        |arguments: &str| tranship(dir.path(), &format!("init --dir {} {arguments}", pki.display())).output().unwrap();
    let made = init("--node a b");
    assert_eq!(made.status.code(), Some(0), "{}", err(&made));
    assert!(out(&made).starts_with("Made a certificate authority"), "{}", out(&made));
    for file in ["ca.crt", "ca.key", "a/ca.crt", "a/node.crt", "a/node.key", "b/node.key"] {
        assert!(pki.join(file).is_file(), "{file}");
    }
    assert_eq!(pki.join("a/node.key").metadata().unwrap().permissions().mode() & 0o777, 0o600);

    let again = init("--node a");
    assert_eq!(again.status.code(), Some(1));
    assert!(err(&again).contains("--renew"), "{}", err(&again));
    assert!(out(&init("--node c")).starts_with("Used the certificate authority that was there"));
    assert_eq!(init("--node a --renew").status.code(), Some(0));

    let nowhere = tranship(dir.path(), "init --dir /proc/nowhere --node a").output().unwrap();
    assert_eq!((nowhere.status.code(), err(&nowhere).lines().count()), (Some(1), 1));
    assert!(err(&nowhere).contains("--dir"), "{}", err(&nowhere));
}

/// `script` lends the program a terminal.
fn on_a_terminal(agent: &Agent, no_color: &str) -> String {
    let line = format!("{} move redis --to b", env!("CARGO_BIN_EXE_tranship"));
    let mut child = std::process::Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .env("TRANSHIP_SOCKET", agent.socket())
        .env("TERM", "xterm")
        .env("NO_COLOR", no_color)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script (package bsdutils, essential on Debian) must be there");
    agent.service.change(|r| {
        r.phase = Phase::Transfer;
        (r.progress.memory_bytes, r.progress.moved_bytes, r.progress.rate) = (2 << 20, 1 << 20, 1e6);
    });
    // The line that changes is drawn ten times a second; the end may come when it has been seen.
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("of 2.0 MiB") {
        let chunk = reader.fill_buf().unwrap();
        assert!(!chunk.is_empty(), "{}", String::from_utf8_lossy(&text));
        text.extend_from_slice(chunk);
        let n = chunk.len();
        reader.consume(n);
    }
    agent.service.succeed();
    std::io::Read::read_to_end(&mut reader, &mut text).unwrap();
    assert!(child.wait().unwrap().success());
    String::from_utf8(text).unwrap()
}

#[test]
fn on_a_terminal_one_line_changes_and_colours_show() {
    let agent = Agent::start();
    let text = on_a_terminal(&agent, "");
    assert!(text.contains("redis → b") && text.contains("1.0 MiB of 2.0 MiB"), "{text:?}");
    assert!(text.contains("redis \x1b[32;1mmoved\x1b[0m from a to b"), "{text:?}");

    let plain = on_a_terminal(&agent, "1");
    assert!(plain.contains("redis moved from a to b"), "{plain:?}");
    assert!(!plain.contains("\x1b[3") && !plain.contains("\x1b[1m"), "no colours: {plain:?}");
}

#[test]
fn a_group_is_a_table_and_fails_if_one_does() {
    let agent = Agent::start();
    let directory = tempfile::tempdir().unwrap();
    let file = |text: &str| {
        let path = directory.path().join("group.yaml");
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let whole = file("to: b\ncontainers:\n  db:\n  web: {depends_on: [db]}\n");
    let output = agent.run(&format!("move-group {whole}"));
    let text = out(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", err(&output));
    assert!(text.contains("group g-4k7tq0zd: all 2 containers moved in 1.00 s, pipelined\n"), "{text}");
    assert!(text.lines().any(|l| l.starts_with("web ") && l.contains("1  a → b")), "{text}");

    let half = file("to: b\ncontainers:\n  db:\n  broken: {depends_on: [db]}\n");
    let output = agent.run(&format!("move-group {half}"));
    assert_eq!(output.status.code(), Some(1));
    assert!(out(&output).contains("1 of 2 containers moved") && out(&output).contains("  broken: the link broke\n"));
    assert_eq!(err(&output), "error: 1 of 2 containers were not moved\n");
    let output = agent.run(&format!("move-group {half} --json"));
    assert_eq!(serde_json::from_str::<GroupReport>(out(&output)).unwrap().outcome, Outcome::Failed);

    let planned = file("to: b\ncontainers:\n  plan:\n  plan-blocked:\n");
    let output = agent.run(&format!("move-group {planned} --dry-run"));
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let text = out(&output);
    assert!(text.starts_with("group of 2 cannot be moved from a (pipelined); nothing was touched\n"), "{text}");
    assert!(text.contains("\nplan-blocked:\n  "), "{text}");
    let output = agent.run(&format!("move-group {planned} --dry-run --json"));
    assert_eq!(serde_json::from_str::<GroupPlan>(out(&output)).unwrap().members.len(), 2);
    let nobody = file("to: b\ncontainers:\n  nobody:\n");
    assert_eq!(agent.run(&format!("move-group {nobody}")).status.code(), Some(3));
    let wrong = file("to: b\ncontainers:\n  db: {depend_on: [web]}\n");
    let output = agent.run(&format!("move-group {wrong}"));
    assert_eq!(output.status.code(), Some(2));
    assert!(
        err(&output).contains("group.yaml is wrong at line 3 column 8") && err(&output).contains("depend_on"),
        "{}",
        err(&output)
    );
}
