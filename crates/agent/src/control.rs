//! Calls of the API for the agent of another node: passed on to it, and answered for it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tranship_api::{ErrorKind, PassedAnswer, PassedCall, ServiceError};
use tranship_coordinator::Failure;
use tranship_sys::threads;
use tranship_transport::{Connection, Link};
use tranship_types::{BlockerKind, NodeName};
use tranship_wire::message::{Request, Response};
use tranship_wire::{Purpose, Versions, read_message, write_message};

use crate::node::Node;
use crate::peers::failure_response;
use crate::service::Service;

/// The longest time until an answer begins: a dry run may read whole filesystems.
const BEGINS_WITHIN: Duration = Duration::from_secs(900);
/// The longest time between two parts of an answer: reports of a move that waits do not change.
const GOES_ON_WITHIN: Duration = Duration::from_secs(24 * 3600);
/// Parts of an answer that wait for a slow reader.
const WAITING: usize = 4;

/// A response as a peer reads it that speaks this version: an older one cannot read the kind `policy` of a blocker.
pub fn understood(mut response: Response, version: u16) -> Response {
    if let Response::Checked { blockers, .. } | Response::Failed { blockers, .. } = &mut response
        && version < Versions::OPTIONS
    {
        let unknown = blockers.iter_mut().filter(|blocker| blocker.kind == BlockerKind::Policy);
        unknown.for_each(|blocker| blocker.kind = BlockerKind::Engine);
    }
    response
}

/// Passes a call on to the agent of `to`; `None` where that is this node.
pub fn pass_on(node: &Node, to: &NodeName, call: PassedCall) -> Result<Option<PassedAnswer>, ServiceError> {
    if *to == node.config.node {
        return Ok(None);
    }
    let failed = |failure: Failure| match failure.blockers.as_slice() {
        [blocker, ..] => {
            let is_known = blocker.kind != BlockerKind::NoSuchNode;
            let kind = if is_known { ErrorKind::Unreachable } else { ErrorKind::Blocked };
            ServiceError::new(kind, blocker.cause.clone(), blocker.remedy.clone())
        }
        [] => ServiceError::new(ErrorKind::Unreachable, failure.message, "see `tranship node`"),
    };
    let broken = |error: &dyn std::fmt::Display| {
        let message = format!("node {to} has not answered the call: {error}");
        ServiceError::new(ErrorKind::Unreachable, message, format!("see the log of node {to}'s agent"))
    };
    let mut link = node.dial(to, Purpose::Control, None).map_err(failed)?;
    if link.version() < Versions::API {
        let message = format!("node {to}'s agent is older than this one and takes no calls from other nodes");
        return Err(ServiceError::new(ErrorKind::Unusable, message, format!("update it, or type the command on {to}")));
    }
    link.set_timeout(Some(BEGINS_WITHIN)).map_err(|e| broken(&e))?;
    let PassedCall { method, path, body } = call;
    write_message(&mut link, &Request::Api { method, path, body }).map_err(|e| broken(&e))?;
    let (status, part, last) = match read_message(&mut link).map_err(|e| broken(&e))? {
        Response::Api { status, part, last } => (status, part, last),
        Response::Failed { message, .. } => {
            let (message, remedy) = message.split_once("; ").unwrap_or((&message, "see `tranship node`"));
            return Err(ServiceError::new(ErrorKind::Forbidden, message, remedy));
        }
        _ => return Err(broken(&"its answer belongs to another request")),
    };
    let (sender, parts) = mpsc::channel(WAITING);
    let (closer, unread) = (link.closer(), sender.clone());
    let (at_work, ended) = oneshot::channel::<()>();
    node.timers().spawn(async move {
        tokio::select! {
            () = unread.closed() => closer.close(),
            // The answer is complete: it ends for its reader when nobody can send any more of it.
            _ = ended => {}
        }
    });
    let forward = move || {
        let _at_work = at_work;
        if sender.blocking_send(Ok(part)).is_ok()
            && !last
            && let Err(error) = rest(&mut link, &sender)
        {
            // Nobody reads any more, where this fails.
            let _ = sender.blocking_send(Err(error));
        }
    };
    threads::start("passed call", forward).map_err(|e| broken(&e))?;
    Ok(Some(PassedAnswer { status, parts }))
}

/// Receives all parts but the first.
fn rest(link: &mut Connection, parts: &mpsc::Sender<Result<String, io::Error>>) -> io::Result<()> {
    link.set_timeout(Some(GOES_ON_WITHIN))?;
    loop {
        match read_message(link).map_err(io::Error::other)? {
            Response::Api { part, last, .. } => {
                if parts.blocking_send(Ok(part)).is_err() || last {
                    return Ok(());
                }
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Answers a call that `peer` passes on, if it may control this node.
pub fn answer(node: &Arc<Node>, peer: &NodeName, call: PassedCall, link: &mut Connection) -> io::Result<()> {
    let here = &node.config.node;
    if !node.peers().accept_of(peer).is_some_and(|accept| accept.control) {
        tracing::warn!(%peer, call = %call.path, "a call of a peer that may not control this node was refused");
        let refused = Failure::new(format!(
            "node {here} does not let node {peer} control it; add control = true to `accept` of [peers.{peer}] in node \
             {here}'s agent.toml and reload that agent, or type the command on {here}"
        ));
        return write_message(link, &failure_response(refused)).map_err(io::Error::other);
    }
    tracing::info!(%peer, call = %format!("{} {}", call.method, call.path), "a call from another node");
    let router = tranship_api::router(Arc::new(Service(Arc::clone(node))));
    let mut written = Ok(());
    node.timers().block_on(tranship_api::answer(router, call, |status, part, last| {
        written = write_message(link, &Response::Api { status, part: part.to_owned(), last });
        written.is_ok()
    }));
    written.map_err(io::Error::other)
}
