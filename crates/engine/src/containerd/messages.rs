//! The messages of containerd's API, as far as they are used here: field numbers as in its `api/services` and `api/types`.

use std::collections::BTreeMap;

use prost::Message;

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Any {
    #[prost(string, tag = "1")]
    pub type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// What a container is run by.
#[derive(Clone, PartialEq, Message)]
pub struct Runtime {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub options: Option<Any>,
}

/// `containerd.runc.v1.Options`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RuncOptions {
    #[prost(bool, tag = "1")]
    pub no_pivot_root: bool,
    #[prost(bool, tag = "2")]
    pub no_new_keyring: bool,
    #[prost(string, tag = "3")]
    pub shim_cgroup: String,
    #[prost(uint32, tag = "4")]
    pub io_uid: u32,
    #[prost(uint32, tag = "5")]
    pub io_gid: u32,
    #[prost(string, tag = "6")]
    pub binary_name: String,
    #[prost(string, tag = "7")]
    pub root: String,
    #[prost(string, tag = "8")]
    pub criu_path: String,
    #[prost(bool, tag = "9")]
    pub systemd_cgroup: bool,
    #[prost(string, tag = "10")]
    pub criu_image_path: String,
    #[prost(string, tag = "11")]
    pub criu_work_path: String,
}

/// What containerd knows of a container, whether it runs or not.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub labels: BTreeMap<String, String>,
    #[prost(string, tag = "3")]
    pub image: String,
    #[prost(message, optional, tag = "4")]
    pub runtime: Option<Runtime>,
    #[prost(message, optional, tag = "5")]
    pub spec: Option<Any>,
    #[prost(string, tag = "6")]
    pub snapshotter: String,
    #[prost(string, tag = "7")]
    pub snapshot_key: String,
    #[prost(message, optional, tag = "8")]
    pub created_at: Option<Timestamp>,
    #[prost(btree_map = "string, message", tag = "10")]
    pub extensions: BTreeMap<String, Any>,
}

/// A request that consists of a name: of a container, a task, an image.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Named {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A request for all that there is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Filters {
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
}

/// An answer, or a request, with one container.
#[derive(Clone, PartialEq, Message)]
pub struct OneRecord {
    #[prost(message, optional, tag = "1")]
    pub record: Option<Record>,
}

/// An answer with containers.
#[derive(Clone, PartialEq, Message)]
pub struct Records {
    #[prost(message, repeated, tag = "1")]
    pub records: Vec<Record>,
}

/// An answer with namespaces, of each its name.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Namespaces {
    #[prost(message, repeated, tag = "1")]
    pub namespaces: Vec<Named>,
}

/// A request about a snapshot; `parent` where one is prepared.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Snapshot {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub key: String,
    #[prost(string, tag = "3")]
    pub parent: String,
}

/// What a snapshot is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SnapshotInfo {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub parent: String,
}

/// An answer with that.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OneSnapshot {
    #[prost(message, optional, tag = "1")]
    pub info: Option<SnapshotInfo>,
}

/// What has to be mounted to see a snapshot.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub source: String,
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// An answer with that.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mounts {
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// What an image's name stands for.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Descriptor {
    #[prost(string, tag = "2")]
    pub digest: String,
    #[prost(int64, tag = "3")]
    pub size: i64,
}

/// An image.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "3")]
    pub target: Option<Descriptor>,
}

/// An answer with one.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OneImage {
    #[prost(message, optional, tag = "1")]
    pub image: Option<Image>,
}

/// What runs of a container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Task {
    /// One of `containerd.v1.types.Status`.
    #[prost(int32, tag = "4")]
    pub status: i32,
    #[prost(string, tag = "6")]
    pub stdout: String,
}

impl Task {
    /// The status of one that was made, and not started.
    pub const CREATED: i32 = 1;
}

/// An answer with that.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OneTask {
    #[prost(message, optional, tag = "1")]
    pub task: Option<Task>,
}

/// A request for a signal to a task.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Kill {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(uint32, tag = "3")]
    pub signal: u32,
    #[prost(bool, tag = "4")]
    pub all: bool,
}

/// A part of containerd.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Plugin {
    #[prost(btree_map = "string, string", tag = "5")]
    pub exports: BTreeMap<String, String>,
}

/// An answer with some.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Plugins {
    #[prost(message, repeated, tag = "1")]
    pub plugins: Vec<Plugin>,
}

/// An answer with containerd's version.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Version {
    #[prost(string, tag = "1")]
    pub version: String,
}

/// A request about content.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Content {
    #[prost(string, tag = "1")]
    pub digest: String,
}

/// What is known of content.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContentInfo {
    #[prost(string, tag = "1")]
    pub digest: String,
    #[prost(int64, tag = "2")]
    pub size: i64,
}

/// An answer with that.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OneContent {
    #[prost(message, optional, tag = "1")]
    pub info: Option<ContentInfo>,
}

/// A piece of content.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContentPiece {
    #[prost(int64, tag = "1")]
    pub offset: i64,
    #[prost(bytes = "vec", tag = "2")]
    pub data: Vec<u8>,
}
