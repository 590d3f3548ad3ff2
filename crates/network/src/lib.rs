//! The container's network identity on a node: capturing it, making it again, and deciding which copy speaks.
//!
//! ```text
//! source       capture ─── hold.begin, gate.close ─────── (COMMIT) hold.take, stand_aside ── remove
//! destination            create (gate closed) ── restore ─ (COMMIT) gate.open ── announce, inject
//! ```
//!
//! Two copies of an identity, same MAC and same addresses, exist at once during a migration. The *gate* keeps all but one
//! of them mute and deaf: a table of the netdev family in the container's own network namespace that drops every frame in
//! both directions, so not one ARP reply, neighbour solicitation, RST or FIN comes from the wrong one. It belongs to the
//! namespace, not to a process, so it stays when an agent dies.
//!
//! What reaches the closed gate of the live copy is *held* and delivered to the copy that runs next ([`Hold`],
//! [`Injector`]), so that peers need no retransmission.
//!
//! All functions take the calling thread's network namespace for the node's; what has to happen inside the container's
//! happens on a short-lived thread of its own.

mod announce;
mod backlog;
mod bridge;
mod capture;
pub mod cni;
mod conntrack;
mod create;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod gate;
mod hold;
mod inject;
mod link;
mod membership;
mod multicast;
mod named;
mod namespace;
mod neighbours;
mod nfnetlink;
mod nftables;
mod queue;
mod redirect;
mod repair;
mod reply;
mod routes;
mod rtnl;
mod rules;
pub mod ruleset;
mod segment;
mod sockets;
mod sysctls;
mod takeover;
mod unread;
mod vxlan;

pub use announce::{Announcer, stand_aside, step_forward};
pub use backlog::Backlog;
pub use bridge::{Bridge, bridges};
pub use capture::capture;
pub use conntrack::node::{NodeConntrack, track as track_on_node};
pub use conntrack::{Conntrack, track};
pub use create::{attachable, close_attached, configure, create, processes, remove, rename, reserve, unname};
pub use error::NetworkError;
pub use gate::Gate;
pub use hold::{HELD_BYTES, HeldFrame, Hold};
pub use inject::Injector;
pub use named::check_name;
pub use queue::Queue;
pub use repair::end_repair;
pub use segment::{BridgePort, bridge_ports, connected_addresses, leads_beyond_node};
pub use sockets::{
    Dropped, OpenSocket, SocketState, SocketStates, newer_options, set_socket_states, socket_states, unclaimed_groups,
};
pub use takeover::{Takeover, reopen};
pub use unread::{Unread, unread};
pub use vxlan::{VXLAN_BITS, Vxlan, VxlanState, is_own_address, remove_vxlan, try_vxlan, vxlan_id, vxlan_name, vxlans};
