//! Ordinary set-ups that engines make of their containers, and what people do with them after a
//! move: the same for Docker and Podman.

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_lab::{CLIENT, CounterClient, Lab, REDIS_PORT, Redis, redis_command};
use tranship_types::BlockerKind;

use crate::limits::limits;
use crate::managed::Managed;
use crate::moves::{connection_alive, move_container, move_with, refused_move};
use crate::runner::wait_until;

/// What the lab's image needs of the host, with a `/usr/sbin` of its own, where `/sbin` leads.
const BINDS: [&str; 10] = [
    "--volume",
    "/usr/bin:/usr/bin:ro",
    "--volume",
    "/usr/lib:/usr/lib:ro",
    "--volume",
    "/usr/lib64:/usr/lib64:ro",
    "--volume",
    "/etc:/etc:ro",
    "--tmpfs",
    "/tmp",
];

/// Two processes take turns by semaphores with names and by one without, and count them in shared memory with a name
/// and in a removed file; both counts must be the same. To who connects to port 7000 it tells the count.
const POSIX_SHARER: &str = r#"
import ctypes, mmap, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
def semaphore(name):
    found = libc.sem_open(name, os.O_CREAT, 0o600, 0)
    assert found, os.strerror(ctypes.get_errno())
    return ctypes.c_void_p(found)
def memory(fd, size):
    os.ftruncate(fd, size)
    found = mmap.mmap(fd, size)
    os.close(fd)
    return found
ping, pong, visit, gone = [semaphore(name) for name in (b'/ping', b'/pong', b'/visit', b'/gone')]
libc.sem_unlink(b'/gone')
turns = memory(libc.shm_open(b'/turns', os.O_CREAT | os.O_RDWR, 0o600), 1 << 20)
removed = memory(libc.shm_open(b'/removed', os.O_CREAT | os.O_RDWR, 0o600), 1 << 20)
libc.shm_unlink(b'/removed')
def count(memory, by=0):
    number = int.from_bytes(memory[4096:4104], 'little') + by
    memory[4096:4104] = number.to_bytes(8, 'little')
    return number
def waited(semaphore):
    while libc.sem_wait(semaphore): assert ctypes.get_errno() == 4
if os.fork() == 0:
    while True:
        waited(ping)
        count(turns, 1)
        libc.sem_post(gone)
        libc.sem_post(pong)
if os.fork() == 0:
    while True:
        waited(visit)
        turns[0:4] = b'seen'
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(('', 7000))
server.listen()
server.settimeout(0.001)
while True:
    libc.sem_post(ping)
    waited(pong)
    waited(gone)
    count(removed, 1)
    try: peer = server.accept()[0]
    except TimeoutError: continue
    same = count(turns) == count(removed)
    peer.sendall(b'%d' % count(turns) if same else b'%d turns, %d in the removed file' % (count(turns), count(removed)))
    peer.close()
"#;

/// Asks a process of the sharer for a mark in the shared memory by the semaphore and the memory that have the names
/// now, and sees whether the turns go on.
const POSIX_VISITOR: &str = r#"
import ctypes, mmap, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
turns = mmap.mmap(libc.shm_open(b'/turns', os.O_RDWR, 0), 1 << 20)
turns[0:4] = bytes(4)
before = turns[4096:4104]
libc.sem_post(ctypes.c_void_p(libc.sem_open(b'/visit', 0)))
for _ in range(2000):
    if turns[0:4] == b'seen' and turns[4096:4104] != before: break
    time.sleep(0.01)
print('goes on' if turns[0:4] == b'seen' and turns[4096:4104] != before else 'stands still')
"#;

/// Writes numbered lines, the even ones to stdout, the others to stderr.
const LOG_WRITER: &str = r#"
import itertools, sys, time
for number in itertools.count():
    print(number, file=sys.stderr if number % 2 else sys.stdout, flush=True)
    time.sleep(0.001)
"#;

impl Managed {
    /// A container whose mounts lie behind symbolic links of its image moves there, back and on,
    /// with the content of its volume, and is described as before. The address is that of this
    /// number, `more` are options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_mounts_behind_links(&self, lab: &Lab, number: u8, more: &[&str]) -> Result<()> {
        (self.prepare)(lab)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        let linked = ["--volume", "/srv:/var/run/node", "--volume", "linked:/var/run/deep/data"];
        let options = [&BINDS[..], &linked, more].concat();
        (self.run_whole)(lab, "a", self.name, ip, self.image, &options, &redis_command())?;
        Redis::connect(lab, ip, Duration::from_secs(10))?;
        self.execute(lab, "a", "echo kept > /var/run/deep/data/file")?;
        let mounts = |node: &str| -> Result<Vec<String>> {
            let told = self.told(lab, node, "{{range .Mounts}}{{.Destination}} {{end}}")?;
            let mut all: Vec<String> = told.split_whitespace().map(str::to_owned).collect();
            all.sort();
            Ok(all)
        };
        let before = mounts("a")?;
        let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            self.moves(lab, &mut counter, from, to)?;
            let after = mounts(to)?;
            ensure!(after == before, "its mounts were {before:?}, and are {after:?}");
            let content = self.execute(lab, to, "cat /run/deep/data/file; ls -d /run/node")?;
            ensure!(content == "kept\n/run/node\n", "on {to} it has {content:?}");
        }
        drop(counter);
        (self.command)(lab, "b", &["stop", "--time", "1", self.name])?;
        (self.command)(lab, "b", &["start", self.name])?;
        Redis::connect(lab, ip, Duration::from_secs(10)).context("after stop and start on the destination")?;
        self.remove(lab, "b")?;
        ["a", "b"].iter().try_for_each(|node| Ok((self.command)(lab, node, &["volume", "rm", "linked"]).map(drop)?))
    }

    /// A process that the engine has started by exec is waited for, and refused by name where it
    /// does not end; `--retry` tries again until it has.
    ///
    /// # Errors
    /// If not.
    pub fn waits_for_processes_of_exec(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, &[], &[])?;
        let execute = |node: &str, seconds: &str| {
            (self.command)(lab, node, &["exec", "--detach", self.name, "sleep", seconds]).map(drop)
        };
        execute("a", "2")?;
        self.moves(lab, &mut counter, "a", "b").context("with a process that ends after two seconds")?;

        execute("b", "4321")?;
        let refusal = refused_move(lab, "b", self.name, "a")?;
        refusal.names(BlockerKind::Process, "was started by exec")?;
        ensure!(refusal.blockers.iter().all(|blocker| blocker.passes), "{refusal:?}");
        let mut moving = lab.move_command("b", self.name, "a")?;
        let mut moving = moving.args(["--retry", "9"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut said = moving.stderr.take().context("no stderr")?;
        let heard = std::thread::spawn(move || std::io::read_to_string(&mut said));
        // It is refused at least once.
        let reports = || lab.check("b", &["tranship", "history", "--json"]).map(|text| text.matches("\"m-").count());
        let refused = reports()?;
        wait_until("a refusal", Duration::from_secs(30), || Ok((reports()? > refused).then_some(())))?;
        lab.check("b", &["pkill", "-x", "-f", "sleep 4321"])?;
        let status = moving.wait()?;
        let said = heard.join().map_err(|_| anyhow::anyhow!("the reader panicked"))??;
        ensure!(status.success() && said.contains("trying again"), "{status}: {said}");
        self.shows(lab, "a")?;
        drop(counter);
        self.remove(lab, "a")
    }

    /// A container whose command is one word moves there and back.
    ///
    /// # Errors
    /// If not.
    pub fn moves_with_a_command_of_one_word(&self, lab: &Lab, number: u8) -> Result<()> {
        (self.prepare)(lab)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        (self.run)(lab, "a", self.name, ip, self.image, &[], &["redis-server".to_owned()])?;
        let telling = "{{.Path}} {{json .Args}} {{json .Config.Cmd}} {{json .Config.Entrypoint}}";
        let before = self.told(lab, "a", telling)?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            move_container(lab, from, self.name, to).with_context(|| format!("from {from} to {to}"))?;
            let after = self.told(lab, to, telling)?;
            ensure!(after == before, "the command was {before}, and is {after}");
        }
        self.remove(lab, "a")
    }

    /// What people do with a container does the same after a move: stats, update, cp, commit,
    /// restart.
    ///
    /// # Errors
    /// If not.
    pub fn is_the_engine_s_own_after_a_move(&self, lab: &Lab, number: u8) -> Result<()> {
        let mut counter = self.start(lab, number, &["--memory", "256m"], &[])?;
        self.moves(lab, &mut counter, "a", "b")?;
        drop(counter);
        let engine = |arguments: &[&str]| (self.command)(lab, "b", arguments);
        let stats = engine(&["stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}} {{.PIDs}}", self.name])?;
        ensure!(stats.starts_with(self.name) && !stats.contains(" 0B"), "stats says {stats:?}");
        engine(&["update", "--memory", "200m", "--memory-swap", "300m", self.name])?;
        let pid = self.pid(lab, "b")?.context("it does not run")?;
        let limits = limits(lab, "b", &pid)?;
        // Of a machine with version 1 of cgroups.
        ensure!(!limits.contains("memory.limit") || limits.contains("209715200"), "after update it has {limits}");

        lab.check("b", &["sh", "-c", "echo in > /run/copied"])?;
        engine(&["cp", "/run/copied", &format!("{}:/opt/in", self.name)])?;
        self.execute(lab, "b", "cat /opt/in > /opt/out && echo out >> /opt/out")?;
        engine(&["cp", &format!("{}:/opt/out", self.name), "/run/back"])?;
        let back = lab.check("b", &["cat", "/run/back"])?;
        ensure!(back == "in\nout\n", "cp brought back {back:?}");
        engine(&["commit", self.name, "committed:1"])?;
        let said = engine(&[
            "run",
            "--rm",
            "--cgroup-parent",
            "/tranship-lab/b",
            "--network",
            "none",
            "--volume",
            "/usr:/usr:ro",
            "committed:1",
            "cat",
            "/opt/out",
        ])?;
        ensure!(said.contains("in\nout\n"), "what was committed has {said:?}");
        engine(&["rmi", "committed:1"])?;

        engine(&["restart", "--time", "1", self.name])?;
        Redis::connect(lab, Ipv4Addr::new(10, 77, 0, number), Duration::from_secs(10)).context("after restart")?;
        self.remove(lab, "b")
    }

    /// A container that has its node's host name (`--uts host`) is refused, and moves where the
    /// user allows it.
    ///
    /// # Errors
    /// If not.
    pub fn moves_with_the_node_s_host_name(&self, lab: &Lab, number: u8) -> Result<()> {
        let counter = self.start(lab, number, &["--uts", "host"], &[])?;
        drop(counter);
        let refusal = refused_move(lab, "a", self.name, "b")?;
        refusal.names(BlockerKind::Process, "uses the UTS namespace of its node")?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            move_with(lab, from, self.name, to, &["--allow", "node-host-name"])?;
            self.execute(lab, to, "true")?;
        }
        self.remove(lab, "a")
    }

    /// A device of which `words` are said, since the destination lacks it or because the engine does not say which one
    /// of the node's it is, is named before the freeze.
    ///
    /// # Errors
    /// If not.
    pub fn is_refused_for_its_device(&self, lab: &Lab, number: u8, words: &str) -> Result<()> {
        (self.prepare)(lab)?;
        lab.check("a", &["sh", "-c", "[ -e /run/own-device ] || mknod /run/own-device c 240 77"])?;
        let counter = self.start(lab, number, &["--device", "/run/own-device:/dev/own"], &[])?;
        drop(counter);
        refused_move(lab, "a", self.name, "b")?.names(BlockerKind::Engine, words)?;
        self.remove(lab, "a")
    }

    /// POSIX semaphores and shared memory in the container's `/dev/shm`, also such as have been removed, are the same
    /// for its processes and for new ones after each move, and its processes go on with them. The address is that of
    /// this number, `more` are options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_posix_semaphores_and_shared_memory(&self, lab: &Lab, number: u8, more: &[&str]) -> Result<()> {
        (self.prepare)(lab)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        let command = ["python3", "-c", POSIX_SHARER].map(ToOwned::to_owned);
        (self.run)(lab, "a", self.name, ip, self.image, more, &command)?;
        let ask = format!("cat </dev/tcp/{ip}/7000");
        let told =
            || wait_until("the sharer", Duration::from_secs(20), || Ok(lab.check(CLIENT, &["bash", "-c", &ask]).ok()));
        let mut before = told()?.trim().parse::<u64>().context("of the sharer's turns")?;
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            move_container(lab, from, self.name, to).with_context(|| format!("from {from} to {to}"))?;
            let now = told()?.trim().parse::<u64>().with_context(|| format!("on {to}"))?;
            ensure!(now > before, "on {to} the turns stand at {now}, after {before}");
            before = now;
            let seen = (self.command)(lab, to, &["exec", self.name, "python3", "-c", POSIX_VISITOR])?;
            ensure!(seen == "goes on\n", "a new process on {to} says {seen:?}");
            let left = self.execute(lab, to, "ls /dev/shm")?;
            ensure!(left == "sem.ping\nsem.pong\nsem.visit\nturns\n", "on {to} /dev/shm has {left:?}");
        }
        self.remove(lab, "b")
    }

    /// Addresses and routes that a program has added to what the engine has made (`NET_ADMIN`) are there after each move, and clients
    /// reach it by such an address. The container's own address is that of this number, the other one that of `added`.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_addresses_and_routes_of_its_programs(&self, lab: &Lab, number: u8, added: u8) -> Result<()> {
        (self.prepare)(lab)?;
        let mut counter = self.start(lab, number, &["--cap-add", "NET_ADMIN"], &[])?;
        let add = format!(
            "ip addr add 10.77.0.{added}/32 dev eth0; ip addr add 10.99.1.1/32 dev lo; ip addr add 127.0.0.5/8 dev lo; \
             ip addr add 10.99.1.2/32 dev lo scope host; ip route add 10.98.0.0/16 via 10.77.0.1; \
             ip route add 10.97.0.0/16 dev lo table 77; ip link set eth0 mtu 1400; \
             ip route replace default via 10.77.0.7"
        );
        self.execute(lab, "a", &add)?;
        let look = "ip link show eth0 | grep -o 'mtu [0-9]*'; for table in main 77; do ip -4 route show table $table; done; ip -4 -o addr | sed 's/brd [^ ]*//' | \
                    awk '{print $2, $4, $6}'";
        let before = self.execute(lab, "a", look)?;
        ensure!(
            ["mtu 1400", "default via 10.77.0.7", "10.99.1.2/32 host", "10.97.0.0/16 dev lo"]
                .iter()
                .all(|one| before.contains(one)),
            "{before}"
        );
        let by_other = (Ipv4Addr::new(10, 77, 0, added), REDIS_PORT).into();
        let mut other = CounterClient::start(lab, by_other, "other", Duration::from_millis(5))?;
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            self.moves(lab, &mut counter, from, to)?;
            let now = self.execute(lab, to, look)?;
            ensure!(now == before, "on {from} it was\n{before}and on {to} it is\n{now}");
            lab.connect(CLIENT, by_other, Duration::from_secs(2)).context("to the added address")?;
            connection_alive(&mut other).context("the one to the added address")?;
        }
        // A default route that is not there any more is not there, either.
        self.execute(lab, "b", "while ip route del default; do :; done")?;
        for (from, to) in [("b", "a"), ("a", "b")] {
            self.moves(lab, &mut counter, from, to)?;
            let now = self.execute(lab, to, "ip -4 route show default")?;
            ensure!(now.is_empty(), "on {to} there is {now:?}");
        }
        drop((counter, other));
        self.remove(lab, "b")
    }

    /// A device of the node is in the container after a move, where programs can use it. The address is that of this
    /// number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_device(&self, lab: &Lab, number: u8) -> Result<()> {
        (self.prepare)(lab)?;
        for node in ["a", "b"] {
            lab.check(node, &["sh", "-c", "[ -e /run/two-device ] || mknod /run/two-device c 1 5"])?;
        }
        let mut counter = self.start(lab, number, &["--device", "/run/two-device:/dev/own:rw"], &[])?;
        let look = "stat -c %F:%t:%T /dev/own; head -c 2 /dev/own | od -An -c; echo x > /dev/own && echo written";
        let before = self.execute(lab, "a", look)?;
        ensure!(before.ends_with("written\n") && before.contains("\\0"), "on a the device is {before:?}");
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            self.moves(lab, &mut counter, from, to)?;
            let now = self.execute(lab, to, look)?;
            ensure!(now == before, "the device was {before:?}, and on {to} it is {now:?}");
        }
        drop(counter);
        (self.command)(lab, "b", &["restart", "--time", "1", self.name])?;
        let now = self.execute(lab, "b", look).context("after restart")?;
        ensure!(now == before, "the device was {before:?}, and after restart it is {now:?}");
        self.remove(lab, "b")
    }

    /// A container with an init of the engine's (`--init`) has it after a move, too: it reaps what its program leaves,
    /// passes signals on, and is there after a restart. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_init(&self, lab: &Lab, number: u8) -> Result<()> {
        (self.prepare)(lab)?;
        let ip = Ipv4Addr::new(10, 77, 0, number);
        (self.run_whole)(lab, "a", self.name, ip, self.image, &[&BINDS[..], &["--init"]].concat(), &redis_command())?;
        Redis::connect(lab, ip, Duration::from_secs(10))?;
        let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
        let look = "cat /proc/1/comm; grep ^PPid /proc/$(pgrep -x redis-server)/status";
        let before = self.execute(lab, "a", look)?;
        ensure!(!before.starts_with("redis") && before.ends_with("PPid:\t1\n"), "on a it has {before:?}");
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            self.moves(lab, &mut counter, from, to)?;
            let now = self.execute(lab, to, look)?;
            ensure!(now == before, "it had {before:?}, and on {to} it has {now:?}");
            self.execute(lab, to, "sh -c '(true; exec sleep 0.2) & exit'")?;
            wait_until("the orphan to be reaped", Duration::from_secs(10), || {
                Ok(self.execute(lab, to, "pgrep -x sleep || echo none")?.contains("none").then_some(()))
            })?;
        }
        drop(counter);
        (self.command)(lab, "b", &["stop", "--time", "10", self.name])?;
        let code = self.told(lab, "b", "{{.State.ExitCode}}")?;
        ensure!(code == "0", "stopped by a signal that its init has passed on, it ends with {code}");
        (self.command)(lab, "b", &["start", self.name])?;
        let now = self.execute(lab, "b", look).context("after stop and start")?;
        ensure!(now == before, "it had {before:?}, and after stop and start it has {now:?}");
        self.remove(lab, "b")
    }

    /// What becomes of a log that stays behind is said before the move and by its report. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn says_what_becomes_of_its_logs(&self, lab: &Lab, number: u8, more: &[&str]) -> Result<()> {
        let counter = self.start(lab, number, more, &[])?;
        drop(counter);
        let engine = self.engine.to_lowercase();
        wait_until("a line in the log", Duration::from_secs(10), || {
            Ok((!(self.command)(lab, "a", &["logs", self.name])?.is_empty()).then_some(()))
        })?;
        let words = format!("logs: `{engine} logs {}` begins with the move on the destination; the ", self.name);
        let plan =
            lab.check("a", &["tranship", "move", self.name, "--to", "b", "--dry-run", "--json", "--logs", "none"])?;
        ensure!(plan.contains(&words), "the plan says {plan}");
        let report = move_with(lab, "a", self.name, "b", &["--logs", "none"])?;
        ensure!(report.ways.iter().any(|way| way.contains(&words)), "the report has only {:?}", report.ways);
        self.remove(lab, "b")
    }

    /// A container that writes numbered lines all the time has all of them in its log after each move, once and in order, as they were before it:
    /// those of stdout, among which none of stderr is. `rotates`: its engine removes the oldest ones. The address is that of this number, `more` are
    /// options of `run`.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_its_log(&self, lab: &Lab, number: u8, (more, rotates): (&[&str], bool)) -> Result<()> {
        (self.prepare)(lab)?;
        let command = ["python3", "-c", LOG_WRITER].map(ToOwned::to_owned);
        (self.run)(lab, "a", self.name, Ipv4Addr::new(10, 77, 0, number), self.image, more, &command)?;
        wait_until("lines in the log", Duration::from_secs(30), || {
            Ok(self.log(lab, "a", &[])?.last().is_some_and(|(_, last)| *last > 2000).then_some(()))
        })?;
        let plan = lab.check("a", &["tranship", "move", self.name, "--to", "b", "--dry-run", "--json"])?;
        ensure!(plan.contains("\"log_bytes\":"), "the plan says {plan}");
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            let before = self.log(lab, from, &[])?;
            let report = move_container(lab, from, self.name, to).with_context(|| format!("from {from} to {to}"))?;
            ensure!(report.ways.iter().any(|way| way.starts_with("logs: ")), "the report has only {:?}", report.ways);
            let (_, last) = before.last().context("nothing was logged")?;
            let after = wait_until("lines after the move", Duration::from_secs(10), || {
                Ok(Some(self.log(lab, to, &[])?).filter(|log| log.last().is_some_and(|(_, now)| *now > last + 400)))
            })?;
            let gap = after.windows(2).find(|pair| pair[1].1 != pair[0].1 + 2);
            ensure!(gap.is_none(), "on {to} its log has {gap:?}; {:?}", report.ways);
            let kept = before.iter().filter(|line| after.contains(line)).count();
            ensure!(rotates || kept == before.len(), "of {} lines of {from}, {to} has {kept}", before.len());
            ensure!(kept * 4 > before.len(), "of {} lines of {from}, {to} has only {kept}", before.len());
            // Docker 20.10 leaves out all compressed files where a time is given.
            if !rotates {
                let (time, middle) = &after[after.len() / 2];
                let since = self.log(lab, to, &["--since", time])?;
                // Podman shows what is later, and has times in milliseconds.
                let first = since.first().context("nothing was logged since")?.1;
                ensure!((*middle..middle + 20).contains(&first), "since {time}, of {middle}, it has {first} first");
            }
            // It counts the lines of both streams.
            let tail = self.log(lab, to, &["--tail", "700"])?;
            let last = tail.last().context("it has no tail")?.1;
            ensure!(
                (300..=400).contains(&tail.len()) && last > after[after.len() - 1].1,
                "its tail has {}",
                tail.len()
            );
        }
        self.remove(lab, "b")
    }

    /// A line whose end is written after the move is one line of the log. The address is that of this number.
    ///
    /// # Errors
    /// If not.
    pub fn keeps_a_line_without_an_end(&self, lab: &Lab, number: u8) -> Result<()> {
        (self.prepare)(lab)?;
        let command = ["bash", "-c", "echo all; printf begin; sleep 4; echo end; sleep 4321"];
        let command = command.map(ToOwned::to_owned);
        (self.run)(lab, "a", self.name, Ipv4Addr::new(10, 77, 0, number), self.image, &[], &command)?;
        wait_until("the first line", Duration::from_secs(20), || {
            Ok((self.command)(lab, "a", &["logs", self.name])?.contains("all").then_some(()))
        })?;
        let report = move_container(lab, "a", self.name, "b")?;
        wait_until("the end of the line", Duration::from_secs(20), || {
            Ok((self.command)(lab, "b", &["logs", self.name])?.contains("end").then_some(()))
        })?;
        let log = (self.command)(lab, "b", &["logs", self.name])?;
        ensure!(log == "all\nbeginend\n", "its log is {log:?}; {:?}", report.ways);
        self.remove(lab, "b")
    }

    /// The lines of stdout in its log, each with its time.
    fn log(&self, lab: &Lab, node: &str, more: &[&str]) -> Result<Vec<(String, u64)>> {
        let text = (self.command)(lab, node, &[&["logs", "--timestamps"], more, &[self.name]].concat())?;
        let line = |line: &str| -> Result<(String, u64)> {
            let (time, number) = line.split_once(' ').with_context(|| format!("a line {line:?}"))?;
            Ok((time.to_owned(), number.parse().with_context(|| format!("a line {line:?}"))?))
        };
        text.lines().map(line).collect()
    }
}
