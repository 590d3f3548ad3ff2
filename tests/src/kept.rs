//! Containers that go on talking across two nodes after one of them has moved off their bridge.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::{Lab, LabError};

use crate::agents::{Log, restart_agent};
use crate::bridged::dry_run;
use crate::managed::Managed;
use crate::moves::refused_move_with;
use crate::runner::wait_until;

/// Sends back whatever it receives on port 7000.
pub const ECHO: &str = "
import socket, threading
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(('', 7000))
server.listen()
def serve(peer):
    while data := peer.recv(70000): peer.sendall(data)
while True: threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
";

/// Has blocks of bytes sent back over one connection, each unlike the one before, and counts them in a file; ends where
/// one is not as it was sent.
pub const ASK: &str = "
import os, socket, sys, time
for attempt in range(100):
    try: peer = socket.create_connection((sys.argv[1], 7000)); break
    except OSError: time.sleep(0.1)
count = 0
while True:
    block = count.to_bytes(8, 'big') * (1 + count % 500)
    peer.sendall(block)
    back = b''
    while len(back) < len(block):
        data = peer.recv(len(block) - len(back))
        if not data: raise SystemExit('the connection has ended')
        back += data
    if back != block: raise SystemExit('bytes are lost')
    count += 1
    with open('/tmp/new', 'w') as file: file.write(str(count))
    os.rename('/tmp/new', '/tmp/count')
    time.sleep(0.005)
";

/// Has the gateway's MAC looked for, and prints it.
const GATEWAY: &str = "
import socket, time
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('10.79.0.1', 9))
for attempt in range(100):
    macs = [line.split()[3] for line in open('/proc/net/arp') if line.startswith('10.79.0.1 ')]
    if macs and macs[0] != '00:00:00:00:00:00': break
    time.sleep(0.05)
print(macs[0])
";

const NETWORK: &str = "shop";
const SUBNET: [&str; 7] = ["network", "create", "--driver", "bridge", "--subnet", "10.79.0.0/24", NETWORK];
const OPTIONS: [&str; 6] =
    ["--volume", "/usr:/usr:ro", "--volume", "/etc/alternatives:/etc/alternatives:ro", "--tmpfs", "/tmp"];
const DELETE_DEVICE: &str = "ip link delete $(ip -o link show type vxlan | cut -d: -f2)";
/// How long what follows a move may take: the nodes ask each other every 10 s.
const SETTLED: Duration = Duration::from_secs(60);

/// Runs a command of a container on a node; what it prints.
type Exec<'a> = &'a dyn Fn(&str, &str, &[&str]) -> Result<String, LabError>;

/// Two containers that talk: `db` sends back what `app` sends.
pub struct Talk<'a> {
    /// Where they live.
    pub lab: &'a Lab,
    /// Runs a command in one of them.
    pub exec: Exec<'a>,
}

impl Talk<'_> {
    /// How many blocks `app`, which is on this node, has had back.
    fn count(&self, node: &str) -> Result<u64> {
        Ok((self.exec)(node, "app", &["cat", "/tmp/count"])?.trim().parse()?)
    }

    /// Blocks go on being sent back to `app`, which is on this node.
    ///
    /// # Errors
    /// If not.
    pub fn goes_on(&self, node: &str) -> Result<()> {
        let before = wait_until("a count", Duration::from_secs(20), || Ok(self.count(node).ok().filter(|n| *n > 0)))?;
        let more = || Ok((self.count(node)? > before + 50).then_some(()));
        wait_until("blocks on the connection", SETTLED, more)
            .with_context(|| format!("the connection stands still on {node} at {before}"))
    }

    /// Moves a container.
    ///
    /// # Errors
    /// If it does not move.
    pub fn move_it(&self, name: &str, from: &str, to: &str, options: &[&str]) -> Result<()> {
        let command = [&["tranship", "move", name, "--to", to], options].concat();
        Ok(self.lab.check(from, &command).map(drop)?)
    }

    /// The kept paths of a node, as `tranship status` shows them.
    fn kept(&self, node: &str) -> Result<Vec<String>> {
        let text = self.lab.check(node, &["tranship", "status"])?;
        Ok(text.lines().filter(|line| line.contains("is held together")).map(str::to_owned).collect())
    }

    /// Both nodes keep the path, for `app`, which is on b.
    ///
    /// # Errors
    /// If not.
    pub fn is_kept(&self) -> Result<()> {
        for (node, peer) in [("a", "b"), ("b", "a")] {
            let kept = self.kept(node)?;
            let wanted = format!("together with node {peer} by VXLAN tship-");
            let fits = |line: &String| line.contains(&wanted) && line.ends_with("for app (on b)");
            ensure!(kept.len() == 1 && kept.iter().all(fits), "status of {node} shows {kept:?}");
            let said = self.lab.check(node, &["tranship", "doctor"])?;
            ensure!(said.contains("path between nodes"), "doctor on {node} prints {said}");
        }
        Ok(())
    }

    /// Neither node has anything of a path any more.
    ///
    /// # Errors
    /// If one has after a while.
    pub fn nothing_is_left(&self) -> Result<()> {
        const LOOK: &str =
            "ip -o link show type vxlan; nft list tables | grep tship; ls /var/lib/tranship/paths 2> /dev/null; true";
        for node in ["a", "b"] {
            let mut left = String::new();
            wait_until("the path to be gone", SETTLED, || {
                left = self.lab.check(node, &["sh", "-c", LOOK])?;
                Ok(left.trim().is_empty().then_some(()))
            })
            .with_context(|| format!("node {node} has {left:?}"))?;
            ensure!(self.kept(node)?.is_empty(), "status of {node} shows {:?}", self.kept(node)?);
            let said = self.lab.check(node, &["tranship", "doctor"])?;
            ensure!(said.contains("no move has left anything"), "doctor on {node} prints {said}");
        }
        Ok(())
    }

    /// `app` moves to b with its path kept, and back; the agents are killed meanwhile, and moves fail.
    ///
    /// # Errors
    /// If a connection breaks, or something is left.
    pub fn goes_on_with_its_path_kept(&self, while_apart: impl Fn() -> Result<()>) -> Result<()> {
        let lab = self.lab;
        self.goes_on("a")?;
        let plan = dry_run(lab, "a", "app", "b")?;
        ensure!(plan.local_networks.len() == 1 && !plan.local_networks[0].kept, "{:?}", plan.local_networks);
        let said = lab.check("a", &["tranship", "move", "app", "--to", "b", "--dry-run"])?;
        ensure!(said.contains("or add --keep-path"), "the plan does not offer it: {said}");
        let said = lab.check("a", &["tranship", "move", "app", "--to", "b", "--dry-run", "--keep-path"])?;
        ensure!(said.contains("goes on reaching db on a, by a VXLAN") && !said.contains("warning"), "{said}");
        self.nothing_is_left().context("after plans")?;

        for (node, fault) in [
            ("a", "source.transfer.before.error"),
            ("b", "destination.restore.before.error"),
            ("a", "source.arm.after.die"),
            ("b", "destination.engine.after.die"),
        ] {
            restart_agent(lab, node, fault)?;
            let output = lab.exec("a", &["tranship", "move", "app", "--to", "b", "--keep-path"])?;
            ensure!(!output.status.success(), "with {fault} the move ended with {}", output.status);
            if fault.ends_with("die") {
                // As of an agent that dies before it has made the device of its record.
                lab.check(node, &["sh", "-c", DELETE_DEVICE])?;
            }
            restart_agent(lab, node, "")?;
            self.goes_on("a").context(fault)?;
            self.nothing_is_left().context(fault)?;
        }

        self.move_it("app", "a", "b", &["--keep-path"])?;
        self.goes_on("b").context("apart")?;
        self.is_kept()?;
        while_apart()?;
        for node in ["a", "b"] {
            restart_agent(lab, node, "")?;
            self.goes_on("b").with_context(|| format!("with a new agent on {node}"))?;
        }
        self.is_kept().context("with new agents")?;
        // What the kernel has lost, as after a restart of the host, is made again.
        lab.check("a", &["sh", "-c", DELETE_DEVICE])?;
        self.goes_on("b").context("without a device for a while")?;
        self.filters_come_back()?;

        // A move back that is undone leaves the devices as they are.
        let before = self.devices()?;
        restart_agent(lab, "a", "destination.restore.before.error")?;
        let output = lab.exec("b", &["tranship", "move", "app", "--to", "a", "--keep-path"])?;
        ensure!(output.status.code() == Some(1), "the move back ended with {}", output.status);
        restart_agent(lab, "a", "")?;
        ensure!(self.devices()? == before, "the devices are {:?}, not {before:?}", self.devices()?);
        self.goes_on("b").context("after a move back that was undone")?;
        self.is_kept().context("after a move back that was undone")?;

        self.move_it("app", "b", "a", &[])?;
        self.goes_on("a").context("back again")?;
        self.nothing_is_left().context("back again")?;

        self.has_no_names("a", "db").context("back again")?;

        self.move_it("app", "a", "b", &["--keep-path"])?;
        self.goes_on("b").context("apart again")?;
        lab.check("a", &["tranship", "release", "app"])?;
        self.nothing_is_left().context("released")?;
        self.has_no_names("a", "db").context("released")?;
        self.has_no_names("b", "app").context("released")?;
        self.move_it("app", "b", "a", &[])?;
        self.goes_on("a").context("back again after the release")?;

        self.move_it("app", "a", "b", &["--keep-path"])?;
        self.goes_on("b").context("apart once more")?;
        self.move_it("db", "a", "b", &[])?;
        self.goes_on("b").context("both on b")?;
        self.nothing_is_left().context("both on b")?;

        let group = |from: &str, to: &str, order: &str| {
            let group = ["tranship", "move-group", "--containers", "app", "db", "--to", to, order, "--keep-path"];
            lab.check(from, &group).map(drop).with_context(|| format!("a group that moves {order}"))
        };
        group("b", "a", "--all-at-once")?;
        self.goes_on("a").context("both on a")?;
        self.nothing_is_left().context("both on a")?;
        let logs = [Log::mark(lab, "a")?, Log::mark(lab, "b")?];
        group("a", "b", "--atomic")?;
        let made = logs.iter().any(|log| log.text().contains("a kept path was made"));
        ensure!(!made, "a group that moves as a whole makes a path");
        self.goes_on("b").context("both on b again")?;
        self.nothing_is_left().context("both on b again")
    }

    /// The number, the UDP port and the addresses of each node's device.
    fn devices(&self) -> Result<Vec<String>> {
        let device = |node: &&str| {
            Ok(self.lab.check(
                node,
                &["sh", "-c", "ip -d -o link show type vxlan | grep -o '^[0-9]*\\|vxlan id .* dstport [0-9]*'"],
            )?)
        };
        ["a", "b"].iter().map(device).collect()
    }

    /// Filters that somebody has removed are made again.
    ///
    /// # Errors
    /// If not.
    fn filters_come_back(&self) -> Result<()> {
        const TABLES: &str = "nft list tables | grep tship-";
        for node in ["a", "b"] {
            let before = self.lab.check(node, &["sh", "-c", TABLES])?;
            let delete =
                format!("set -e; for line in $({TABLES} | tr ' ' ,); do nft delete $(echo $line | tr , ' '); done");
            self.lab.check(node, &["sh", "-c", &delete])?;
            wait_until("the filters", SETTLED, || {
                let now = self.lab.exec(node, &["sh", "-c", TABLES])?;
                Ok((String::from_utf8_lossy(&now.stdout) == before).then_some(()))
            })
            .with_context(|| format!("node {node} had {before}"))?;
        }
        Ok(())
    }

    /// A container has no names of those on the other node.
    fn has_no_names(&self, node: &str, name: &str) -> Result<()> {
        let hosts = (self.exec)(node, name, &["cat", "/etc/hosts"])?;
        ensure!(!hosts.contains("on another node"), "{name} on {node} has {hosts}");
        Ok(())
    }
}

impl Managed {
    /// Two containers of an engine talk on a bridge of node a; one moves with its path kept, and comes back. `resolves`
    /// says whether the engine resolves names there; `more` are options of `run`. `while_away` plays while they are apart.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_path(
        &self,
        lab: &Lab,
        resolves: bool,
        more: &[&str],
        while_away: impl Fn(&Talk) -> Result<()>,
    ) -> Result<()> {
        (self.prepare)(lab)?;
        let engine = |node: &str, arguments: &[&str]| (self.command)(lab, node, arguments);
        for node in ["a", "b"] {
            engine(node, &SUBNET)?;
        }
        let run = |node: &str, name: &str, ip: &str, command: &[&str]| {
            let named = ["run", "--detach", "--name", name, "--network", NETWORK, "--ip", ip];
            let parent = format!("/tranship-lab/{node}");
            let more = if more.is_empty() { vec![] } else { vec!["--cgroup-parent", parent.as_str()] };
            engine(node, &[&named[..], &OPTIONS, &more, &[self.image], command].concat())
        };
        run("a", "db", "10.79.0.5", &["python3", "-c", ECHO])?;
        run("a", "app", "10.79.0.6", &["python3", "-c", ASK, if resolves { "db" } else { "10.79.0.5" }])?;
        run("b", "web", "10.79.0.5", &["sleep", "1000"])?;
        let exec = |node: &str, name: &str, command: &[&str]| engine(node, &[&["exec", name], command].concat());
        let talk = Talk { lab, exec: &exec };
        talk.goes_on("a")?;
        let refused = refused_move_with(lab, "a", "app", "b", &["--keep-path"])?;
        ensure!(refused.sentence.contains("container web on node b has 10.79.0.5, as db"), "{}", refused.sentence);
        engine("b", &["rm", "--force", "web"])?;

        let apart = || -> Result<()> {
            let look = |name| format!("import socket; print(socket.gethostbyname('{name}'))");
            for (node, container, name, address) in [("b", "app", "db", "10.79.0.5"), ("a", "db", "app", "10.79.0.6")] {
                if !resolves {
                    continue;
                }
                let mut said = String::new();
                wait_until("the name", SETTLED, || {
                    said = exec(node, container, &["python3", "-c", &look(name)]).unwrap_or_default();
                    Ok((said.trim() == address).then_some(()))
                })
                .with_context(|| format!("in {container} on {node}, {name} is {said:?}"))?;
            }
            // Each node's own gateway answers.
            for (node, container) in [("b", "app"), ("a", "db")] {
                let said = exec(node, container, &["python3", "-c", GATEWAY])?;
                let own = lab.check(node, &["sh", "-c", "ip -o addr show to 10.79.0.1 | cut -d' ' -f2"])?;
                let mac = lab.check(node, &["cat", &format!("/sys/class/net/{}/address", own.trim())])?;
                ensure!(said.trim() == mac.trim(), "{container} on {node} has the gateway {said}, not {mac}");
            }
            while_away(&talk)
        };
        talk.goes_on_with_its_path_kept(apart)?;
        let hosts = exec("b", "app", &["cat", "/etc/hosts"])? + &exec("b", "db", &["cat", "/etc/hosts"])?;
        ensure!(!hosts.contains("tranship"), "names are left: {hosts}");
        engine("b", &["rm", "--force", "app", "db"])?;
        self.release(lab, &["app", "db"])?;
        ["a", "b"].iter().try_for_each(|node| Ok(engine(node, &["network", "rm", NETWORK]).map(drop)?))
    }
}
