//! Addresses of a container that has left stay reserved in the engine of its node: the same for Docker and Podman.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tranship_lab::Lab;
use tranship_types::BlockerKind;

use crate::agents::restart_agent;
use crate::engines::HOLDS;
use crate::managed::Managed;
use crate::moves::{move_container, refused_move};
use crate::runner::wait_until;

/// A network with the addresses 10.79.9.2 to 10.79.9.6 for containers, the same on both nodes.
const NETWORK: &str = "held";
const CREATE: [&str; 5] = ["network", "create", "--subnet", "10.79.9.0/29", NETWORK];
/// Nodes are asked, and holders are looked for, every 10 s.
const LOOKED: Duration = Duration::from_secs(40);
const PATIENCE: Duration = Duration::from_secs(20);

impl Managed {
    fn ask(&self, lab: &Lab, node: &str, arguments: &[&str]) -> Result<String> {
        Ok((self.command)(lab, node, arguments)?)
    }

    /// The ids of the running containers that hold the container's addresses on a node.
    fn holders(&self, lab: &Lab, node: &str) -> Result<Vec<String>> {
        let filter = format!("label={HOLDS}={}", self.name);
        let ids = self.ask(lab, node, &["ps", "--no-trunc", "--quiet", "--filter", &filter])?;
        Ok(ids.lines().map(str::to_owned).collect())
    }

    /// Waits until its address is held on a node, by a container that nothing can hear: on a busy node the end of a move does not wait for it.
    ///
    /// # Errors
    /// If it is not.
    pub fn is_held(&self, lab: &Lab, node: &str, ip: Ipv4Addr) -> Result<()> {
        wait_until("the address to be held", LOOKED, || Ok(self.is_held_now(lab, node, ip).ok()))
            .or_else(|late| self.is_held_now(lab, node, ip).with_context(|| late.to_string()))
    }

    fn is_held_now(&self, lab: &Lab, node: &str, ip: Ipv4Addr) -> Result<()> {
        let holders = self.holders(lab, node)?;
        let [holder] = holders.as_slice() else { bail!("on {node} {} containers hold its address", holders.len()) };
        let telling = "{{.State.Pid}} {{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
        let told = self.ask(lab, node, &["inspect", "--format", telling, holder])?;
        let (pid, address) = told.trim().split_once(' ').context("it has no address")?;
        ensure!(address == ip.to_string(), "on {node} {address} is held, not {ip}");
        let links = lab.check(node, &["nsenter", "--net", "--target", pid, "ip", "-o", "link"])?;
        ensure!(links.lines().all(|line| line.starts_with("1: lo:")), "the holder has the interfaces {links}");
        Ok(())
    }

    fn is_free(&self, lab: &Lab, node: &str) -> Result<()> {
        let holders = self.holders(lab, node)?;
        ensure!(holders.is_empty(), "on {node} its address is held by {holders:?}");
        Ok(())
    }

    /// The nodes that have the container, by what a node says it holds for it.
    fn listed(&self, lab: &Lab, node: &str) -> Result<Vec<String>> {
        let list: Vec<Value> = serde_json::from_str(&lab.check(node, &["tranship", "release", "--json"])?)?;
        let own = list.iter().filter(|one| one["container"] == self.name);
        Ok(own.map(|one| one["node"].as_str().unwrap_or_default().to_owned()).collect())
    }

    /// The address that the next container on a node gets, which is removed again.
    fn next(&self, lab: &Lab, node: &str) -> Result<Ipv4Addr> {
        let next = self.start_next(lab, node, NETWORK)?;
        self.ask(lab, node, &["rm", "--force", "next"])?;
        Ok(next)
    }

    /// Starts the container on the network, with whatever address the engine gives it.
    fn start_held(&self, lab: &Lab) -> Result<Ipv4Addr> {
        (self.prepare)(lab)?;
        ["a", "b"].iter().try_for_each(|node| self.ask(lab, node, &CREATE).map(drop))?;
        self.run_on(lab, "a", (self.name, NETWORK), &["sleep", "10000"])?;
        let address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
        Ok(self.told(lab, "a", address)?.parse()?)
    }

    fn forget(&self, lab: &Lab) -> Result<()> {
        ["a", "b"].iter().try_for_each(|node| self.ask(lab, node, &["network", "rm", NETWORK]).map(drop))
    }

    /// The next containers on the node that it has left get other addresses; it comes back to its own, and leaves it free when it ends.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_address_reserved(&self, lab: &Lab) -> Result<()> {
        let ip = self.start_held(lab)?;
        let plan = lab.check("a", &["tranship", "move", self.name, "--to", "b", "--dry-run"])?;
        ensure!(plan.contains(&format!("node a keeps {ip} of network {NETWORK} reserved for it")), "{plan}");

        move_container(lab, "a", self.name, "b")?;
        self.is_held(lab, "a", ip)?;
        ensure!(self.listed(lab, "a")? == ["b"] && self.listed(lab, "b")?.is_empty());
        let given: Vec<Ipv4Addr> = (0..6).map(|_| self.next(lab, "a")).collect::<Result<_>>()?;
        ensure!(!given.contains(&ip), "the next containers have {given:?}");
        let listed = lab.check("a", &["tranship", "ls"])?;
        ensure!(!listed.contains("tranship-holds"), "tranship ls shows a holder: {listed}");
        let holder = self.ask(lab, "a", &["inspect", "--format", "{{.Name}}", &self.holders(lab, "a")?[0]])?;
        let holder = holder.trim().trim_start_matches('/').to_owned();
        ensure!(
            holder.starts_with(&format!("tranship-holds-{}.{NETWORK}.", self.name)),
            "the holder's name is {holder}"
        );
        refused_move(lab, "a", &holder, "b")?.names(BlockerKind::NoSuchContainer, "there is no container")?;
        lab.check("a", &["tranship", "doctor"])?;

        // Somebody removes the holder.
        self.ask(lab, "a", &["rm", "--force", &self.holders(lab, "a")?[0]])?;
        self.is_held(lab, "a", ip).context("after the holder's removal")?;

        // It does not come back after all.
        restart_agent(lab, "a", "destination.restore.after.error")?;
        ensure!(move_container(lab, "b", self.name, "a").is_err(), "the move did not fail");
        self.shows(lab, "b")?;
        self.is_held(lab, "a", ip).context("after a return that failed")?;
        restart_agent(lab, "a", "")?;

        move_container(lab, "b", self.name, "a").context("back again")?;
        self.is_free(lab, "a")?;
        self.is_held(lab, "b", ip)?;
        ensure!(self.listed(lab, "a")?.is_empty() && self.listed(lab, "b")? == ["a"]);
        move_container(lab, "a", self.name, "b").context("once more")?;
        self.is_free(lab, "b")?;

        // One that is stopped keeps its address.
        self.ask(lab, "b", &["stop", "--time", "0", self.name])?;
        std::thread::sleep(Duration::from_secs(12));
        self.is_held(lab, "a", ip).context("while it is stopped")?;
        self.ask(lab, "b", &["rm", "--force", self.name])?;
        wait_until("a to release the address", LOOKED, || Ok(self.listed(lab, "a")?.is_empty().then_some(())))?;
        self.is_free(lab, "a")?;
        wait_until("the image of holders to go", LOOKED, || {
            Ok((!self.ask(lab, "a", &["images"])?.contains("tranship-holder")).then_some(()))
        })?;
        let given: Vec<Ipv4Addr> = (0..6).map(|_| self.next(lab, "a")).collect::<Result<_>>()?;
        ensure!(given.contains(&ip), "nobody gets {ip} any more: {given:?}");
        self.forget(lab)
    }

    /// Agents that die, an address that somebody else gets nevertheless, and what is released by command.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_address_unless_it_is_released(&self, lab: &Lab) -> Result<()> {
        let ip = self.start_held(lab)?;
        // The node's agent dies when the original is gone; the next one knows what it holds.
        restart_agent(lab, "a", "source.release.after.die")?;
        let _ = move_container(lab, "a", self.name, "b");
        lab.start_agent("a", &[])?;
        wait_until("the move to end", PATIENCE, || {
            Ok(lab.check("a", &["tranship", "status", self.name])?.contains("moved").then_some(()))
        })?;
        self.is_held(lab, "a", ip).context("after the agent's death")?;

        // The address is lost while nobody looks.
        lab.kill_agent("a")?;
        let holder = self.holders(lab, "a")?.swap_remove(0);
        let started = self.ask(lab, "a", &["restart", "--time", "0", &holder]);
        // Docker names the runtime, and not what that says.
        let said = ["tranship-runc did not", "only the agent of Tranship starts it"];
        let is_refusal = |text: &str| said.iter().any(|said| text.contains(said));
        let refused = started.as_ref().is_err_and(|error| is_refusal(&error.to_string()));
        ensure!(refused, "a holder that would answer: {started:?}");
        self.ask(lab, "a", &["rm", "--force", &holder])?;
        let mut others = Vec::new();
        while others.last() != Some(&ip) {
            ensure!(others.len() < 6, "nobody gets {ip}: {others:?}");
            if !others.is_empty() {
                self.ask(lab, "a", &["rm", "--force", "next"])?;
            }
            others.push(self.start_next(lab, "a", NETWORK)?);
        }
        lab.start_agent("a", &[])?;
        let both = format!("container {} on node b and container next on this one", self.name);
        wait_until("the doctor to name both owners", LOOKED, || {
            Ok(lab.check("a", &["tranship", "doctor"])?.contains(&both).then_some(()))
        })?;
        wait_until("the list to tell", LOOKED, || {
            Ok(lab.check("a", &["tranship", "release"])?.contains("not held: container next").then_some(()))
        })?;
        let taken = format!("address {ip} of container {} is that of container next", self.name);
        refused_move(lab, "b", self.name, "a")?.names(BlockerKind::Network, &taken)?;
        self.ask(lab, "a", &["rm", "--force", "next"])?;
        self.is_held(lab, "a", ip).context("after the other's end")?;

        // It lives there, and its node says so.
        let refused = lab.exec("a", &["tranship", "release", self.name])?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success() && said.contains("on node b"), "{said}");
        let released = lab.check("a", &["tranship", "release", self.name, "--even-if-alive"])?;
        ensure!(released.contains(&ip.to_string()), "{released}");
        self.is_free(lab, "a")?;

        // A container that has the label from its image is none.
        let label = format!("{HOLDS}=nobody");
        let parent = "/tranship-lab/a";
        let mut like = vec!["run", "--detach", "--name", "like", "--label", &label, "--network", NETWORK];
        like.extend(["--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro"]);
        if self.engine != "Docker" {
            like.extend(["--cgroup-parent", parent]);
        }
        like.extend([self.image, "sleep", "1000"]);
        self.ask(lab, "a", &like)?;
        let listed = lab.check("a", &["tranship", "ls"])?;
        ensure!(listed.contains("like"), "tranship ls does not show it: {listed}");
        lab.check("a", &["tranship", "doctor"])?;
        self.ask(lab, "a", &["rm", "--force", "like"])?;

        // A holder of which there is no record; of one that cannot be read, nothing is removed.
        move_container(lab, "b", self.name, "a")?;
        move_container(lab, "a", self.name, "b")?;
        self.is_held(lab, "a", ip)?;
        let in_records =
            |command: &str| lab.check("a", &["sh", "-c", &format!("cd /var/lib/tranship/held && {command}")]);
        lab.kill_agent("a")?;
        in_records("for one in *.json; do mv $one $one.kept && echo { > $one; done")?;
        lab.start_agent("a", &[])?;
        let unread = lab.exec("a", &["tranship", "doctor", "--fix"])?;
        let text = String::from_utf8_lossy(&unread.stdout).into_owned();
        ensure!(!unread.status.success() && text.contains("cannot be read"), "{text}");
        self.is_held(lab, "a", ip).context("with a record that cannot be read")?;
        in_records("rm *.json")?;
        let found = lab.exec("a", &["tranship", "doctor"])?;
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        let named = text.contains("tranship-holds-") && text.contains(&format!("for {}", self.name));
        ensure!(!found.status.success() && named, "{text}");
        lab.check("a", &["tranship", "doctor", "--fix"])?;
        self.is_free(lab, "a")?;
        in_records("rm *.kept")?;

        // A node that is gone for good.
        move_container(lab, "b", self.name, "a")?;
        move_container(lab, "a", self.name, "b")?;
        self.is_held(lab, "a", ip)?;
        lab.kill_agent("b")?;
        lab.check("a", &["tranship", "release", self.name])?;
        self.is_free(lab, "a")?;
        lab.start_agent("b", &[])?;
        self.remove(lab, "b")?;
        self.forget(lab)
    }
}
