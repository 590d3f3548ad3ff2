//! `tranship-lab`: nodes on one machine, as namespaces.

mod demo;
mod table;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use tranship_lab::{CLIENT, Lab, Rate, RunOptions, UpOptions};

/// Nodes on one machine, as namespaces: for trying Tranship out, for its tests, benchmarks and demo.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring up nodes a, b, … and a client on a network of their own (10.77.0.0/24), with an agent on each node
    Up {
        /// How many nodes, besides the client
        #[arg(long, default_value_t = 2)]
        nodes: usize,
        /// Speed of each node's link, e.g. 1gbit or 100mbit; default: as fast as the machine can
        #[arg(long, value_name = "RATE")]
        link: Option<String>,
        /// Start no agents, and make no certificates
        #[arg(long)]
        no_agents: bool,
    },
    /// Take the lab down, and check that nothing is left of it
    Down,
    /// Run a command in a node (a, b, … or client); its exit code is passed on
    Exec {
        /// The node
        node: String,
        /// The command and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Run a `docker` command in a node; the first one starts a Docker daemon in each node, with
    /// the image `tranship-lab` and the network `lab`
    Docker(EngineArguments),
    /// Run a `podman` command in a node; the first one sets Podman up in each node, with the image
    /// `tranship-lab` and the network `lab`
    Podman(EngineArguments),
    /// Run a `ctr` command in a node; the first one starts containerd in each node, with the image
    /// `docker.io/library/tranship-lab:latest`
    Ctr(EngineArguments),
    /// Start a stock runc container in a node, attached to the lab network
    Run(RunArguments),
    /// Remove a container with its network namespace and bundle
    Stop {
        /// The node
        node: String,
        /// The container
        name: String,
    },
    /// Show the nodes of the lab
    Status,
    /// Move a busy Redis between two nodes under a connected client, and show what the client noticed
    Demo {
        /// Number of keys in Redis
        #[arg(long, default_value_t = 1_000_000)]
        keys: u64,
        /// Speed of each node's link, e.g. 1gbit
        #[arg(long, value_name = "RATE")]
        link: Option<String>,
    },
    /// Count in Redis on one connection, checking each reply, and report the gaps (run it in a node)
    #[command(hide = true)]
    Counter(CounterArguments),
    /// Be the init process of a node
    #[command(hide = true)]
    Hold {
        /// The node's name
        name: String,
        /// Where Tranship's programs are
        programs: PathBuf,
        /// Its directory on the host's disk
        disk: PathBuf,
        /// Directories that it has in common with the host wherever they are
        common: Vec<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
struct EngineArguments {
    /// The node: a, b, …
    node: String,
    /// The arguments of the engine's own command line, options included
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARG")]
    arguments: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct RunArguments {
    /// The node: a, b, …
    node: String,
    /// The container's name
    name: String,
    /// Its address, in 10.77.0.0/24
    #[arg(long, value_name = "ADDR")]
    ip: Ipv4Addr,
    /// Its root filesystem, mounted read-only; default: a skeleton with the host's /usr and /etc
    #[arg(long, value_name = "DIR")]
    rootfs: Option<PathBuf>,
    /// Mount an empty tmpfs on DIR (may be given several times)
    #[arg(long, value_name = "DIR")]
    tmpfs: Vec<PathBuf>,
    /// Show SOURCE of the node in the container as TARGET, read-only (may be given several times)
    #[arg(long, value_name = "SOURCE:TARGET")]
    bind: Vec<String>,
    /// Attach by a veth to a bridge on the node instead of a macvlan
    #[arg(long)]
    bridge: bool,
    /// Limit on its memory, e.g. 512M or 2G
    #[arg(long, value_name = "LIMIT")]
    memory: Option<String>,
    /// User and group to run as, by number
    #[arg(long, value_name = "UID[:GID]")]
    user: Option<String>,
    /// Set an environment variable (may be given several times)
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Add a capability, e.g. CAP_IPC_LOCK (may be given several times)
    #[arg(long, value_name = "CAP")]
    cap_add: Vec<String>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct CounterArguments {
    /// Redis's address and port
    #[arg(long)]
    addr: SocketAddr,
    /// The key to count in
    #[arg(long, default_value = "counter")]
    key: String,
    /// Time between two increments, in microseconds
    #[arg(long, default_value_t = 500)]
    interval_us: u64,
    /// For how long, in seconds; default: until it is stopped
    #[arg(long)]
    duration: Option<f64>,
    /// Answer requests on stdin (one JSON object a line) by reports on stdout
    #[arg(long)]
    control: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match perform(arguments.command) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("tranship-lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(command: Command) -> Result<ExitCode> {
    match command {
        Command::Up { nodes, link, no_agents } => up(nodes, link.as_deref(), !no_agents)?,
        Command::Down => {
            let existed = tranship_lab::take_down()?;
            println!("{}", if existed { "the lab is down, nothing is left of it" } else { "no lab is up" });
        }
        Command::Exec { node, command } => return passed_on(Lab::attach()?.command(&node, &command)?),
        Command::Docker(engine) => return engine.run(Lab::start_docker, tranship_lab::DOCKER),
        Command::Podman(engine) => return engine.run(Lab::start_podman, tranship_lab::PODMAN),
        Command::Ctr(engine) => return engine.run(Lab::start_containerd, tranship_lab::CTR),
        Command::Run(arguments) => run(arguments)?,
        Command::Stop { node, name } => Lab::attach()?.stop(&node, &name)?,
        Command::Status => status()?,
        Command::Demo { keys, link } => return demo::demo(keys, rate(link.as_deref())?),
        Command::Counter(arguments) => counter(&arguments)?,
        Command::Hold { name, programs, disk, common } => tranship_lab::hold(&name, &programs, &disk, &common)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl EngineArguments {
    /// Has the engine be up in each node, and runs its command line in one.
    fn run(&self, start: impl Fn(&Lab) -> tranship_lab::Result<()>, client: &str) -> Result<ExitCode> {
        let lab = Lab::attach()?;
        start(&lab)?;
        // The working directory has to be one that the node has.
        let command = ["env", "--chdir=/", client].into_iter().chain(self.arguments.iter().map(String::as_str));
        passed_on(lab.command(&self.node, &command.collect::<Vec<_>>())?)
    }
}

/// Runs a command to its end; its exit code. A command killed by a signal counts as 128 + its
/// number, as in a shell.
fn passed_on(mut command: std::process::Command) -> Result<ExitCode> {
    let status = command.status().context("cannot run nsenter")?;
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    let code = status.code().or(signal.map(|s| 128 + s)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

fn rate(text: Option<&str>) -> Result<Option<Rate>> {
    Ok(text.map(str::parse).transpose()?)
}

fn up(nodes: usize, link: Option<&str>, agents: bool) -> Result<()> {
    let begin = Instant::now();
    let options = UpOptions { nodes, link: rate(link)?, agents, wait: Duration::ZERO };
    let lab = Lab::up(&options)?.keep();
    println!("the lab is up after {:.1} s:", begin.elapsed().as_secs_f64());
    show(&lab)?;
    println!("try: tranship-lab exec a -- ip addr");
    Ok(())
}

fn status() -> Result<()> {
    show(&Lab::attach()?)
}

fn show(lab: &Lab) -> Result<()> {
    for node in lab.nodes() {
        let agent = match lab.agent_pid(&node)? {
            Some(pid) => format!("agent: pid {pid}"),
            None => "no agent".into(),
        };
        println!("  {node:<8}{:<14}{agent}", lab.address(&node)?.to_string());
    }
    println!("  {CLIENT:<8}{}", lab.address(CLIENT)?);
    Ok(())
}

fn run(arguments: RunArguments) -> Result<()> {
    let pair = |text: &str| match text.split_once(':') {
        Some((source, target)) => Ok((source.into(), target.into())),
        None => Err(anyhow::anyhow!("--bind {text:?} must be SOURCE:TARGET")),
    };
    let user = arguments.user.as_deref().unwrap_or("0");
    let (uid, gid) = user.split_once(':').unwrap_or((user, user));
    let number =
        |text: &str| text.parse().with_context(|| format!("--user {user:?} must be UID or UID:GID, as numbers"));
    let options = RunOptions {
        command: arguments.command,
        rootfs: arguments.rootfs,
        tmpfs: arguments.tmpfs,
        binds: arguments.bind.iter().map(|text| pair(text)).collect::<Result<_>>()?,
        bridge: arguments.bridge,
        memory: arguments.memory.as_deref().map(tranship_lab::parse_size).transpose()?,
        user: (number(uid)?, number(gid)?),
        environment: arguments.env,
        capabilities: arguments.cap_add,
        ..RunOptions::new(arguments.ip, [""; 0])
    };
    Lab::attach()?.run(&arguments.node, &arguments.name, &options)?;
    println!("{} runs on node {} at {}", arguments.name, arguments.node, arguments.ip);
    Ok(())
}

fn counter(arguments: &CounterArguments) -> Result<()> {
    let CounterArguments { addr, key, interval_us, duration, control } = arguments;
    let duration = duration.map(|s| Duration::try_from_secs_f64(s).context("--duration must be a number of seconds"));
    let interval = Duration::from_micros(*interval_us);
    let report = tranship_lab::count(*addr, key, interval, duration.transpose()?, *control)
        .with_context(|| format!("the counter at {addr} cannot go on"))?;
    // Whoever controls it has the report already.
    if *control {
        return Ok(());
    }
    println!("{}", serde_json::to_string_pretty(&report)?);
    if let Some(error) = report.error {
        anyhow::bail!("the connection to {addr} did not survive: {error}");
    }
    Ok(())
}
