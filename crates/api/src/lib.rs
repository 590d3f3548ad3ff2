//! The agent's HTTP+JSON API, spoken over a Unix socket: what is exchanged, the server's side, and a client.
//!
//! | call | answer |
//! |---|---|
//! | `GET /v1/node` | [`NodeInfo`] |
//! | `GET /v1/containers` | [`ContainerInfo`]s |
//! | `GET /v1/companions?to=NODE` | [`Companions`] |
//! | `POST /v1/migrations` ([`MoveRequest`]) | 202 [`Report`], or 200 [`Plan`] for a dry run |
//! | `POST /v1/plans` ([`PlanRequest`]) | [`Plan`] with a prediction |
//! | `POST /v1/recoveries` ([`RecoverRequest`]) | 202 [`Report`] |
//! | `GET /v1/leftovers`, `DELETE /v1/leftovers` | [`Leftover`]s: those found, and what became of them |
//! | `GET /v1/held-addresses` | [`HeldAddresses`] |
//! | `GET /v1/paths` | [`KeptPath`]s |
//! | `DELETE /v1/held-addresses/CONTAINER` | [`HeldAddresses`]: those that were given back |
//! | `GET /v1/migrations` | [`Report`]s, newest first |
//! | `GET /v1/migrations/ID` | [`Report`] |
//! | `DELETE /v1/migrations/ID` | 202 [`Report`]: it is being undone |
//! | `GET /v1/migrations/ID/events` | newline-delimited [`Report`]s until the migration has ended |
//! | `POST /v1/groups` ([`GroupRequest`]) | 202 [`GroupReport`] |
//! | `POST /v1/group-plans` ([`GroupRequest`]) | [`GroupPlan`] |
//! | `GET /v1/groups`, `/v1/groups/ID`, `/v1/groups/ID/events` | as of migrations: [`GroupReport`]s |
//! | `DELETE /v1/groups/ID` | 202 [`GroupReport`]: what is not decided of it is being undone |
//! | `GET /v1/openapi.json` | the OpenAPI description |
//!
//! Everything else is an [`ApiError`]: 400 for a request that makes no sense, 404 for an unknown id or container, 409 where
//! a move of the container is under way or it is too late to cancel one, 422 for blockers, 503 where this node cannot move anything as it stands, 500 for
//! what should not happen.
//!
//! An agent implements [`AgentService`] and hands it to [`router`] and [`serve`]. Programs use [`Client`], or
//! [`blocking::Client`] where they have no async runtime.
//!
//! [`GroupReport`]: tranship_types::GroupReport
//! [`Report`]: tranship_types::Report

mod accept;
pub mod blocking;
mod client;
mod companions;
mod exchange;
mod group;
mod held;
mod leftover;
mod local_network;
mod openapi;
mod passed;
mod path;
mod server;
mod service;
mod socket;
mod watched;

pub use client::{Client, ClientError, Events, NODE_HEADER};
pub use companions::Companions;
pub use exchange::{
    ApiError, Begun, ContainerInfo, ContainerState, ErrorBody, Keep, MoveRequest, NodeInfo, PeerInfo, PeerState, Plan,
    PlanRequest, Problem, RecoverRequest, ToolInfo,
};
pub use group::{GroupContainer, GroupPlan, GroupRequest, Label, MemberPlan};
pub use held::{HeldAddress, HeldAddresses};
pub use leftover::{Leftover, LeftoverKind};
pub use local_network::{LocalNetwork, NetworkNeighbour};
pub use openapi::description;
pub use passed::{PassedAnswer, PassedCall, answer};
pub use path::{KeptContainer, KeptPath};
pub use server::{router, serve};
pub use service::{AgentService, ErrorKind, ServiceError};
pub use socket::{BindError, bind};
pub use watched::Watched;

/// Where the agent listens unless it is told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/tranship/agent.sock";
