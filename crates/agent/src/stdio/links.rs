//! Links between the holders of two nodes: the node that the container left dials, for as long as
//! its holder lives.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_sys::threads;
use tranship_transport::{Connection, Link};
use tranship_types::NodeName;
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions, read_message, write_message};

use super::holder::{self, Command, Plan};
use super::{alive, directory, of_arrived};
use crate::node::{Node, failed, random_bytes};
use crate::peers::failure_response;

/// How often a link that was lost is dialled again.
const AGAIN: Duration = Duration::from_millis(500);
/// How long the other agent may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// What an agent answers that knows no such relay.
const UNKNOWN: &str = "no standard streams are relayed here";

/// Connections to holders of this node of which one link has come and the other has not.
#[derive(Debug, Default)]
pub struct Sessions(Mutex<HashMap<(NodeName, u64), UnixStream>>);

impl Sessions {
    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<(NodeName, u64), UnixStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dials for all holders of containers that left this node before the agent was started.
pub fn recover(node: &Arc<Node>) {
    for entry in std::fs::read_dir(directory(&node.config.run_dir)).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "out") {
            keep_linked(node, entry.path());
        }
    }
}

/// Keeps the holder with this directory linked until it has ended.
pub fn keep_linked(node: &Arc<Node>, directory: PathBuf) {
    let its_node = Arc::clone(node);
    node.start_patiently("stdio", move || {
        let mut told = String::new();
        loop {
            let linked = match plan_of(&directory) {
                Ok(None) => return,
                Ok(Some(plan)) => link(&its_node, &plan, &directory),
                Err(failure) => Err(failure),
            };
            match linked {
                Ok(()) => {}
                Err(failure) if failure.message.contains(UNKNOWN) => {
                    let _ = holder::ask(&directory, &Command::Forgotten);
                }
                Err(failure) if !is_there(&directory) => return tracing::debug!(%failure, "a holder has ended"),
                Err(failure) if failure.message != told => {
                    tracing::info!(directory = %directory.display(), %failure, "standard streams are not linked");
                    told = failure.message;
                }
                Err(_) => {}
            }
            if !is_there(&directory) || !its_node.pause(AGAIN) {
                return;
            }
        }
    });
}

/// What the holder with this directory was started for; `None` where there is none.
fn plan_of(directory: &Path) -> Result<Option<Plan>, Failure> {
    match std::fs::read(holder::plan(directory)) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Whether the holder with this directory lives, as far as that can be told.
fn is_there(directory: &Path) -> bool {
    let is_there = alive::is_alive(directory).unwrap_or(true);
    if !is_there {
        let _ = std::fs::remove_dir_all(directory);
    }
    is_there
}

/// A connection for frames with the holder of a container that has come.
fn attached(directory: &Path) -> Result<UnixStream, Failure> {
    match holder::ask(directory, &Command::Attach) {
        Ok((_, stream)) => Ok(stream),
        Err(_) if !is_there(directory) => Err(Failure::new(UNKNOWN)),
        Err(error) => Err(Failure::new(format!("the holder of its standard streams does not answer: {error}"))),
    }
}

/// One connection between two holders, until it breaks.
fn link(node: &Arc<Node>, plan: &Plan, directory: &Path) -> Result<(), Failure> {
    if plan.peer == node.config.node {
        return link_here(node, plan, directory);
    }
    let mut session = [0; 8];
    session[..5].copy_from_slice(&random_bytes().map_err(failed)?);
    let session = u64::from_le_bytes(session);
    let dial = |sends: bool| {
        let mut link = node.dial(&plan.peer, Purpose::Control, None)?;
        if link.version() < Versions::STDIO {
            return Err(Failure::new(format!("node {}'s agent relays no standard streams; update it", plan.peer)));
        }
        link.set_timeout(Some(ANSWER)).map_err(failed)?;
        let request = Request::Stdio { relay: plan.relay.clone(), session, sends };
        write_message(&mut link, &request).map_err(failed)?;
        match read_message(&mut link).map_err(failed)? {
            Response::Stdio => {}
            Response::Failed { message, .. } => return Err(Failure::new(message)),
            other => return Err(Failure::new(format!("an answer that does not fit: {other:?}"))),
        }
        link.set_timeout(None).map_err(failed)?;
        Ok(link)
    };
    let (sending, receiving) = (dial(true)?, dial(false)?);
    let (_, stream) = holder::ask(directory, &Command::Attach).map_err(failed)?;
    let other = stream.try_clone().map_err(failed)?;
    let sender = threads::start("stdio sender", move || send(&other, sending)).map_err(failed)?;
    let received = receive(receiving, &stream);
    let _ = stream.shutdown(Shutdown::Both);
    let _ = sender.join();
    received.map_err(failed)
}

/// The container has come back to the node that its streams are of.
fn link_here(node: &Arc<Node>, plan: &Plan, directory: &Path) -> Result<(), Failure> {
    let arrived = of_arrived(node, &plan.relay);
    let theirs = attached(&arrived)?;
    let (_, ours) = holder::ask(directory, &Command::Attach).map_err(failed)?;
    let (from, to) = (theirs.try_clone().map_err(failed)?, ours.try_clone().map_err(failed)?);
    let copier = threads::start("stdio copier", move || copy(&from, &to)).map_err(failed)?;
    copy(&ours, &theirs);
    let _ = copier.join();
    Ok(())
}

fn copy(mut from: &UnixStream, mut to: &UnixStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Sends what a holder says.
fn send(mut from: &UnixStream, mut link: Connection) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if link.write_all(&buffer[..count]).and_then(|()| link.flush()).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    link.closer().close();
}

/// Gives a holder what comes.
fn receive(mut link: Connection, mut to: &UnixStream) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let done = loop {
        match link.read(&mut buffer) {
            Ok(0) => break Ok(()),
            Ok(count) => {
                if let Err(error) = to.write_all(&buffer[..count]) {
                    break Err(error);
                }
            }
            Err(error) => break Err(error),
        }
    };
    let _ = to.shutdown(Shutdown::Both);
    link.closer().close();
    done
}

/// Connects a link of a peer with the holder of the container that came from there.
pub fn answer(node: &Arc<Node>, (relay, session, sends): (&str, u64, bool), mut link: Connection) -> io::Result<()> {
    let peer = link.peer().clone();
    let stream = match connected(node, &peer, relay, session) {
        Ok(stream) => stream,
        Err(failure) => return write_message(&mut link, &failure_response(failure)).map_err(io::Error::other),
    };
    write_message(&mut link, &Response::Stdio).map_err(io::Error::other)?;
    link.set_timeout(None)?;
    let done = match sends {
        true => receive(link, &stream),
        false => {
            send(&stream, link);
            Ok(())
        }
    };
    node.relays.all().remove(&(peer, session));
    done
}

fn connected(node: &Arc<Node>, peer: &NodeName, relay: &str, session: u64) -> Result<UnixStream, Failure> {
    relay.parse::<tranship_types::MigrationId>().map_err(failed)?;
    if let Some(stream) = node.relays.all().remove(&(peer.clone(), session)) {
        return Ok(stream);
    }
    let directory = of_arrived(node, relay);
    let is_of_peer = |plan: &Plan| plan.peer == *peer;
    if plan_of(&directory)?.filter(is_of_peer).is_none() {
        return Err(Failure::new(format!("{UNKNOWN} for {relay}")));
    }
    let stream = attached(&directory)?;
    let other = stream.try_clone().map_err(failed)?;
    node.relays.all().insert((peer.clone(), session), other);
    Ok(stream)
}
