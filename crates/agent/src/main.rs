//! `transhipd`: the agent of a node, and the small programs that belong to it.
//!
//! - `transhipd [--config FILE]` is the agent.
//! - `transhipd pager DIRECTORY WORK` is the page store and fault server of one migration.
//! - `transhipd stdio DIRECTORY` holds the other ends of a moved container's standard streams.
//! - `transhipd tls CA CERT KEY NODE ROOT [CRL]` does the agent's TLS handshakes.
//! - `transhipd launcher` starts the programs of an agent that is confined.
//! - called as `criu`, it is the CRIU front that an engine executes.
//! - called as `tranship-runc`, it is the runtime wrapper that an engine executes in place of runc.
//! - called as `netavark`, it attaches a container that arrives to its network for Podman.
//! - `transhipd start-in-docker SOCKET ID` has Docker start a container, and waits for that.

mod absent;
mod admission;
mod arrivals;
mod cancel;
mod claims;
mod companions;
mod config;
mod control;
mod copying;
mod cpu_share;
mod criu_log;
mod damaged;
mod demand;
mod destination;
mod doctor;
mod draining;
mod freeze_slots;
mod groups;
mod held;
mod images;
mod inspection;
mod intake;
mod interrupt;
mod launcher;
mod layout;
mod live;
mod local_networks;
mod logs;
mod moves;
mod neighbours;
mod netavark;
mod node;
mod notify;
mod options;
mod paths;
mod peers;
mod plan;
mod pods;
mod policy;
mod probes;
mod program;
mod record_files;
mod recovery;
mod registry;
mod rights;
mod service;
mod source;
mod space;
mod stdio;
mod sync;
mod timeline;
mod tls;
mod tmpfs;
mod trees;
mod uncarried;
mod undoing;
mod unread;
mod wrapper;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use tracing_subscriber::EnvFilter;
use tranship_coordinator::FaultPlan;
use tranship_criu::front;
use tranship_engine::{Containerd, Docker, Engine, Podman, Runc};
use tranship_memory::pager;
use tranship_transport::{Connector, Listener};

use crate::config::Config;
use crate::live::Live;
use crate::node::Node;
use crate::notify::Manager;

/// Calls of the API that can be answered where no thread can be started any more.
const CALLERS: usize = 4;

/// The Tranship agent: moves this node's containers to other nodes, and takes theirs.
#[derive(Debug, Parser)]
#[command(name = "transhipd", version)]
struct Arguments {
    /// The configuration file.
    #[arg(long, default_value = "/etc/tranship/agent.toml", value_name = "FILE")]
    config: PathBuf,
    /// The socket of the launcher, through which programs are started; without it the agent starts them itself.
    #[arg(long, value_name = "SOCKET")]
    launcher: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let called_as = arguments.first().and_then(|a| Path::new(a).file_name().map(ToOwned::to_owned));
    let done = match (called_as.as_deref().and_then(|n| n.to_str()), arguments.get(1).and_then(|a| a.to_str())) {
        (Some("criu"), _) => criu_front(&arguments),
        (Some(wrapper::NAME), _) => wrapper::run(&arguments[1..]),
        (Some(netavark::NAME), _) => netavark::run(&arguments[1..]),
        (_, Some("pager")) => run_pager(&arguments),
        (_, Some(stdio::ARGUMENT)) => hold_stdio(&arguments),
        (_, Some(tls::ARGUMENT)) => tls::run(&arguments),
        (_, Some(launcher::ARGUMENT)) => launcher::run(&arguments),
        (_, Some("start-in-docker")) => start_in_docker(&arguments),
        _ => agent(&Arguments::parse()).map(|()| 0),
    };
    match done {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "transhipd: {}", node::sentence(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// `criu swrk FD`.
fn criu_front(arguments: &[OsString]) -> anyhow::Result<i32> {
    let plan = std::env::var_os(front::PLAN_VARIABLE).map(PathBuf::from);
    let plan = plan.with_context(|| format!("{} must name the front's plan", front::PLAN_VARIABLE))?;
    let number = match arguments {
        [_, swrk, number] if swrk == "swrk" => number.to_str().and_then(|n| n.parse().ok()),
        _ => None,
    };
    let number = number.context("the CRIU front understands `criu swrk FD` only")?;
    // SAFETY: the engine has left it open for the program that it takes this one for; nothing else was opened here.
    let engine = unsafe { tranship_sys::descriptor::inherited(number)? };
    Ok(front::run(&plan, engine, number)?)
}

fn start_in_docker(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, socket, id] = arguments else { anyhow::bail!("usage: transhipd start-in-docker SOCKET ID") };
    tranship_engine::start_docker(Path::new(socket), &id.to_string_lossy())?;
    Ok(0)
}

fn run_pager(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, directory, work] = arguments else { anyhow::bail!("usage: transhipd pager DIRECTORY WORK") };
    tranship_sys::process::protect_secrets();
    pager::keep(Path::new(directory), Path::new(work))?;
    Ok(0)
}

fn hold_stdio(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, directory] = arguments else { anyhow::bail!("usage: transhipd stdio DIRECTORY") };
    tranship_sys::process::protect_secrets();
    stdio::run(Path::new(directory))?;
    Ok(0)
}

/// Tries again for a moment: the sockets of an agent that was just killed stay until the kernel has taken down what else it
/// had open, which can take some tenths of a second.
fn patiently<T, E>(mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + Duration::from_secs(3);
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            done => return done,
        }
    }
}

/// Has the threads started that calls of the API are done on.
fn start_callers(runtime: &tokio::runtime::Runtime) {
    let started = Arc::new((Mutex::new(0), Condvar::new()));
    for _ in 0..CALLERS {
        let started = Arc::clone(&started);
        // A thread that waits for the others to be started is not given the work of one of them.
        drop(runtime.spawn_blocking(move || {
            let mut count = started.0.lock().unwrap_or_else(PoisonError::into_inner);
            *count += 1;
            started.1.notify_all();
            let all = |count: &mut usize| *count < CALLERS;
            drop(started.1.wait_timeout_while(count, Duration::from_secs(1), all));
        }));
    }
}

/// Has SIGHUP read the configuration again, from before the agent says that it is ready.
fn start_reloads(runtime: &tokio::runtime::Runtime, node: &Arc<Node>) -> anyhow::Result<()> {
    let _within = runtime.enter();
    let mut hangups = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let node = Arc::clone(node);
    runtime.spawn(async move {
        while hangups.recv().await.is_some() {
            let node = Arc::clone(&node);
            let _ = tokio::task::spawn_blocking(move || live::reload(&node)).await;
        }
    });
    Ok(())
}

fn agent(arguments: &Arguments) -> anyhow::Result<()> {
    tranship_coordinator::keep_places();
    tranship_sys::process::protect_secrets();
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let filter = EnvFilter::try_from_env("TRANSHIP_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A log that cannot be written, as on a full disk, would be told to stderr as well, which panics where that is the same file.
    let log = tracing_subscriber::fmt().log_internal_errors(false);
    log.with_env_filter(filter).with_writer(std::io::stderr).with_ansi(terminal).init();
    let manager = Arc::new(Manager::take());

    if !tranship_sys::reserve::fill() {
        tracing::warn!("no descriptors are to spare; {}", tranship_sys::reserve::REMEDY);
    }
    if let Some(launcher) = &arguments.launcher {
        tranship_sys::launch::through(launcher.clone());
    }
    let config = Config::load(&arguments.config)?;
    let faults = FaultPlan::parse(&std::env::var("TRANSHIP_FAULTS").unwrap_or_default())?;
    let runc = Runc::new(config.runc.path.clone(), config.runc.root.clone(), config.runc.cgroup_parent.clone());
    let docker = Docker {
        socket: config.docker.socket.clone(),
        runtime: config.docker.runtime.clone(),
        runc: Runc { root: config.docker.runc_root.clone(), ..runc.clone() },
    };
    let podman = Podman {
        path: config.podman.path.clone(),
        storage: config.podman.storage.clone(),
        runtime: config.podman.runtime.clone(),
        runc: Runc { root: config.podman.runc_root.clone(), ..runc.clone() },
    };
    let containerd = Containerd {
        socket: config.containerd.socket.clone(),
        namespaces: config.containerd.namespaces.clone(),
        ctr: config.containerd.ctr.clone(),
        wrapper: config.containerd.wrapper.clone(),
        runc: Runc { root: config.containerd.runc_root.clone(), ..runc.clone() },
    };
    let tracking = config.memory.method()?;
    let (listen, socket) = (config.listen.clone(), config.socket.clone());
    for directory in [&config.run_dir, &config.state_dir] {
        std::fs::create_dir_all(directory).with_context(|| format!("{} cannot be made", directory.display()))?;
    }
    let tls = tls::Tls::start(&config.tls, &config.node, &config.run_dir.join("tls"))?;
    let live = Live::new(arguments.config.clone(), &config, Box::new(tls.clone()));
    if let Err(error) = program::keep([&config.state_dir, &config.run_dir].map(|path| path.join("program")).into()) {
        // Not an end: a full disk must not keep the agent from taking up migrations. The next move tries again.
        tracing::error!(%error, "the agent's program cannot be kept; moves will be refused");
    }
    let engines: Vec<Arc<dyn Engine>> = vec![Arc::new(runc), Arc::new(docker), Arc::new(podman), Arc::new(containerd)];
    // Threads that it has started are kept: there may be none to be had when one is needed.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_keep_alive(Duration::from_secs(365 * 24 * 3600))
        .enable_all()
        .build()?;
    start_callers(&runtime);
    let timers = runtime.handle().clone();
    let node = Node::new((config, live), engines, Connector::new(tls.clone()), faults, tracking, timers);
    if let Err(blocker) = node.criu() {
        // Not an end: the containers that are here can be listed, and criu may be installed while the agent runs.
        tracing::error!("{blocker}");
    }

    let api = patiently(|| runtime.block_on(async { tranship_api::bind(&socket) }))?;
    let listener = Arc::new(patiently(|| Listener::bind(tls.clone(), &listen))?);
    moves::recover(&node);
    groups::recover(&node);
    stdio::recover(&node);
    held::start(&node)?;
    paths::start(&node)?;
    let closer = listener.closer()?;
    let (peers_node, peers_listener) = (Arc::clone(&node), Arc::clone(&listener));
    let peers = tranship_sys::threads::start("peers", move || peers::serve(&peers_node, &peers_listener))?;
    tracing::info!(node = %node.config.node, %listen, socket = %socket.display(), %tracking, "ready");

    start_reloads(&runtime, &node)?;
    manager.watch(&node, listener.local_addr())?;
    manager.tell("READY=1");
    let router = tranship_api::router(Arc::new(service::Service(Arc::clone(&node))));
    let stopped = async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
        let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
        match (&mut terminate, &mut interrupt) {
            (Ok(terminate), Ok(interrupt)) => tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} },
            _ => std::future::pending().await,
        }
    };
    runtime.block_on(tranship_api::serve(api, router, stopped))?;
    // Migrations under way are left as a killed agent would leave them: the next one takes them up.
    tracing::info!("stopping");
    manager.tell("STOPPING=1");
    node.stop();
    closer.close();
    let _ = peers.join();
    let _ = std::fs::remove_file(&socket);
    Ok(())
}
