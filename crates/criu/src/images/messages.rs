//! The fields of CRIU's images (its folder `images/`, version 4.2) that the check compares. CRIU decodes the same bytes
//! with protobuf-c, which agrees with prost on repeated, merged and truncated fields. Text is kept as bytes: paths of a
//! container need not be UTF-8.

use prost::Message;

/// `inventory_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Inventory {
    #[prost(uint32, tag = "1")]
    pub img_version: u32,
    /// Namespaces and tables of the criu that dumped.
    #[prost(message, optional, tag = "3")]
    pub root_ids: Option<Ids>,
    #[prost(message, optional, tag = "12")]
    pub plugins: Option<Plugins>,
}

/// `plugins_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Plugins {
    #[prost(bytes = "vec", repeated, tag = "12")]
    pub plugins: Vec<Vec<u8>>,
}

/// `task_kobj_ids_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Ids {
    #[prost(uint32, optional, tag = "5")]
    pub pid: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub net: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub ipc: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub uts: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub mnt: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub user: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub time: Option<u32>,
}

/// `pstree_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Process {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    #[prost(uint32, tag = "2")]
    pub ppid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// `core_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Core {
    #[prost(message, optional, tag = "3")]
    pub task: Option<Task>,
    #[prost(message, optional, tag = "5")]
    pub thread: Option<Thread>,
}

/// `task_core_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Task {
    #[prost(uint32, tag = "1")]
    pub state: u32,
    #[prost(bytes = "vec", tag = "6")]
    pub comm: Vec<u8>,
}

/// `thread_core_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Thread {
    #[prost(message, optional, tag = "10")]
    pub creds: Option<Creds>,
    #[prost(uint32, optional, tag = "11")]
    pub seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub seccomp_filter: Option<u32>,
}

/// `creds_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Creds {
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub inheritable: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub permitted: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub effective: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub bounding: Vec<u32>,
    #[prost(bytes = "vec", optional, tag = "15")]
    pub lsm_profile: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "16")]
    pub lsm_sockcreate: Option<Vec<u8>>,
    #[prost(uint32, optional, tag = "18")]
    pub no_new_privs: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub ambient: Vec<u32>,
}

/// `seccomp_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Seccomp {
    #[prost(message, repeated, tag = "1")]
    pub filters: Vec<Filter>,
}

/// `seccomp_filter`.
#[derive(Clone, PartialEq, Message)]
pub struct Filter {
    #[prost(bytes = "vec", tag = "1")]
    pub program: Vec<u8>,
    /// The filter that was installed before it, by its place in the image.
    #[prost(uint32, optional, tag = "2")]
    pub previous: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub flags: Option<u32>,
}

/// `mnt_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    #[prost(uint32, tag = "1")]
    pub fstype: u32,
    #[prost(uint32, tag = "2")]
    pub id: u32,
    #[prost(uint32, tag = "3")]
    pub device: u32,
    #[prost(uint32, tag = "4")]
    pub parent: u32,
    #[prost(uint32, tag = "5")]
    pub flags: u32,
    #[prost(bytes = "vec", tag = "6")]
    pub root: Vec<u8>,
    #[prost(bytes = "vec", tag = "7")]
    pub point: Vec<u8>,
    #[prost(bytes = "vec", tag = "8")]
    pub source: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    pub options: Vec<u8>,
    #[prost(uint32, optional, tag = "10")]
    pub shared: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub master: Option<u32>,
    #[prost(bool, optional, tag = "12")]
    pub plugin: Option<bool>,
    #[prost(bool, optional, tag = "13")]
    pub external: Option<bool>,
    #[prost(bytes = "vec", optional, tag = "14")]
    pub fsname: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "16")]
    pub deleted: Option<bool>,
    #[prost(uint32, optional, tag = "17")]
    pub sb_flags: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "18")]
    pub key: Option<Vec<u8>>,
}

/// `userns_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct UserNamespace {
    #[prost(message, repeated, tag = "1")]
    pub uids: Vec<Extent>,
    #[prost(message, repeated, tag = "2")]
    pub gids: Vec<Extent>,
}

/// `uid_gid_extent`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Extent {
    #[prost(uint32, tag = "1")]
    pub first: u32,
    #[prost(uint32, tag = "2")]
    pub outside: u32,
    #[prost(uint32, tag = "3")]
    pub count: u32,
}

/// `file_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct File {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    #[prost(uint32, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "3")]
    pub regular: Option<Regular>,
    #[prost(message, optional, tag = "16")]
    pub unix: Option<Unix>,
}

/// `reg_file_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Regular {
    #[prost(bytes = "vec", tag = "6")]
    pub name: Vec<u8>,
    #[prost(sint32, optional, tag = "7")]
    pub mount: Option<i32>,
}

/// `unix_sk_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Unix {
    #[prost(uint32, tag = "6")]
    pub uflags: u32,
}

/// `net_device_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
}

/// `ghost_file_entry`.
#[derive(Clone, PartialEq, Message)]
pub struct Ghost {
    #[prost(uint32, tag = "3")]
    pub mode: u32,
}
