//! The client for programs without an async runtime.

use std::io;
use std::path::PathBuf;

use tokio::runtime::Runtime;
use tranship_types::{MigrationId, Report};

use crate::{Begun, ClientError, ContainerInfo, MoveRequest, NodeInfo, Plan, PlanRequest};

/// [`crate::Client`] with calls that block. Not to be used within a tokio runtime.
#[derive(Debug)]
pub struct Client {
    client: crate::Client,
    runtime: Runtime,
}

impl Client {
    /// A client of the agent that listens on `socket`; nothing is connected yet. Fails only where the process may open no
    /// more descriptors.
    pub fn new(socket: impl Into<PathBuf>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { client: crate::Client::new(socket), runtime })
    }

    /// See [`crate::Client::node`].
    pub fn node(&self) -> Result<NodeInfo, ClientError> {
        self.runtime.block_on(self.client.node())
    }

    /// See [`crate::Client::containers`].
    pub fn containers(&self) -> Result<Vec<ContainerInfo>, ClientError> {
        self.runtime.block_on(self.client.containers())
    }

    /// See [`crate::Client::begin_move`].
    pub fn begin_move(&self, request: &MoveRequest) -> Result<Begun, ClientError> {
        self.runtime.block_on(self.client.begin_move(request))
    }

    /// See [`crate::Client::plan`].
    pub fn plan(&self, request: &PlanRequest) -> Result<Plan, ClientError> {
        self.runtime.block_on(self.client.plan(request))
    }

    /// See [`crate::Client::reports`].
    pub fn reports(&self) -> Result<Vec<Report>, ClientError> {
        self.runtime.block_on(self.client.reports())
    }

    /// See [`crate::Client::report`].
    pub fn report(&self, id: &MigrationId) -> Result<Report, ClientError> {
        self.runtime.block_on(self.client.report(id))
    }

    /// See [`crate::Client::follow`].
    pub fn follow(&self, id: &MigrationId, see: impl FnMut(&Report)) -> Result<Report, ClientError> {
        self.runtime.block_on(self.client.follow(id, see))
    }
}
