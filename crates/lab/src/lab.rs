use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::amount::Rate;
use crate::down::take_down;
use crate::error::{LabError, Result};
use crate::process::{Process, patience, wait_for};
use crate::spec::network_namespace;
use crate::state::{BIN, DIRECTORY, Lock, Node, ROOTFS, STAGE, SWITCH, State};
use crate::{agent, cgroup, program, rootfs, switch};

/// In the environment of whatever the lab starts, so that what is left of it can be told from the host's processes.
pub(crate) const MARK: &str = "TRANSHIP_LAB_NODE";
const TOOLS: [&str; 7] = ["ip", "tc", "unshare", "nsenter", "setsid", "setpriv", "runc"];
/// How long a command in a node may take: nobody waits for ever for one that hangs.
const COMMAND_LIMIT: Duration = Duration::from_secs(180);
/// How long another program may take to bring a lab up or down.
pub(crate) const LOCK_LIMIT: Duration = Duration::from_secs(150);

/// What kind of lab to bring up.
#[derive(Debug, Clone)]
pub struct UpOptions {
    /// How many nodes besides the client, 1 to 26: a, b, c …
    pub nodes: usize,
    /// The speed of every node's link; as fast as the machine can where there is none.
    pub link: Option<Rate>,
    /// Whether each node gets certificates and a running agent.
    pub agents: bool,
    /// How long to wait for another lab on this machine to be taken down.
    pub wait: Duration,
}

impl Default for UpOptions {
    fn default() -> Self {
        Self { nodes: 2, link: None, agents: true, wait: Duration::ZERO }
    }
}

/// A lab: nodes as namespaces on this machine. A machine has one at a time.
///
/// The lab that `up` returns is taken down when it is dropped; one that `attach` returns, or that was told to
/// [`keep`](Lab::keep), stays.
#[derive(Debug)]
pub struct Lab {
    pub(crate) state: State,
    owned: bool,
}

impl Lab {
    /// Brings a lab up. Needs root.
    ///
    /// # Errors
    /// If one is up already, a tool is missing, or a step fails; what had been made by then is removed again.
    pub fn up(options: &UpOptions) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(LabError::Refused("a lab is made of namespaces, which needs root; run this with sudo".into()));
        }
        if !(1..=switch::MOST_NODES).contains(&options.nodes) {
            let most = switch::MOST_NODES;
            return Err(LabError::Refused(format!("a lab has 1 to {most} nodes, not {}", options.nodes)));
        }
        TOOLS.iter().try_for_each(|tool| program::require(tool))?;
        let holder = program::find_program("tranship-lab")?;
        reserve(options.wait)?;
        let lock = Lock::acquire(LOCK_LIMIT)?;
        let mut lab = Self { state: State::default(), owned: true };
        let outcome = lab.bring_up(options, &holder);
        drop(lock);
        outcome.map(|()| lab)
        // On failure `lab` is dropped here, which takes down what there is.
    }

    fn bring_up(&mut self, options: &UpOptions, holder: &Path) -> Result<()> {
        self.state.owner = Process::of(std::process::id());
        self.state.link = options.link.map(|rate| rate.bits);
        self.state.agents = options.agents;
        for directory in ["/etc/tranship", "/var/lib/tranship", "/var/lib/containers", "/var/lib/cni"] {
            if !Path::new(directory).exists() {
                self.state.made.push(directory.into());
            }
        }
        // Of a name of its own: other labs may be up in mount namespaces that see the same disk.
        let unique = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
        let disk = PathBuf::from(format!("/var/lib/tranship-lab-{unique:x}"));
        self.state.disk = Some(disk.clone());
        self.state.save()?;
        for directory in &self.state.made {
            fs::create_dir_all(directory).map_err(LabError::file("make", directory))?;
        }
        rootfs::make(Path::new(ROOTFS))?;
        fs::create_dir(STAGE).map_err(LabError::file("make", STAGE))?;

        let mut members: Vec<_> = (0..options.nodes).map(switch::node).collect();
        for (name, _) in &members {
            cgroup::create(name)?;
            let own = disk.join(name);
            fs::create_dir_all(&own).map_err(LabError::file("make", &own))?;
        }
        members.push(switch::client());
        members.push((SWITCH.to_owned(), std::net::Ipv4Addr::UNSPECIFIED));
        // All begin at once; then each is waited for.
        let holders: Vec<_> =
            members.iter().map(|(name, _)| start_holder(name, holder, &disk)).collect::<Result<_>>()?;
        for ((name, address), child) in members.into_iter().zip(holders) {
            let init = ready(&name, child)?;
            self.state.nodes.push(Node { name, address, init });
        }
        self.state.save()?;
        let nodes: Vec<_> = self.members().cloned().collect();
        switch::connect(self.switch()?, &nodes, options.link)?;
        if options.agents {
            agent::configure(self)?;
            for name in self.nodes() {
                self.start_agent(&name, &[])?;
            }
        }
        Ok(())
    }

    /// The lab that is up on this machine.
    ///
    /// # Errors
    /// If none is.
    pub fn attach() -> Result<Self> {
        let state = State::load()?.filter(|s| !s.nodes.is_empty());
        let state = state.ok_or_else(|| LabError::Refused("no lab is up; say `tranship-lab up` first".into()))?;
        Ok(Self { state, owned: false })
    }

    /// Lets the lab stay when this value is dropped.
    #[must_use]
    pub fn keep(mut self) -> Self {
        self.owned = false;
        self
    }

    /// Takes the lab down and checks that nothing is left of it.
    ///
    /// # Errors
    /// [`LabError::Leftovers`] names what could not be removed.
    pub fn down(mut self) -> Result<()> {
        self.owned = false;
        take_down().map(drop)
    }

    /// The names of the nodes that can have agents and containers: a, b, …
    pub fn nodes(&self) -> Vec<String> {
        self.members().map(|n| n.name.clone()).filter(|n| n != crate::CLIENT).collect()
    }

    /// The address of a node in the lab network.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn address(&self, node: &str) -> Result<std::net::Ipv4Addr> {
        Ok(self.node(node)?.address)
    }

    /// A command that will run in a node: in its network, mount and pid namespaces, with Tranship's programs on PATH.
    /// When the returned command's process is killed, so is what it runs.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, node: &str, arguments: &[S]) -> Result<Command> {
        let mut command = self.enter(node)?;
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]).args(arguments);
        Ok(command)
    }

    /// The same, without the tie to the process that enters: for what is to stay when that ends.
    pub(crate) fn enter(&self, node: &str) -> Result<Command> {
        let init = self.node(node)?.init;
        if !init.is_alive() {
            return Err(LabError::Refused(format!("node {node} has died; take the lab down with `tranship-lab down`")));
        }
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(init.pid.to_string()).args(["--net", "--mount", "--pid", "--"]);
        command.env("PATH", Self::search_path()).env(MARK, node);
        Ok(command)
    }

    /// The PATH of a node's programs.
    pub(crate) fn search_path() -> String {
        let path = std::env::var("PATH").unwrap_or_default();
        format!("{BIN}:{path}:/usr/sbin:/sbin")
    }

    /// Runs a command in a node to its end, without input. The exit status is the command's own.
    ///
    /// # Errors
    /// If there is no such node, or the command cannot be started, or has not ended after three minutes; not if it fails.
    pub fn exec<S: AsRef<std::ffi::OsStr>>(&self, node: &str, arguments: &[S]) -> Result<Output> {
        program::output_within(patience(COMMAND_LIMIT), &mut self.command(node, arguments)?)
    }

    /// The same, taking a failure for an error, and returning what the command printed.
    ///
    /// # Errors
    /// Also if the command fails.
    pub fn check(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let output = program::checked(format!("{} in node {node}", arguments.join(" ")), self.exec(node, arguments)?)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a command in a node, with stdin, stdout and stderr as pipes. Killing the child kills the command.
    ///
    /// # Errors
    /// If there is no such node or the command cannot be started.
    pub fn spawn<S: AsRef<std::ffi::OsStr>>(&self, node: &str, arguments: &[S]) -> Result<Child> {
        let mut command = self.command(node, arguments)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().map_err(LabError::start("nsenter"))
    }

    /// A path of a node as the host can reach it. Absolute symbolic links on the way lead astray.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn path(&self, node: &str, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = path.as_ref();
        let root = PathBuf::from(format!("/proc/{}/root", self.node(node)?.init.pid));
        Ok(root.join(path.strip_prefix("/").unwrap_or(path)))
    }

    /// Opens a TCP connection from within a node.
    ///
    /// # Errors
    /// If there is no such node or nobody answers within `limit`.
    pub fn connect(&self, node: &str, address: SocketAddr, limit: Duration) -> Result<TcpStream> {
        let made = self.within(node, None, move || TcpStream::connect_timeout(&address, limit))?;
        made.map_err(|source| LabError::Connection { node: node.into(), address: address.to_string(), source })
    }

    /// Makes something, sockets most of all, in the network namespace of a node, or in one that the node has named so
    /// (`ip netns add`). A socket belongs to the namespace that its maker was in, for good.
    ///
    /// # Errors
    /// If there is no such node; inside, what `make` says, and that there is no such namespace.
    pub fn within<T: Send + 'static>(
        &self,
        node: &str,
        namespace: Option<&str>,
        make: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<io::Result<T>> {
        let path = match namespace {
            Some(name) => self.path(node, network_namespace(name))?,
            None => format!("/proc/{}/ns/net", self.node(node)?.init.pid).into(),
        };
        // A thread can enter a namespace alone.
        let maker = std::thread::spawn(move || -> io::Result<T> {
            setns(fs::File::open(path)?, CloneFlags::CLONE_NEWNET)?;
            make()
        });
        Ok(maker.join().unwrap_or_else(|_| Err(io::Error::other("the thread in the node panicked"))))
    }

    /// Cuts a node off the network, at the switch's end.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn cut_link(&self, node: &str) -> Result<()> {
        switch::set_port(self.switch()?, &self.node(node)?.name, false)
    }

    /// Connects a node again.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn restore_link(&self, node: &str) -> Result<()> {
        switch::set_port(self.switch()?, &self.node(node)?.name, true)
    }

    pub(crate) fn node(&self, name: &str) -> Result<&Node> {
        self.members().find(|n| n.name == name).ok_or_else(|| {
            let names: Vec<_> = self.members().map(|n| n.name.as_str()).collect();
            LabError::Refused(format!("the lab has no node {name:?}; it has {}", names.join(", ")))
        })
    }

    /// The nodes and the client.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Node> {
        self.state.nodes.iter().filter(|n| n.name != SWITCH)
    }

    fn switch(&self) -> Result<&Node> {
        let switch = self.state.nodes.iter().find(|n| n.name == SWITCH);
        switch.ok_or_else(|| LabError::Refused("the lab is incomplete; say `tranship-lab down`".into()))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.owned
            && let Err(e) = take_down()
        {
            // Not eprintln: a drop must not panic because stderr is closed.
            let _ = writeln!(io::stderr(), "tranship-lab: {e}");
        }
    }
}

/// Makes the lab's directory, which only one can.
fn reserve(wait: Duration) -> Result<()> {
    let attempt = || match fs::DirBuilder::new().mode(0o755).create(DIRECTORY) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => None,
        other => Some(other),
    };
    match wait_for(wait, attempt) {
        Some(made) => made.map_err(LabError::file("make", DIRECTORY)),
        None => Err(LabError::Refused(format!(
            "a lab is up already, or was not taken down after a crash ({DIRECTORY} exists); say `tranship-lab down` first"
        ))),
    }
}

fn start_holder(name: &str, holder: &Path, disk: &Path) -> Result<Child> {
    // Once forked off, `unshare` is nobody's child who might not wait for it, and no terminal's signals reach it.
    Command::new("setsid")
        .args(["--fork", "unshare", "--net", "--mount", "--pid", "--fork", "--propagation", "private", "--"])
        .arg(holder)
        .args(["hold", name])
        .arg(program::program_directory()?)
        .arg(disk.join(name))
        .args(program::working_copies()?)
        .env(MARK, name)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(LabError::start("setsid"))
}

/// Waits until a node's init process says that it is ready.
fn ready(name: &str, mut child: Child) -> Result<Process> {
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(LabError::file("read from", "the node's init process"))?;
    }
    child.wait().map_err(LabError::start("setsid"))?;
    let pid = line.trim().strip_prefix("ready ").and_then(|pid| pid.parse().ok());
    if let Some(init) = pid.and_then(Process::of) {
        return Ok(init);
    }
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut said).map_err(LabError::file("read from", "the node's init process"))?;
    }
    Err(LabError::Program {
        what: format!("making node {name}"),
        status: "no namespace".into(),
        output: said.trim().to_owned(),
    })
}
