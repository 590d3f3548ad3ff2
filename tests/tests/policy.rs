//! What a peer may have a node do: a peer that holds a valid certificate and sends what it likes, the rules of `accept`, and
//! certificates that are renewed, pinned and revoked while agents run.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tranship_e2e::{
    CONTAINERD, DOCKER, Log, PODMAN, Stage, connection_alive, refused_move, remove, scenarios, second_move_succeeds,
    send, wait_until,
};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, RunOptions, redis_command};
use tranship_transport::{Connection, Connector, Identity};
use tranship_types::{Blocker, BlockerKind, MigrationId};
use tranship_wire::message::{Offer, Request, Response};
use tranship_wire::{Hello, Purpose, read_message, write_message};

const NAME: &str = "policed";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 70);
const AGENT_PORT: u16 = 7077;
const CONFIGURATION: &str = "/etc/tranship/agent.toml";
const PATIENCE: Duration = Duration::from_secs(10);
/// The lab's CA, on the host.
const CA: &str = "/run/tranship-lab/ca";

/// Gives a node another configuration, or other certificates, and has its agent read that; returns what its log says of it.
fn read_again(lab: &Lab, node: &str, text: &str) -> Result<String> {
    let log = Log::mark(lab, node)?;
    fs::write(lab.path(node, CONFIGURATION)?, text)?;
    send(Signal::SIGHUP, lab.agent_pid(node)?.context("there is no agent")?)?;
    wait_until("the agent to have read its configuration", PATIENCE, || {
        let said = log.text();
        let done = ["was read again", "was not taken"].iter().any(|words| said.contains(words));
        Ok(done.then_some(said))
    })
}

/// The same with what is to be taken.
fn reload(lab: &Lab, node: &str, text: &str) -> Result<String> {
    let said = read_again(lab, node, text)?;
    ensure!(said.contains("was read again"), "{said}");
    Ok(said)
}

fn configuration(lab: &Lab, node: &str) -> Result<String> {
    Ok(fs::read_to_string(lab.path(node, CONFIGURATION)?)?)
}

/// The configuration of node b with this in place of what it says of node a, and with nothing but defaults for what may come.
fn of_peer_a(right: &str, peer: &str) -> Result<String> {
    let line = right.lines().find(|line| line.starts_with("a = ")).context("no peer a")?;
    let accept: Vec<_> = right
        .lines()
        .filter(|l| {
            l.starts_with("[accept]")
                || l.starts_with("binds = ")
                || l.starts_with("privileged = ")
                || l.starts_with("control = ")
        })
        .collect();
    ensure!(accept.len() == 4, "the lab's configuration has {accept:?}");
    let text = right.replacen(line, &line.replace("a = ", "a.address = "), 1);
    let text = accept.iter().fold(text, |text, line| text.replacen(&format!("{line}\n"), "", 1));
    Ok(text.replacen("a.address", &format!("{peer}a.address"), 1))
}

/// A link of node a's to node b.
fn dial(lab: &Lab, id: Option<&MigrationId>) -> Result<Connection> {
    let tls = |file: &str| lab.path("a", format!("/etc/tranship/tls/{file}"));
    let connector = Connector::new(Identity::load(&tls("ca.crt")?, &tls("node.crt")?, &tls("node.key")?)?);
    let address = SocketAddr::from((lab.address("b")?, AGENT_PORT)).to_string();
    let hello = Hello::new("a".parse()?, Purpose::Control, id.cloned());
    let peer = "b".parse()?;
    let dialled = lab.within("a", None, move || {
        connector.connect(&peer, &address, &hello, PATIENCE).map_err(|e| io::Error::other(e.to_string()))
    })?;
    Ok(dialled?)
}

fn ask(link: &mut Connection, request: &Request) -> Result<Response> {
    write_message(link, request)?;
    Ok(read_message(link)?)
}

/// An offer of a container that has nothing special, with this changed.
fn offer(change: impl FnOnce(&mut Value)) -> Result<Offer> {
    let mut offer = json!({
        "container": "rogue", "engine": "runc", "mode": "auto", "network": ["/run/netns/rogue", {"interfaces": [], "routes": []}],
        "memory_bytes": 4096, "shared_bytes": 0, "rootfs": null, "cpu": null, "binds": [], "streams": 2, "criu": "",
        "config": {
            "ociVersion": "1.0.2", "process": {"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
            "root": {"path": "/tmp/rogue-root"}, "mounts": [],
            "linux": {
                "resources": {"devices": [{"allow": false, "access": "rwm"}]}, "cgroupsPath": "/rogue",
                "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                    {"type": "network", "path": "/run/netns/rogue"}],
                "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
            },
        },
    });
    change(&mut offer);
    Ok(serde_json::from_value(offer)?)
}

/// Has node b asked about an offer, then has it made; both must be refused with these words.
fn refused(lab: &Lab, offer: &Offer, words: &str) -> Result<()> {
    let id: MigrationId = "m-rogue".parse()?;
    let mut link = dial(lab, Some(&id))?;
    for request in [Request::Check(Box::new(offer.clone())), Request::Offer(Box::new(offer.clone()))] {
        let said = match ask(&mut link, &request)? {
            Response::Checked { blockers, .. } => {
                blockers.iter().map(Blocker::to_string).collect::<Vec<_>>().join("\n")
            }
            Response::Failed { message, .. } => message,
            other => bail!("{words}: it was answered by {other:?}"),
        };
        ensure!(said.contains(words), "{words:?} not in {said:?}");
    }
    Ok(())
}

/// A compromised peer has nothing run, mounted, joined, made or removed on the node by a configuration that it sends.
fn a_rogue_peer_becomes_root_by_no_configuration(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let right = configuration(lab, "b")?;
    reload(lab, "b", &of_peer_a(&right, "")?)?;
    lab.check("b", &["mkdir", "-p", "/tmp/rogue-root"])?;
    let owned = "/tmp/owned";
    let mark = |how: &str| json!([{"path": "/bin/touch", "args": ["touch", format!("{owned}-{how}")]}]);
    let cases: Vec<(Value, Value, &str)> = vec![
        (
            json!(["config", "hooks"]),
            json!({"prestart": mark("hook"), "poststop": mark("stop")}),
            "the program /bin/touch run on the node",
        ),
        (json!(["config", "annotations"]), json!({"org.criu.config": "/tmp/x"}), "the annotation \"org.criu.config\""),
        (
            json!(["config", "mounts"]),
            json!([{"destination": "/h", "type": "bind", "source": "/", "options": ["rbind"]}]),
            "/ of the node is mounted",
        ),
        (
            json!(["config", "mounts"]),
            json!([{"destination": "/h", "type": "ext4", "source": "/dev/vda"}]),
            "a filesystem \"ext4\"",
        ),
        (
            json!(["config", "linux", "devices"]),
            json!([{"path": "/d", "type": "b", "major": 254, "minor": 0}]),
            "the devices b 254:0",
        ),
        (json!(["config", "linux", "cgroupsPath"]), json!("/../../escape"), "leads upwards"),
        (json!(["config", "linux", "namespaces", 3, "path"]), json!("/proc/1/ns/mnt"), "joins the mount namespace"),
        (json!(["config", "linux", "namespaces", 4, "path"]), json!("/proc/1/ns/net"), "joins the network namespace"),
        (json!(["config", "linux", "readonlyPaths"]), json!([]), "/proc/sys is not read-only"),
        (json!(["config", "process", "capabilities"]), json!({"bounding": ["CAP_SYS_ADMIN"]}), "CAP_SYS_ADMIN"),
        (json!(["config", "root", "path"]), json!("/"), "its root filesystem is /"),
        (json!(["network", 0]), json!("/proc/1/ns/net"), "is not /run/netns/NAME"),
        (json!(["network", 0]), json!("/run/netns/../../tmp/owned-net"), "is not /run/netns/NAME"),
        (json!(["container"]), json!("../../etc/rogue"), "its name"),
        (json!(["binds"]), json!(["/etc/shadow"]), "/etc/shadow of the node is mounted"),
    ];
    for (place, value, words) in cases {
        let place: Vec<Value> = serde_json::from_value(place)?;
        let offer = offer(|offer| {
            let at = place.iter().fold(offer, |at, key| match key.as_str() {
                Some(key) => &mut at[key],
                None => &mut at[key.as_u64().unwrap_or_default() as usize],
            });
            *at = value;
        })?;
        refused(lab, &offer, words).with_context(|| format!("{place:?}"))?;
    }
    let tree = |path: &str, inside: &str| json!({"kind": "bind", "inside": inside, "path": path, "bytes": 0});
    refused(
        lab,
        &offer(|o| o["trees"] = json!([tree("/etc/cron.d/rogue", "/x")]))?,
        "/etc/cron.d/rogue of the node is mounted",
    )?;
    refused(lab, &offer(|o| o["trees"] = json!([tree("/srv/../etc/rogue", "/x")]))?, "without . and ..")?;
    let many: Vec<_> = (0..257).map(|n| tree(&format!("/srv/{n}"), &format!("/{n}"))).collect();
    refused(lab, &offer(|o| o["trees"] = many.into())?, "more than the 256")?;
    // One that joins what another container brings has to say which, and that one must come from the same peer.
    let joins = |owner: Value| {
        offer(|o| {
            (o["network"], o["joined_network"], o["network_owner"]) = (Value::Null, "/run/netns/rogue".into(), owner);
        })
    };
    refused(lab, &joins(Value::Null)?, "no container brings")?;

    let made = lab.check("b", &["sh", "-c", "ls -d /tmp/owned* /run/netns/rogue /run/tranship/bundles/rogue /etc/cron.d/rogue /srv/[0-9]* 2>/dev/null || true"])?;
    ensure!(made.trim().is_empty(), "there is {made}");
    // What nobody has offered can be neither committed nor asked for, and a node's link decides nothing of another migration.
    let mut link = dial(lab, Some(&"m-nobodys".parse()?))?;
    let answer = ask(&mut link, &Request::Commit)?;
    ensure!(matches!(answer, Response::Failed { .. }), "{answer:?}");
    lab.check("b", &["rmdir", "/tmp/rogue-root"])?;
    reload(lab, "b", &right).map(drop)
}

/// Rules are told by a dry run as by a move, hold from a reload on, and a configuration that is wrong changes nothing.
fn rules_hold_from_a_reload_on(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let right = configuration(lab, "b")?;
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    Redis::connect(lab, IP, PATIENCE)?;
    let mut counter = CounterClient::start(lab, (IP, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let blocked = |words: &[&str]| -> Result<()> {
        let refusal = refused_move(lab, "a", NAME, "b")?;
        let fits = refusal.blockers.iter().all(|blocker| blocker.kind == BlockerKind::Policy);
        ensure!(fits && words.iter().all(|word| refusal.text.contains(word)), "{words:?} not in {refusal:#?}");
        let dry = lab.exec("a", &["tranship", "move", NAME, "--to", "b", "--dry-run"])?;
        let said = String::from_utf8_lossy(&dry.stdout).into_owned() + &String::from_utf8_lossy(&dry.stderr);
        ensure!(dry.status.code() == Some(3) && said.contains("does not accept container"), "{}: {said}", dry.status);
        Ok(())
    };
    reload(lab, "b", &of_peer_a(&right, "")?)?;
    blocked(&["node b does not accept container policed from node a", "/usr of the node is mounted", "[peers.a]"])?;
    reload(lab, "b", &of_peer_a(&right, "a.accept.binds = [\"/\"]\na.accept.containers = [\"web-*\"]\n")?)?;
    blocked(&["it is none of those that may come"])?;

    let said = read_again(lab, "b", &of_peer_a(&right, "a.accept.bind = [\"/\"]\n")?)?;
    ensure!(said.contains("was not taken") && said.contains("unknown field `bind`"), "{said}");
    blocked(&["it is none of those that may come"])?;
    let doctor = lab.exec("b", &["tranship", "doctor"])?;
    let told = String::from_utf8_lossy(&doctor.stdout).into_owned();
    ensure!(doctor.status.code() == Some(1) && told.contains(CONFIGURATION) && told.contains("`bind`"), "{told}");

    let fits = of_peer_a(&right, "a.accept.binds = [\"/:ro\"]\na.accept.containers = [\"poli*\"]\n")?;
    let said = reload(lab, "b", &fits.replacen("[runc]", "[memory]\ntracker = \"hash\"\n[runc]", 1))?;
    ensure!(said.contains("[memory]"), "what takes a restart is not named: {said}");
    lab.check("b", &["tranship", "doctor"])?;
    lab.move_container("a", NAME, "b")?;
    connection_alive(&mut counter)?;
    reload(lab, "b", &right)?;
    drop(counter);
    remove(lab, NAME)
}

/// Ordinary containers of each engine come by the default, but for the directories of the node that the lab's have mounted, and the file
/// that the lab has `ctr` write their output to.
fn ordinary_containers_of_all_engines_may_come(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let right = configuration(lab, "b")?;
    reload(lab, "b", &of_peer_a(&right, "a.accept.binds = [\"/usr:ro\", \"/etc:ro\", \"/run/cache.1.log\"]\n")?)?;
    let docker: &[&str] =
        &["--volume", "policed:/data", "--cap-add", "NET_ADMIN", "--tmpfs", "/scratch", "--memory", "256m"];
    for (engine, number, options) in [(DOCKER, 71, docker), (PODMAN, 72, docker), (CONTAINERD, 73, &[])] {
        let moved = || -> Result<()> {
            let mut counter = engine.start(lab, number, options, &[])?;
            engine.moves(lab, &mut counter, "a", "b")?;
            drop(counter);
            engine.remove(lab, "b")
        };
        moved().with_context(|| engine.engine.to_owned())?;
    }
    reload(lab, "b", &right).map(drop)
}

/// Puts the CA's files of a node there.
fn give_files(lab: &Lab, node: &str) -> Result<()> {
    for file in ["node.crt", "node.key"] {
        fs::copy(Path::new(CA).join(node).join(file), lab.path(node, format!("/etc/tranship/tls/{file}"))?)?;
    }
    Ok(())
}

fn init(lab: &Lab, arguments: &[&str]) -> Result<()> {
    let program = tranship_lab::find_program("tranship")?;
    let output = std::process::Command::new(program).args(["init", "--dir", CA]).args(arguments).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list = Path::new(CA).join("ca.crl");
    if list.exists() {
        fs::copy(list, lab.path("b", "/etc/tranship/tls/ca.crl")?)?;
    }
    Ok(())
}

/// A node's certificate is renewed, pinned and revoked while its agent and its container run.
fn certificates_are_renewed_and_revoked_without_a_restart(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let (of_a, of_b) = (configuration(lab, "a")?, configuration(lab, "b")?);
    lab.run("a", NAME, &RunOptions::new(IP, redis_command()))?;
    let mut client = Redis::connect(lab, IP, PATIENCE)?;
    let agents = [lab.agent_pid("a")?, lab.agent_pid("b")?];

    init(lab, &["--node", "b", "--renew"])?;
    let before = lab.check("b", &["cat", "/etc/tranship/tls/node.crt"])?;
    give_files(lab, "b")?;
    reload(lab, "b", &of_b)?;
    ensure!(lab.check("b", &["cat", "/etc/tranship/tls/node.crt"])? != before, "the certificate is the old one");
    second_move_succeeds(lab, NAME)?;
    client.call(&["PING"])?;

    // The old certificate of node a is revoked; the one that replaces it is good.
    init(lab, &["--node", "a", "--revoke"])?;
    let with_list = of_b.replacen("[tls]\n", "[tls]\ncrl = \"/etc/tranship/tls/ca.crl\"\n", 1);
    reload(lab, "b", &with_list)?;
    let refusal = refused_move(lab, "b", NAME, "a")?;
    ensure!(
        refusal.blockers.iter().any(|b| b.kind == BlockerKind::Untrusted) && refusal.text.contains("it was revoked"),
        "{refusal:#?}"
    );
    init(lab, &["--node", "a", "--renew"])?;
    give_files(lab, "a")?;
    reload(lab, "a", &of_a)?;

    let pinned = |digits: &str| {
        let peer = format!("\na.fingerprint = \"sha256:{digits}\"\na.address = \"");
        with_list.replacen("\na = \"", &peer, 1)
    };
    reload(lab, "b", &pinned(&"0f".repeat(32)))?;
    let refusal = refused_move(lab, "b", NAME, "a")?;
    ensure!(refusal.text.contains("another certificate"), "{refusal:#?}");
    let shown = refusal
        .text
        .split("sha256:")
        .nth(1)
        .and_then(|text| text.get(..64))
        .context("no fingerprint is told")?
        .to_owned();
    reload(lab, "b", &pinned(&shown))?;
    second_move_succeeds(lab, NAME)?;
    client.call(&["PING"])?;
    ensure!([lab.agent_pid("a")?, lab.agent_pid("b")?] == agents, "an agent was restarted");
    reload(lab, "b", &of_b)?;
    fs::remove_file(lab.path("b", "/etc/tranship/tls/ca.crl")?)?;
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("a_rogue_peer_becomes_root_by_no_configuration", a_rogue_peer_becomes_root_by_no_configuration),
        ("rules_hold_from_a_reload_on", rules_hold_from_a_reload_on),
        ("ordinary_containers_of_all_engines_may_come", ordinary_containers_of_all_engines_may_come),
        (
            "certificates_are_renewed_and_revoked_without_a_restart",
            certificates_are_renewed_and_revoked_without_a_restart,
        ),
    ])
}
