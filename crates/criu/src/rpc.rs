//! The part of CRIU's RPC (criu.org/RPC) that the front needs.
//!
//! Responses and the heads of requests are decoded with prost. Requests are *edited*, not decoded and encoded: an engine
//! newer than this code sets fields that it does not know, and they must reach criu. In protobuf's encoding a later
//! scalar field wins over an earlier one and repeated fields add up, so that appending to the options is an edit.

use prost::Message;

/// `criu_req_type`.
#[allow(missing_docs, reason = "the names are CRIU's own")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum RequestType {
    Empty = 0,
    Dump = 1,
    Restore = 2,
    Check = 3,
    PreDump = 4,
    PageServer = 5,
    Notify = 6,
    CpuinfoDump = 7,
    CpuinfoCheck = 8,
    FeatureCheck = 9,
    Version = 10,
}

/// The fields of `criu_opts` that the front reads: descriptors whose numbers are those of the engine's process.
#[derive(Clone, PartialEq, Message)]
pub struct OptionsHead {
    /// Where the images are.
    #[prost(int32, optional, tag = "1")]
    pub images_dir_fd: Option<i32>,
    /// Where logs and sockets are.
    #[prost(int32, optional, tag = "17")]
    pub work_dir_fd: Option<i32>,
}

/// The fields of `criu_req` that the front reads.
#[derive(Clone, PartialEq, Message)]
pub struct RequestHead {
    /// What is asked.
    #[prost(enumeration = "RequestType", required, tag = "1")]
    pub kind: i32,
    /// With which options.
    #[prost(message, optional, tag = "2")]
    pub opts: Option<OptionsHead>,
}

/// `criu_notify`.
#[derive(Clone, PartialEq, Message)]
pub struct Notify {
    /// The stage's name, e.g. `post-restore`.
    #[prost(string, optional, tag = "1")]
    pub script: Option<String>,
    /// Pid of the container's init, where it makes sense.
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
}

/// The fields of `criu_resp` that the front reads.
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    /// What is answered.
    #[prost(enumeration = "RequestType", required, tag = "1")]
    pub kind: i32,
    /// Whether it was done.
    #[prost(bool, required, tag = "2")]
    pub success: bool,
    /// The notification, for `RequestType::Notify`.
    #[prost(message, optional, tag = "5")]
    pub notify: Option<Notify>,
    /// errno of the failure.
    #[prost(int32, optional, tag = "7")]
    pub cr_errno: Option<i32>,
    /// The failure in words.
    #[prost(string, optional, tag = "9")]
    pub cr_errmsg: Option<String>,
}

/// The answer to a notification.
#[derive(Clone, PartialEq, Message)]
struct NotifyReply {
    #[prost(enumeration = "RequestType", required, tag = "1")]
    kind: i32,
    #[prost(bool, optional, tag = "3")]
    notify_success: Option<bool>,
}

/// Encodes the answer to a notification: go on, or fail.
pub fn notify_reply(success: bool) -> Vec<u8> {
    NotifyReply { kind: RequestType::Notify as i32, notify_success: Some(success) }.encode_to_vec()
}

/// Encodes the answer to a restore that was done.
pub fn restored(init: i32) -> Vec<u8> {
    #[derive(Clone, PartialEq, Message)]
    struct Restored {
        #[prost(int32, required, tag = "1")]
        pid: i32,
    }
    #[derive(Clone, PartialEq, Message)]
    struct Answer {
        #[prost(enumeration = "RequestType", required, tag = "1")]
        kind: i32,
        #[prost(bool, required, tag = "2")]
        success: bool,
        #[prost(message, optional, tag = "4")]
        restore: Option<Restored>,
    }
    let restore = Some(Restored { pid: init });
    Answer { kind: RequestType::Restore as i32, success: true, restore }.encode_to_vec()
}

/// `ext_mount_map`: a mount that criu neither dumps nor makes. For a dump `key` is the mount point in the container and `val` a
/// name of it; for a restore `key` is this name and `val` the path, on the node, of what is bound there.
#[derive(Clone, PartialEq, Eq, Message, serde::Serialize, serde::Deserialize)]
pub struct ExternalMount {
    /// Mount point, or name.
    #[prost(string, required, tag = "1")]
    pub key: String,
    /// Name, or path.
    #[prost(string, required, tag = "2")]
    pub val: String,
}

/// `inherit_fd`: an open descriptor of criu's that a restore uses for what the images name so.
#[derive(Clone, PartialEq, Eq, Message, serde::Serialize, serde::Deserialize)]
pub struct InheritedDescriptor {
    /// What the images name it.
    #[prost(string, required, tag = "1")]
    pub key: String,
    /// Its number.
    #[prost(int32, required, tag = "2")]
    pub number: i32,
}

/// Options that the front adds to an engine's request. Tags are those of `criu_opts`; a field that is `None` leaves what
/// the engine said.
#[derive(Clone, PartialEq, Message, serde::Serialize, serde::Deserialize)]
pub struct Overrides {
    /// Number of the images' directory in the front's own process; the front sets it.
    #[prost(int32, optional, tag = "1")]
    #[serde(skip)]
    pub images_dir_fd: Option<i32>,
    /// Number of the work directory in the front's own process; the front sets it.
    #[prost(int32, optional, tag = "17")]
    #[serde(skip)]
    pub work_dir_fd: Option<i32>,
    /// Leave the tasks as they were before the dump.
    #[prost(bool, optional, tag = "3")]
    pub leave_running: Option<bool>,
    /// Verbosity of CRIU's log, 0–4.
    #[prost(int32, optional, tag = "9")]
    pub log_level: Option<i32>,
    /// Make temporary links for files that are open but have lost their last name.
    #[prost(bool, optional, tag = "18")]
    pub link_remap: Option<bool>,
    /// Mounts to leave alone, besides those that the engine names. (CRIU calls the field deprecated, and runc uses it.)
    #[prost(message, repeated, tag = "23")]
    #[serde(default)]
    pub ext_mnt: Vec<ExternalMount>,
    /// Descriptors that stand for objects of the images; the front sets them.
    #[prost(message, repeated, tag = "27")]
    #[serde(skip)]
    pub inherited: Vec<InheritedDescriptor>,
    /// Fail where the path of an inotify watch is not found, after a search, and do not rely on the handle.
    #[prost(bool, optional, tag = "21")]
    pub force_irmap: Option<bool>,
    /// `criu_cg_mode`: 0 is "ignore".
    #[prost(int32, optional, tag = "34")]
    pub manage_cgroups_mode: Option<i32>,
    /// Largest deleted file that is carried along, in bytes.
    #[prost(uint32, optional, tag = "35")]
    pub ghost_limit: Option<u32>,
    /// Drop connections that are half open rather than fail.
    #[prost(bool, optional, tag = "46")]
    pub tcp_skip_in_flight: Option<bool>,
    /// Memory comes through userfaultfd.
    #[prost(bool, optional, tag = "48")]
    pub lazy_pages: Option<bool>,
    /// What is neither dumped nor made, besides what the engine names: `net[INODE]:KEY` for a network namespace that the restore is
    /// given under this key.
    #[prost(string, repeated, tag = "37")]
    #[serde(default)]
    pub external: Vec<String>,
    /// `criu_network_lock_method`: 3 is "skip".
    #[prost(int32, optional, tag = "64")]
    pub network_lock: Option<i32>,
    /// Do not compare the mode bits of files.
    #[prost(bool, optional, tag = "66")]
    pub skip_file_rwx_check: Option<bool>,
}

/// A request that is not protobuf, or lacks its options.
#[derive(Debug, thiserror::Error)]
#[error("the engine's request to criu cannot be read: {0}")]
pub struct BadRequest(#[from] prost::DecodeError);

/// The request with `overrides` appended to its options; everything else, known or not, stays byte for byte.
pub fn edit(request: &[u8], overrides: &Overrides) -> Result<Vec<u8>, BadRequest> {
    const OPTS_KEY: u64 = 2 << 3 | 2;
    let mut rest = request;
    let mut out = Vec::with_capacity(request.len() + 64);
    let mut opts = Vec::new();
    while !rest.is_empty() {
        let field = rest;
        let key = prost::encoding::decode_varint(&mut rest)?;
        if key == OPTS_KEY {
            let len = prost::encoding::decode_varint(&mut rest)? as usize;
            // A message may come in pieces, which add up.
            opts.extend_from_slice(rest.get(..len).ok_or_else(truncated)?);
            rest = &rest[len..];
            continue;
        }
        match key & 7 {
            0 => {
                prost::encoding::decode_varint(&mut rest)?;
            }
            1 => rest = rest.get(8..).ok_or_else(truncated)?,
            2 => {
                let len = prost::encoding::decode_varint(&mut rest)? as usize;
                rest = rest.get(len..).ok_or_else(truncated)?;
            }
            5 => rest = rest.get(4..).ok_or_else(truncated)?,
            _ => return Err(truncated().into()),
        }
        out.extend_from_slice(&field[..field.len() - rest.len()]);
    }
    overrides.encode(&mut opts).expect("a Vec grows");
    prost::encoding::encode_varint(OPTS_KEY, &mut out);
    prost::encoding::encode_varint(opts.len() as u64, &mut out);
    out.extend_from_slice(&opts);
    Ok(out)
}

/// prost's error for a message that ends early; it has no public constructor of its own.
fn truncated() -> prost::DecodeError {
    prost::encoding::decode_varint(&mut &[][..]).expect_err("an empty buffer holds no number")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, PartialEq, Message)]
    struct Newer {
        #[prost(enumeration = "RequestType", required, tag = "1")]
        kind: i32,
        #[prost(message, optional, tag = "2")]
        opts: Option<NewerOptions>,
        #[prost(string, optional, tag = "900")]
        novelty: Option<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct NewerOptions {
        #[prost(int32, required, tag = "1")]
        images_dir_fd: i32,
        #[prost(bool, optional, tag = "3")]
        leave_running: Option<bool>,
        #[prost(message, repeated, tag = "23")]
        ext_mnt: Vec<ExternalMount>,
        #[prost(string, repeated, tag = "37")]
        external: Vec<String>,
        #[prost(string, optional, tag = "901")]
        novelty: Option<String>,
    }

    #[test]
    fn an_edit_keeps_what_it_does_not_know() {
        let request = Newer {
            kind: RequestType::Dump as i32,
            opts: Some(NewerOptions {
                images_dir_fd: 7,
                leave_running: Some(false),
                ext_mnt: vec![ExternalMount { key: "/etc/hosts".into(), val: "/etc/hosts".into() }],
                external: vec!["mnt[/a]:/a".into(), "mnt[/b]:/b".into()],
                novelty: Some("inner".into()),
            }),
            novelty: Some("outer".into()),
        };
        let ours = ExternalMount { key: "/tmp".into(), val: "tmpfs-0".into() };
        let overrides = Overrides {
            images_dir_fd: Some(12),
            leave_running: Some(true),
            ext_mnt: vec![ours.clone()],
            ..Overrides::default()
        };
        let edited = Newer::decode(&*edit(&request.encode_to_vec(), &overrides).unwrap()).unwrap();
        let mut expected = request;
        expected.opts.as_mut().unwrap().images_dir_fd = 12;
        expected.opts.as_mut().unwrap().leave_running = Some(true);
        expected.opts.as_mut().unwrap().ext_mnt.push(ours);
        assert_eq!(edited, expected);
    }

    proptest! {
        #[test]
        fn no_input_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = edit(&bytes, &Overrides { lazy_pages: Some(true), ..Overrides::default() });
            let _ = RequestHead::decode(&*bytes);
            let _ = Response::decode(&*bytes);
        }
    }
}
