//! The words of Tranship as types: ids, page ranges, modes, phases, blockers and reports. No I/O.
//!
//! Everything here is plain data that serialises with serde; the JSON forms are part of the API.

mod allow;
mod blocker;
mod engine;
mod group;
mod huge;
mod id;
mod image;
mod latency;
mod mode;
mod network;
mod options;
mod pages;
mod path;
mod phase;
mod prediction;
mod report;
mod shared;
mod stdio;
mod text;
mod tree;

pub use allow::{ALLOWABLE, Allowable, Allowances, UnknownAllowable};
pub use blocker::{Blocker, BlockerKind};
pub use engine::EngineName;
pub use group::{GroupMember, GroupOrder, GroupReport, MemberOutcome, Span};
pub use huge::{HugePages, HugeReport};
pub use id::{GroupId, InvalidName, MigrationId, NodeName, check_container_name};
pub use image::ImageToSend;
pub use latency::Latencies;
pub use mode::Mode;
pub use network::{
    AddressState, Attachment, CniAttachment, Interface, MAIN_TABLE, Neighbour, NetworkIdentity, ReservedAddress, Route,
    Rule, RuleVerdict, ScopedAddress,
};
pub use options::{Bandwidth, Compress, InvalidBandwidth, Logs, MoveOptions, OnTimeout, SenselessOptions};
pub use pages::{AddressSpaceId, PAGE_SIZE, PageRange};
pub use path::{OfferedPath, PathEnd};
pub use phase::{Outcome, Phase};
pub use prediction::Prediction;
pub use report::{Compressed, FaultReport, Original, Part, Progress, Report, RoundReport, Side, WaitKind, Waiting};
pub use shared::{SharedKind, SharedObject};
pub use stdio::{FileIdentity, FileOwner, InvalidStdioTarget, StdioKind, StdioStream, StdioTarget};
pub use text::escaped;
pub use tree::{CarriedTree, TreeKind};
