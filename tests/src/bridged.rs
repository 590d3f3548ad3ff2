//! Containers that talk to each other on a bridge of one node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tranship_api::{GroupPlan, Plan};
use tranship_lab::Lab;

use crate::kept::ECHO;
use crate::managed::Managed;
use crate::runner::wait_until;

/// Has bytes sent back over one connection, and counts them in a file; ends where the connection does.
const ASK: &str = "
import socket, sys, time
for attempt in range(100):
    try: peer = socket.create_connection((sys.argv[1], 7000)); break
    except OSError: time.sleep(0.1)
count = 0
while True:
    peer.sendall(b'x')
    if peer.recv(1) != b'x': raise SystemExit('the connection has ended')
    count += 1
    with open('/tmp/count', 'w') as file: file.write(str(count))
    time.sleep(0.005)
";

const NETWORK: &str = "shop";
const OPTIONS: [&str; 6] =
    ["--volume", "/usr:/usr:ro", "--volume", "/etc/alternatives:/etc/alternatives:ro", "--tmpfs", "/tmp"];

/// The plan of a container's move, by `tranship move --dry-run`.
///
/// # Errors
/// If there is none.
pub fn dry_run(lab: &Lab, from: &str, name: &str, to: &str) -> Result<Plan> {
    let said = lab.check(from, &["tranship", "move", name, "--to", to, "--dry-run", "--json"])?;
    serde_json::from_str(&said).with_context(|| said.clone())
}

impl Managed {
    /// Two containers on a bridge of one node talk: the plan of one of them names the other, and the command that it
    /// names moves both with their connection, and back. `resolves` says whether the engine resolves names there;
    /// `more` are options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn stays_together_on_a_bridge(&self, lab: &Lab, resolves: bool, more: &[&str]) -> Result<()> {
        (self.prepare)(lab)?;
        for node in ["a", "b"] {
            (self.command)(
                lab,
                node,
                &["network", "create", "--driver", "bridge", "--subnet", "10.79.0.0/24", NETWORK],
            )?;
        }
        let run = |name: &str, ip: &str, command: &[&str]| {
            let named = ["run", "--detach", "--name", name, "--network", NETWORK, "--ip", ip];
            (self.command)(lab, "a", &[&named[..], &OPTIONS, more, &[self.image], command].concat())
        };
        run("db", "10.79.0.5", &["python3", "-c", ECHO])?;
        // Only its name has anything to do with the others.
        run("idle", "10.79.0.7", &["sleep", "1000"])?;
        let peer = if resolves { "db" } else { "10.79.0.5" };
        run("app", "10.79.0.6", &["python3", "-c", ASK, peer])?;
        let count = |node: &str| -> Result<u64> {
            // The file is not there before the first answer, and empty for an instant each time.
            let said = (self.command)(lab, node, &["exec", "app", "sh", "-c", "cat /tmp/count || true"])?;
            Ok(said.trim().parse().unwrap_or(0))
        };
        let goes_on = |node: &str| {
            let before = wait_until("a count", Duration::from_secs(20), || Ok(Some(count(node)?).filter(|n| *n > 0)))?;
            wait_until("an answer on the connection", Duration::from_secs(20), || {
                Ok((count(node)? > before + 20).then_some(()))
            })
            .with_context(|| format!("the connection stands still on {node} at {before}"))
        };
        goes_on("a")?;

        let plan = dry_run(lab, "a", "app", "b")?;
        let [network] = plan.local_networks.as_slice() else { anyhow::bail!("the plan has {:?}", plan.local_networks) };
        ensure!(network.name == NETWORK && network.together == ["app", "db"], "{network:?}");
        let names = |list: &[&str]| if resolves { list.iter().map(ToString::to_string).collect() } else { Vec::new() };
        let found: Vec<_> =
            network.neighbours.iter().map(|n| (&*n.container, n.connections, n.names.clone())).collect();
        let mut wanted = vec![("db", 1, names(&["db"]))];
        if resolves {
            wanted.push(("idle", 0, names(&["idle"])));
        }
        ensure!(found == wanted, "the plan names {found:?}");
        let text = lab.check("a", &["tranship", "move", "app", "--to", "b", "--dry-run"])?;
        let command = text.lines().map(str::trim).find(|line| line.starts_with("tranship move-group"));
        let command = command.with_context(|| format!("no command in {text}"))?;
        // From the other end of the connection it is the same.
        let of_db = dry_run(lab, "a", "db", "b")?;
        ensure!(of_db.local_networks.iter().any(|n| n.together == ["db", "app"]), "{:?}", of_db.local_networks);

        lab.check("a", &command.split_whitespace().collect::<Vec<_>>())?;
        goes_on("b")?;
        if resolves {
            let look = "import socket; print(socket.gethostbyname('db'))";
            let said = (self.command)(lab, "b", &["exec", "app", "python3", "-c", look])?;
            ensure!(said.trim() == "10.79.0.5", "on b the name is that of {said:?}");
        }
        // Nobody is left behind.
        let back = ["tranship", "move-group", "--containers", "app", "db", "--to", "a"];
        let said = lab.check("b", &[&back[..], &["--dry-run", "--json"]].concat())?;
        let plan: GroupPlan = serde_json::from_str(&said).with_context(|| said.clone())?;
        let parted = |plan: &Plan| !plan.local_networks.is_empty();
        ensure!(!plan.members.iter().filter_map(|member| member.plan.as_ref()).any(parted), "{plan:?}");
        lab.check("b", &back)?;
        goes_on("a").context("back again, one after the other")?;

        // Whoever empties the node need not know who talks to whom.
        let said = lab.check("a", &["tranship", "evacuate", "--to", "b", "--json"])?;
        let rows: Vec<Value> = serde_json::from_str(&said).with_context(|| said.clone())?;
        for (name, with) in [("app", json!(["db"])), ("db", json!(["app"])), ("idle", Value::Null)] {
            let row = rows.iter().find(|row| row["container"] == name).with_context(|| said.clone())?;
            ensure!(row["fate"] == "moved" && row["together_with"] == with, "{row}");
        }
        goes_on("b").context("on the node that took all")?;

        (self.command)(lab, "b", &["rm", "--force", "app", "db", "idle"])?;
        self.release(lab, &["app", "db", "idle"])?;
        ["a", "b"].iter().try_for_each(|node| Ok((self.command)(lab, node, &["network", "rm", NETWORK]).map(drop)?))
    }

    /// The plan of a container on a network whose segment the nodes share names no network. The address is that of this
    /// number.
    ///
    /// # Errors
    /// If not.
    pub fn is_parted_from_nobody_on_a_shared_segment(&self, lab: &Lab, number: u8) -> Result<()> {
        let counter = self.start(lab, number, &[], &[])?;
        let plan = dry_run(lab, "a", self.name, "b")?;
        ensure!(plan.local_networks.is_empty() && plan.blockers.is_empty(), "{plan:?}");
        drop(counter);
        self.remove(lab, "a")
    }
}
