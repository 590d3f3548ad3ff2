//! A lab for real: namespaces, a container, the measuring client. Needs root and what `make setup` installs.

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tranship_lab::{
    CLIENT, CounterClient, Lab, LabError, REDIS_PORT, Redis, RunOptions, UpOptions, find_program, redis_command,
};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 10);

/// A lab without agents, after any other on this machine; `None`, with the reason, where there cannot be one.
fn lab() -> Option<Lab> {
    let options = UpOptions { agents: false, wait: Duration::from_secs(120), ..UpOptions::default() };
    if Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout != b"0\n") {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    Some(Lab::up(&options).unwrap())
}

fn refusal<T: std::fmt::Debug>(result: Result<T, LabError>) -> String {
    result.expect_err("must be refused").to_string()
}

#[test]
fn a_lab_runs_containers_measures_gaps_and_leaves_nothing() {
    let Some(lab) = lab() else { return };
    assert_eq!(lab.nodes(), ["a", "b"]);
    assert!(refusal(Lab::up(&UpOptions::default())).contains("a lab is up already"));

    // A node has its own network, processes and /run; exit codes come through.
    assert_eq!(lab.check("a", &["ls", "/sys/class/net"]).unwrap(), "eth0\nlo\n");
    assert_eq!(lab.check("b", &["sh", "-c", "touch /run/mine; echo $PPID"]).unwrap(), "0\n");
    assert!(!lab.path("a", "/run/mine").unwrap().exists() && !std::path::Path::new("/run/mine").exists());
    assert_eq!(lab.exec("a", &["sh", "-c", "exit 7"]).unwrap().status.code(), Some(7));

    lab.run("a", "redis", &RunOptions::new(ADDRESS, redis_command())).unwrap();
    assert!(refusal(lab.run("a", "redis", &RunOptions::new(ADDRESS, ["sleep"]))).contains("has a container"));
    assert!(refusal(lab.run("b", "other", &RunOptions::new(ADDRESS, ["sleep"]))).contains("container redis on node a"));
    let missing = RunOptions::new(Ipv4Addr::new(10, 77, 0, 11), ["no-such-program"]);
    assert!(refusal(lab.run("b", "other", &missing)).contains("no-such-program is not in the container's root"));

    let mut redis = Redis::connect(&lab, ADDRESS, Duration::from_secs(10)).unwrap();
    redis.populate(1000, "key", 100).unwrap();
    let before = redis.verify_without("counter").unwrap();
    assert_eq!(before.0, 1000);

    // What the client sees of a link that is cut is a gap on one connection, not an error.
    let pace = Duration::from_micros(500);
    let mut counter = CounterClient::start(&lab, (ADDRESS, REDIS_PORT).into(), "counter", pace).unwrap();
    counter.wait_replies(100, Duration::from_secs(5)).unwrap();
    counter.mark().unwrap();
    lab.cut_link("a").unwrap();
    while counter.report().unwrap().waiting_ms < 50.0 {}
    lab.restore_link("a").unwrap();
    let seen = counter.wait_replies(100, Duration::from_secs(20)).unwrap();
    assert!(seen.since_mark.longest.ms >= 50.0, "{seen:?}");
    let paused = counter.pause().unwrap();
    assert!(paused.same_connection && paused.error.is_none(), "{paused:?}");
    assert_eq!(redis.verify_without("counter").unwrap(), before);
    counter.resume().unwrap();
    counter.wait_replies(10, Duration::from_secs(5)).unwrap();

    // A connection that is lost is an error for good.
    lab.stop("a", "redis").unwrap();
    let ended = counter.wait_replies(1_000_000, Duration::from_secs(5));
    assert!(refusal(ended).contains("connection failed"));
    assert!(!counter.stop().unwrap().same_connection);
    assert!(refusal(lab.stop("a", "redis")).contains("it has none"));
    assert!(lab.exec(CLIENT, &["true"]).unwrap().status.success());

    // The kernel ends a node when all of its processes have been reaped: here the parent of one, outside of it, is stopped.
    let mut parent = lab.spawn("a", &["sleep", "1000"]).unwrap();
    let pid = parent.id();
    let children = format!("/proc/{pid}/task/{pid}/children");
    while std::fs::read_to_string(&children).unwrap().is_empty() {
        std::thread::yield_now();
    }
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGSTOP).unwrap();
    lab.down().unwrap();
    assert!(!std::path::Path::new("/run/tranship-lab").exists());
    parent.wait().unwrap();
}

/// Nodes, and what `suites isolate` runs, have a /tmp, a /run and a /srv of their own, but for the working copy, which
/// may be there.
#[test]
fn a_working_copy_is_seen_wherever_it_is() {
    let Ok(suites) = find_program("suites") else {
        eprintln!("skipped: `suites` is not built");
        return;
    };
    if Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout != b"0\n") {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let script = r#"cat file && "$0" up --no-agents > /dev/null && "$0" exec a -- cat "$PWD/file" &&
        "$0" exec a -- touch /tmp/own /run/own /srv/own && "$0" exec b -- ls /tmp /srv; ls /tmp; "$0" down > /dev/null"#;
    for top in ["/tmp", "/run", "/srv"] {
        let copy = format!("{top}/tranship-copy-{}", std::process::id());
        std::fs::create_dir(&copy).unwrap();
        std::fs::write(format!("{copy}/Cargo.lock"), "").unwrap();
        std::fs::write(format!("{copy}/file"), "here\n").unwrap();
        let mut command = Command::new(&suites);
        command.args(["isolate", "copy", "--", "sh", "-c", script, env!("CARGO_BIN_EXE_tranship-lab")]);
        let output = command.current_dir(&copy).output();
        std::fs::remove_dir_all(&copy).unwrap();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let name = copy.rsplit('/').next().unwrap();
        let seen = |place: &str| if top == place { format!("{name}\n") } else { String::new() };
        let expected = format!("here\nhere\n/srv:\n{}\n/tmp:\n{}{}", seen("/srv"), seen("/tmp"), seen("/tmp"));
        assert_eq!(said, expected, "{top}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
