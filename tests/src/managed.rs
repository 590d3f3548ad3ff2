use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::{CLIENT, CounterClient, Lab, LabError, REDIS_PORT, Redis, patience, redis_command};
use tranship_types::BlockerKind;

use crate::agents::{Log, restart_agent};
use crate::bridged::dry_run;
use crate::limits::{has_limits, limits, set_limit};
use crate::moves::{Refusal, connection_alive, move_container};
use crate::runner::wait_until;

/// The longest that a client may wait: many times what a move takes, and less than the engines' own checkpoints do.
const GAP: Duration = Duration::from_millis(1500);
/// The same where the copy has to be made again, by another start of the engine's.
const GAP_WHEN_MADE_AGAIN: Duration = Duration::from_secs(5);
/// How long what a move has left may take to be cleared away.
const CLEARED: Duration = Duration::from_secs(30);

/// Starts a container in a node: name, address, image, options, command.
pub type Run = fn(&Lab, &str, &str, Ipv4Addr, &str, &[&str], &[String]) -> Result<(), LabError>;

/// What an engine's command line is like.
#[derive(Clone, Copy)]
pub enum Dialect {
    /// Docker's.
    Docker,
    /// `ctr`.
    Ctr,
}

/// An engine, and the container that scenarios move under it.
#[derive(Clone, Copy)]
pub struct Managed {
    /// What the engine is called.
    pub engine: &'static str,
    /// What its command line is like.
    pub dialect: Dialect,
    /// The container's name.
    pub name: &'static str,
    /// What the engine calls the lab's image.
    pub image: &'static str,
    /// Starts the engine in all nodes.
    pub prepare: fn(&Lab) -> Result<(), LabError>,
    /// Runs one of its commands in a node; what it prints.
    pub command: fn(&Lab, &str, &[&str]) -> Result<String, LabError>,
    /// Starts a container in one, with the host's /usr and /etc.
    pub run: Run,
    /// Starts one from an image that has all its files.
    pub run_whole: Run,
    /// Checks that the engine on a node has no container, and that nothing is left there of the one of this name.
    pub is_gone: fn(&Lab, &str, &str) -> Result<()>,
}

/// Watches directories and files that the image has or that it makes itself; to who connects to port 7000 it tells which of them it was
/// told about.
const OVERLAY_WATCHER: &str = r#"
import ctypes, os, socket, struct
libc = ctypes.CDLL(None)
os.makedirs('/srv/a/b c')
open('/srv/a/b c/file', 'w').close()
queue = libc.inotify_init1(os.O_NONBLOCK)
watched = ['/', '/srv', '/srv/a', '/srv/a/b c']
for path in watched: libc.inotify_add_watch(queue, path.encode(), 0x100)
libc.inotify_add_watch(queue, b'/srv/a/b c/file', 2)
libc.inotify_add_watch(queue, b'/srv/one', 0x20)
libc.inotify_add_watch(queue, b'/srv/all/sub', 0x100)
server = socket.socket()
server.bind(('', 7000))
server.listen()
while True:
    peer = server.accept()[0]
    for path in watched:
        open(path + '/new', 'w').close()
        os.unlink(path + '/new')
    open('/srv/a/b c/file', 'a').write('x')
    open('/srv/one').close()
    open('/srv/all/sub/new', 'w').close()
    os.unlink('/srv/all/sub/new')
    told, data, at = [], os.read(queue, 65536), 0
    while at < len(data):
        told.append(struct.unpack_from('i', data, at)[0])
        at += 16 + struct.unpack_from('I', data, at + 12)[0]
    peer.sendall(repr(sorted(told)).encode())
    peer.close()
"#;

impl Managed {
    /// Starts Redis in node `a`, at the address of this number, and a client that counts with it. Each scenario has an
    /// address of its own: the client remembers for a while which interface had one.
    ///
    /// # Errors
    /// If one of them does not start.
    pub fn start(&self, lab: &Lab, number: u8, options: &[&str], redis: &[&str]) -> Result<CounterClient> {
        (self.prepare)(lab)?;
        let (ip, mut command) = (Ipv4Addr::new(10, 77, 0, number), redis_command());
        command.extend(redis.iter().map(|&argument| argument.to_owned()));
        (self.run)(lab, "a", self.name, ip, self.image, options, &command)?;
        Redis::connect(lab, ip, Duration::from_secs(10))?;
        Ok(CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?)
    }

    /// The pid of the container's first process, as the engine says; `None` if it does not run.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn pid(&self, lab: &Lab, node: &str) -> Result<Option<String>> {
        match self.dialect {
            Dialect::Docker if self.names(lab, node, &[])?.trim() != self.name => Ok(None),
            Dialect::Docker => self.told(lab, node, "{{.State.Pid}}").map(Some),
            Dialect::Ctr => {
                let tasks = (self.command)(lab, node, &["tasks", "ls"])?;
                let mut rows = tasks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
                Ok(rows.find(|row| row[0] == self.name && row[2] == "RUNNING").map(|row| row[1].to_owned()))
            }
        }
    }

    /// What `inspect` says of the container, by a template.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn told(&self, lab: &Lab, node: &str, template: &str) -> Result<String> {
        Ok((self.command)(lab, node, &["inspect", "--format", template, self.name])?.trim().to_owned())
    }

    /// The names of the containers that run; `more` are options of `ps`.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn names(&self, lab: &Lab, node: &str, more: &[&str]) -> Result<String> {
        Ok((self.command)(lab, node, &[&["ps", "--format", "{{.Names}}"], more].concat())?)
    }

    /// Checks that the engine has no container on this node, and that nothing of this one is left there.
    ///
    /// # Errors
    /// If not.
    pub fn is_gone(&self, lab: &Lab, node: &str) -> Result<()> {
        (self.is_gone)(lab, node, self.name)
    }

    /// Runs a shell's script in the container; what it prints.
    ///
    /// # Errors
    /// The engine's refusal, or the script's failure.
    pub fn execute(&self, lab: &Lab, node: &str, script: &str) -> Result<String> {
        let (name, shell) = (self.name, ["/bin/sh", "-c", script]);
        let execute: &[&str] = match self.dialect {
            Dialect::Docker => &["exec", name],
            Dialect::Ctr => &["tasks", "exec", "--exec-id", "one", name],
        };
        Ok((self.command)(lab, node, &[execute, &shell].concat())?)
    }

    /// Removes the container, and has the nodes release its addresses, which they would do by themselves within 10 s.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn remove(&self, lab: &Lab, node: &str) -> Result<()> {
        match self.dialect {
            Dialect::Docker => (self.command)(lab, node, &["rm", "--force", self.name]).map(drop)?,
            Dialect::Ctr => return Ok(lab.ctr_remove(node, self.name)?),
        }
        self.release(lab, &[self.name])
    }

    /// Has the nodes release the addresses of containers that were removed.
    ///
    /// # Errors
    /// If a node cannot be asked.
    pub fn release(&self, lab: &Lab, containers: &[&str]) -> Result<()> {
        for (node, container) in lab.nodes().iter().flat_map(|node| containers.iter().map(move |one| (node, one))) {
            // One that holds none refuses.
            lab.exec(node, &["tranship", "release", "--even-if-alive", container])?;
        }
        Ok(())
    }

    /// Moves the container, and checks that the client has hardly seen it, that the one engine has it and that nothing of it is
    /// left to the other.
    ///
    /// # Errors
    /// If not.
    pub fn moves(&self, lab: &Lab, counter: &mut CounterClient, from: &str, to: &str) -> Result<()> {
        self.moves_within(lab, counter, (from, to), GAP)
    }

    fn moves_within(
        &self,
        lab: &Lab,
        counter: &mut CounterClient,
        nodes: (&str, &str),
        longest: Duration,
    ) -> Result<()> {
        let (from, to) = nodes;
        counter.mark()?;
        let report = move_container(lab, from, self.name, to)?;
        let seen = connection_alive(counter).with_context(|| format!("after the move from {from} to {to}"))?;
        let gap = seen.since_mark.longest.ms;
        eprintln!(
            "{from} → {to}: client gap {gap:.0} ms, blackout {:.0} ms, total {:.0} ms",
            report.blackout_ms.unwrap_or_default(),
            report.total_ms.unwrap_or_default()
        );
        ensure!(gap < patience(longest).as_secs_f64() * 1e3, "the client waited for {gap:.0} ms");
        self.is_gone(lab, from)?;
        self.shows(lab, to)
    }

    /// Checks that the engine shows the container as running.
    ///
    /// # Errors
    /// If it does not.
    pub fn shows(&self, lab: &Lab, node: &str) -> Result<()> {
        let (engine, name) = (self.engine, self.name);
        ensure!(self.pid(lab, node)?.is_some(), "{engine} on {node} does not show {name} as running");
        Ok(())
    }

    /// Options by which the engine starts a container again when it has ended; `ctr` has none.
    fn restarting(&self) -> &'static [&'static str] {
        match self.dialect {
            Dialect::Docker => &["--restart", "always"],
            Dialect::Ctr => &[],
        }
    }

    fn await_gone(&self, lab: &Lab, node: &str, after: &str) -> Result<()> {
        wait_until("the node to be as it was", CLEARED, || Ok(self.is_gone(lab, node).ok()))
            .with_context(|| format!("after {after}: {:?}", self.is_gone(lab, node)))
    }

    /// After each of some faults the container is its engine's as it was, and there is nothing of it on the destination. The
    /// address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn survives_failed_moves(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, self.restarting(), &[])?;
        let pid = self.pid(lab, "a")?;
        for fault in ["engine.after.error", "engine.after.kill-criu", "restore.after.error", "restore.after.die"] {
            restart_agent(lab, "b", &format!("destination.{fault}"))?;
            let output = lab.exec("a", &["tranship", "move", self.name, "--to", "b"])?;
            ensure!(output.status.code() == Some(1), "with {fault} the move ended with {}", output.status);
            connection_alive(&mut counter).with_context(|| format!("after {fault}"))?;
            ensure!(self.pid(lab, "a")? == pid, "after {fault} the container is another process");
            restart_agent(lab, "b", "")?;
            self.await_gone(lab, "b", fault)?;
        }
        self.moves(lab, &mut counter, "a", "b").context("after all the faults")?;
        drop(counter);
        self.remove(lab, "b")
    }

    /// Limits that were changed since the start, by the engine or in the cgroup, hold on the destination as well. The address is that of
    /// this number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_changed_limits(&self, lab: &Lab, number: u8, update: &[&str]) -> Result<()> {
        if !has_limits() {
            eprintln!("skipped: version 2 of cgroups has no controllers here");
            return Ok(());
        }
        let mut counter = self.start(lab, number, &[], &[])?;
        let pid = |node: &str| self.pid(lab, node)?.context("it does not run");
        if !update.is_empty() {
            (self.command)(lab, "a", &[update, &[self.name]].concat())?;
        }
        set_limit(lab, "a", &pid("a")?, ("pids", &["pids.max"]), "77")?;
        let reservation = ["memory.soft_limit_in_bytes", "memory.low"];
        set_limit(lab, "a", &pid("a")?, ("memory", &reservation), "52428800")?;
        let before = limits(lab, "a", &pid("a")?)?;
        self.moves(lab, &mut counter, "a", "b")?;
        let now = limits(lab, "b", &pid("b")?)?;
        ensure!(now == before, "the limits were\n{before}\nand are\n{now}");
        drop(counter);
        self.remove(lab, "b")
    }

    /// What programs have written to the files that the engine makes for a container moves along, and the engine goes on writing to them. The
    /// address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_etc_files(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, &["--cap-add", "SYS_ADMIN"], &[])?;
        self.execute(lab, "a", "echo 10.77.0.9 db >> /etc/hosts; echo 'search here' > /etc/resolv.conf; echo own > /etc/hostname; hostname own")?;
        let look = "hostname; for f in hosts resolv.conf hostname; do cat /etc/$f; stat -c %y /etc/$f; done";
        let before = self.execute(lab, "a", look)?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            self.moves(lab, &mut counter, from, to)?;
            let now = self.execute(lab, to, look)?;
            ensure!(now == before, "the files were\n{before}\nand on {to} they are\n{now}");
        }
        drop(counter);
        self.remove(lab, "a")
    }

    /// Watches of inotify on directories and files of the root filesystem, an overlay, and on a file and a directory of the node go on. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_watches(&self, lab: &Lab, number: u8) -> Result<()> {
        (self.prepare)(lab)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        let command = ["python3", "-c", OVERLAY_WATCHER].map(ToOwned::to_owned);
        for node in ["a", "b"] {
            lab.check(node, &["sh", "-c", "mkdir -p /run/shared/sub && echo x > /run/shared/file"])?;
        }
        let mounts = ["--volume", "/run/shared/file:/srv/one:ro", "--volume", "/run/shared:/srv/all"];
        (self.run)(lab, "a", self.name, ip, self.image, &mounts, &command)?;
        let ask = format!("cat </dev/tcp/{ip}/7000");
        let told =
            || wait_until("the watcher", Duration::from_secs(20), || Ok(lab.check(CLIENT, &["bash", "-c", &ask]).ok()));
        let before = told()?;
        ensure!(before.ends_with("[1, 2, 3, 4, 5, 6, 7]"), "before the moves it is told {before:?}");
        for (from, to) in [("a", "b"), ("b", "a")] {
            move_container(lab, from, self.name, to)?;
            let now = told()?;
            ensure!(now == before, "it was told {before}, and on {to} it is told {now}");
        }
        self.remove(lab, "a")
    }

    /// A published port is published at the node that the container has gone to, and not at the other any more; what that means for
    /// connections is said ahead. `more` are options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn publishes_its_ports_there(&self, lab: &Lab, more: &[&str]) -> Result<()> {
        (self.prepare)(lab)?;
        for node in ["a", "b"] {
            let network = ["network", "create", "--driver", "bridge", "--subnet", "10.78.0.0/24", "ports"];
            (self.command)(lab, node, &network)?;
        }
        let run = ["run", "--detach", "--name", self.name, "--network", "ports", "--ip", "10.78.0.5"];
        let options =
            ["--publish", "7000:6379", "--volume", "/usr:/usr:ro", "--volume", "/etc:/etc:ro", "--tmpfs", "/tmp"];
        let redis = redis_command();
        let command: Vec<&str> = redis.iter().map(String::as_str).collect();
        (self.command)(lab, "a", &[&run[..], &options, more, &["tranship-lab"], &command].concat())?;
        let count_at = |node: &str| -> Result<CounterClient> {
            let address = (lab.address(node)?, 7000).into();
            wait_until("the published port", Duration::from_secs(10), || {
                Ok(lab.connect(CLIENT, address, Duration::from_secs(1)).ok().map(drop))
            })?;
            Ok(CounterClient::start(lab, address, "counter", Duration::from_micros(500))?)
        };
        let mut counter = count_at("a")?;
        counter.wait_replies(100, Duration::from_secs(10))?;
        drop(counter);

        let words = "publishes 7000 for 6379/tcp; the destination publishes the same at its own address";
        let plan = lab.exec("a", &["tranship", "move", self.name, "--to", "b", "--dry-run", "--json"])?;
        let plan = String::from_utf8_lossy(&plan.stdout).into_owned();
        ensure!(plan.contains(words), "the plan says {plan}");
        // The kernel closes the counter's connection soon after the program.
        let translated = || dry_run(lab, "a", self.name, "b").map(|plan| plan.translated_connections);
        wait_until("the end of the first connection", Duration::from_secs(10), || {
            Ok((translated()? == 0).then_some(()))
        })?;
        let counter = count_at("a")?;
        let found = translated()?;
        ensure!(found == 1, "{found} connections of the container are translated");
        drop(counter);
        let report = move_container(lab, "a", self.name, "b")?;
        ensure!(report.ways.iter().any(|way| way.contains(words)), "the report has only {:?}", report.ways);

        count_at("b")?.wait_replies(100, Duration::from_secs(10)).context("at the destination's port")?;
        let old = lab.connect(CLIENT, (lab.address("a")?, 7000).into(), Duration::from_secs(1));
        ensure!(old.is_err(), "the source still answers at the port");
        self.remove(lab, "b")?;
        ["a", "b"].iter().try_for_each(|node| Ok((self.command)(lab, node, &["network", "rm", "ports"]).map(drop)?))
    }

    /// An image that is not there is sent, but for the layers that are; if either agent dies meanwhile, nothing of it is there. The
    /// address is that of this number, `more` are options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn takes_its_image_along(&self, lab: &Lab, number: u8, more: &[&str]) -> Result<()> {
        (self.prepare)(lab)?;
        // One layer that both nodes have, and one of 32 MiB that only the source has.
        let image = self.make_image(lab, "a", 32)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        (self.run)(lab, "a", self.name, ip, image, more, &redis_command())?;
        Redis::connect(lab, ip, Duration::from_secs(10))?;
        let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;

        let plan = lab.exec("a", &["tranship", "move", self.name, "--to", "b", "--dry-run"])?;
        let plan = String::from_utf8_lossy(&plan.stdout).into_owned();
        ensure!(
            plan.contains("image          up to ")
                && plan.contains(&format!("{image} is not on b; 1 of its 2 layers are there")),
            "the plan says {plan}"
        );
        let images = || self.images(lab, "b");
        let before = images()?;
        for dies in ["b", "a"] {
            let log = Log::mark(lab, "b")?;
            let mut moving = lab.move_command("a", self.name, "b")?;
            // Four seconds for the image.
            moving.args(["--bandwidth", "64mbit"]).stdout(Stdio::null()).stderr(Stdio::null());
            let mut moving = moving.spawn()?;
            wait_until("the image to be on its way", Duration::from_secs(20), || {
                Ok(log.text().contains("an image comes").then_some(()))
            })?;
            restart_agent(lab, dies, "")?;
            let ended = wait_until("the move to end", Duration::from_secs(30), || Ok(moving.try_wait()?))?;
            ensure!(!ended.success(), "the move succeeded although the agent of {dies} died");
            self.await_gone(lab, "b", "the agent's death")?;
            wait_until("the parts of the image to be gone", CLEARED, || Ok((images()? == before).then_some(())))
                .with_context(|| format!("with the agent of {dies} dead: {:?}, before {before:?}", images()))?;
        }
        counter.mark()?;
        let report = move_container(lab, "a", self.name, "b")?;
        connection_alive(&mut counter)?;
        let way = report.ways.iter().find(|way| way.starts_with("image: ")).context("no word of the image")?;
        ensure!(way.contains(image) && way.contains("1 of its 2 layers were there"), "{way}");
        eprintln!("{way}");
        let told = |node: &str| self.image_id(lab, node, image);
        ensure!(told("a")? == told("b")?, "the images are {} and {}", told("a")?, told("b")?);
        let said = self.execute(lab, "b", "id -u; pwd; stat -c %s own")?;
        ensure!(said == "1000\n/opt\n33554432\n", "the container has {said:?}");
        // What has come is whole: it can be saved again.
        let save: &[&str] = match self.dialect {
            Dialect::Docker => &["save", "--output", "/run/again.tar", image],
            Dialect::Ctr => &["images", "export", "/run/again.tar", image],
        };
        (self.command)(lab, "b", save)?;
        // An image is not sent where it is.
        let back = move_container(lab, "b", self.name, "a")?;
        ensure!(!back.ways.iter().any(|way| way.starts_with("image: ")), "{:?}", back.ways);
        drop(counter);
        self.remove(lab, "a")?;
        self.remove_image(lab, image)
    }

    /// A move that was decided comes to its end, also if the held copy is lost, or the agent dies before the original is
    /// removed. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn finishes_decided_moves(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, self.restarting(), &[])?;
        restart_agent(lab, "b", "destination.restore.after.kill-criu")?;
        self.moves_within(lab, &mut counter, ("a", "b"), GAP_WHEN_MADE_AGAIN)
            .context("when the held copy was lost, and made again")?;
        restart_agent(lab, "b", "source.release.before.die")?;
        let output = lab.exec("b", &["tranship", "move", self.name, "--to", "a"])?;
        ensure!(!output.status.success(), "the agent did not die before the release");
        connection_alive(&mut counter).context("with a source that died before the release")?;
        restart_agent(lab, "b", "")?;
        self.await_gone(lab, "b", "the agent's restart")?;
        self.shows(lab, "a")?;
        connection_alive(&mut counter)?;
        drop(counter);
        self.remove(lab, "a")
    }
}

impl Refusal {
    /// Checks that the move was blocked by something of this kind, whose cause has these words, and with a remedy.
    ///
    /// # Errors
    /// If not.
    pub fn names(&self, kind: BlockerKind, words: &str) -> Result<()> {
        let found = self.blockers.iter().any(|b| b.kind == kind && b.cause.contains(words) && !b.remedy.is_empty());
        ensure!(found && self.status == 3, "no blocker {kind:?} with {words:?}: {self:#?}");
        Ok(())
    }
}
