//! The link over which both nodes agree on each step.

use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_transport::{Connection, Link};
use tranship_types::NodeName;
use tranship_wire::message::{Request, Response};

use super::SourceRun;
use crate::node::sentence;

/// The answer to a request, or the failure that it tells of.
pub(super) fn answered(peer: &NodeName, response: Response) -> Result<Response, Failure> {
    match response {
        Response::Failed { message, blockers, .. }
            if blockers.is_empty() && !message.contains(&format!("node {peer}")) =>
        {
            Err(Failure::new(format!("on node {peer}: {message}")))
        }
        Response::Failed { message, blockers, .. } => Err(Failure { blockers, ..Failure::new(message) }),
        other => Ok(other),
    }
}

/// The link to a node is of no use any more.
fn broke(peer: &NodeName, error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::new(format!("the link to node {peer} broke: {}; see that node {peer} and its agent run", sentence(error)))
}

impl SourceRun {
    pub(super) fn control(&mut self) -> Result<&mut Connection, Failure> {
        let peer = &self.peer;
        self.control.as_mut().ok_or_else(|| Failure::new(format!("the link to node {peer} is gone")))
    }

    pub(super) fn ask(&mut self, request: &Request, patience: Duration) -> Result<Response, Failure> {
        self.say(request)?;
        self.hear(patience)
    }

    pub(super) fn say(&mut self, request: &Request) -> Result<(), Failure> {
        let peer = self.peer.clone();
        tranship_wire::write_message(self.control()?, request).map_err(|e| broke(&peer, &e))
    }

    pub(super) fn hear(&mut self, patience: Duration) -> Result<Response, Failure> {
        let peer = self.peer.clone();
        let control = self.control()?;
        control.set_timeout(Some(patience)).map_err(|e| broke(&peer, &e))?;
        let response = tranship_wire::read_message(control).map_err(|e| broke(&peer, &e))?;
        self.unanswered = None;
        if let Response::Failed { waiting, .. } = &response {
            self.awaited.clone_from(waiting);
        }
        answered(&peer, response)
    }

    pub(super) fn unexpected(&self, response: &Response) -> Failure {
        Failure::new(format!("node {} gave an answer that does not fit: {response:?}", self.peer))
    }
}
