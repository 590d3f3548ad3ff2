//! Makes the seeds that are no JSON: texts and messages of this machine's kernel about processes and namespaces that were made for it, and
//! messages of our own. Those that are JSON are written by hand.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;
use serde_json::json;
use tranship_api::{GroupRequest, MoveRequest, PlanRequest, RecoverRequest};
use tranship_network::{HeldFrame, SocketState};
use tranship_storage::TreeDigest;
use tranship_storage::copy::Op;
use tranship_storage::tmpfs::TmpfsMount;
use tranship_types::NetworkIdentity;
use tranship_wire::message::{Request, Response};
use tranship_wire::{Codec, FileBegin, FrameHeader, HELLO_PREFIX_LEN, Hello, Purpose, Refusal, RefusalKind, Welcome};

/// A process with a descriptor of each kind and mappings of each kind, and the kernel's lists of what a network namespace has.
const SUBJECT: &str = include_str!("subject.py");

/// Makes all of them below a directory.
pub fn make(seeds: &Path) {
    let mut subject = Command::new("unshare")
        .args(["--net", "--mount", "--ipc", "python3", "-c", SUBJECT])
        .arg(seeds)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(subject.stdout.take().unwrap()).read_line(&mut line).unwrap();
    subject.wait().unwrap();
    assert_eq!(line, "ready\n");
    let keep = |target: &str, name: &str, bytes: &[u8]| {
        fs::create_dir_all(seeds.join(target)).unwrap();
        fs::write(seeds.join(target).join(name), bytes).unwrap();
    };
    wire(&keep);
    binary(&keep);
}

fn wire(keep: &impl Fn(&str, &str, &[u8])) {
    let id = "m-4k7tq0zd".parse().unwrap();
    let hello = Hello::new("rack3-host7".parse().unwrap(), Purpose::Pages { stream: 3 }, Some(id)).encode();
    keep("hello", "whole", &hello);
    keep("hello", "body", &hello[HELLO_PREFIX_LEN..]);
    let refused = Welcome::Refused(Refusal { kind: RefusalKind::Node, reason: "no".into() }).encode();
    keep("welcome", "refused", &refused);
    keep("welcome", "body", &refused[HELLO_PREFIX_LEN..]);
    let mut stream = Vec::new();
    let space = tranship_types::AddressSpaceId(7);
    let range = tranship_types::PageRange::new(0x1000, 0x3000).unwrap();
    for header in [FrameHeader::Zero { space, range }, FrameHeader::Ping { timestamp_ns: 5 }, FrameHeader::Named] {
        stream.extend(header.encode());
        keep("frame_header", &format!("{:?}", header.kind()), &header.encode());
    }
    tranship_wire::queue_message(&mut stream, &json!({"request": "clock"})).unwrap();
    keep("stream", "some", &stream);
    let page: Vec<u8> = (0..4096u32).map(|at| (at / 64) as u8).collect();
    keep("packed", "page", &page);
    for codec in Codec::ALL {
        if let Some(packed) = tranship_wire::packed::Packer::new().unwrap().pack(codec, &page) {
            keep("packed", &codec.to_string(), packed);
        }
    }
    keep("runs", "two", &[0, 0, 0x10, 0, 0, 0, 0, 0, 0, 1, 1, 0x85, 1, 3]);
    keep("runs", "wants", &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
}

/// A seed of JSON that is refused at once is worth little. Those whose names begin with `found-` are refused since they were found.
pub fn are_read(seeds: &Path) {
    fn all<T: DeserializeOwned>(seeds: &Path, target: &str, names: &[&str]) {
        for name in names {
            let text = fs::read(seeds.join(target).join(name)).unwrap();
            if let Err(error) = serde_json::from_slice::<T>(&text) {
                panic!("the seed {name} of {target}: {error}");
            }
        }
    }
    all::<Request>(seeds, "message", &["clock", "held", "huge", "offer", "probe", "shared", "skeleton"]);
    all::<Response>(seeds, "message", &["draining", "failed"]);
    all::<NetworkIdentity>(seeds, "offered", &["identity"]);
    all::<Vec<TmpfsMount>>(seeds, "offered", &["mounts"]);
    all::<TreeDigest>(seeds, "offered", &["digest"]);
    all::<Vec<HeldFrame>>(seeds, "held", &["frames"]);
    all::<Vec<SocketState>>(seeds, "held", &["states"]);
    all::<Op>(seeds, "tree_op", &["make", "mount", "park", "unname"]);
    all::<FileBegin>(seeds, "file", &["image"]);
    all::<MoveRequest>(seeds, "api", &["move"]);
    all::<PlanRequest>(seeds, "api", &["plan"]);
    all::<GroupRequest>(seeds, "api", &["group"]);
    all::<RecoverRequest>(seeds, "api", &["recover"]);
}

/// What is neither text nor JSON.
fn binary(keep: &impl Fn(&str, &str, &[u8])) {
    let raw = |text: &str, target: &str, name: &str| keep(target, name, text.as_bytes());
    raw("m-4k7tq0zd", "api", "id");
    raw("1.5Gbit/s", "api", "bandwidth");
    raw("runc version 1.2.5\ncommit: v1\nspec: 1.2.0\n", "engine_texts", "runc");
    raw("crun version 1.21\n+SYSTEMD +SELINUX +CRIU\n", "engine_texts", "crun");
    raw("3132ff", "engine_texts", "digits");
    raw(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n22 21 0:58 / /run rw,nosuid shared:9 - tmpfs tmpfs rw\n",
        "engine_texts",
        "mounts",
    );
    raw(
        "HTTP/1.1 200 OK\r\nServer: Docker\r\n\r\n{\"Id\": \"a\", \"Config\": {}, \"HostConfig\": {}}",
        "parameters",
        "answer",
    );
    raw("812 1 230 1 5000000 100\n", "proc_others", "waits");
    raw(
        "inotify wd:1 ino:2a sdev:3d mask:100 ignored_mask:0 fhandle-bytes:20 fhandle-type:f8 \
         f_handle:00000000fb1d0001000102030405060708090a0b0c0d0e0f2a0000000700000000000000\n",
        "proc_fdinfo",
        "overlay",
    );
    journal(keep);
    // CRIU's RPC: a dump with options, a notification.
    keep("criu_rpc", "request", &[8, 1, 0x12, 8, 8, 7, 0x88, 1, 5, 0x92, 1, 0, 0x18, 1]);
    keep(
        "criu_rpc",
        "notification",
        &[
            8, 6, 0x10, 1, 0x2a, 16, 10, 12, b'p', b'o', b's', b't', b'-', b'r', b'e', b's', b't', b'o', b'r', b'e',
            0x10, 7,
        ],
    );
    for message in [&b"L\x07\0\0\0\0\x10\0\0\0\0\0\0\0\x30\0\0\0\0\0\0"[..], b"N", b"M", b"S"] {
        keep("pager_message", &format!("{}", message[0] as char), message);
    }
    let gone = [&b"Z"[..], &7u64.to_le_bytes(), &0x1000u64.to_le_bytes(), &0x3000u64.to_le_bytes()].concat();
    keep("pager_message", "Z", &gone);
    let extents =
        [&b"I"[..], &7u32.to_le_bytes(), &2u32.to_le_bytes(), &0x1000u64.to_le_bytes(), &0u64.to_le_bytes()].concat();
    keep("pager_message", "I", &extents);
    for event in [0x12u8, 0x13, 0x14, 0x15, 0x16] {
        let words = [u64::from(event), 5, 0x7000, 0x2000].map(u64::to_le_bytes).concat();
        keep("records", &format!("userfault-{event:x}"), &words);
    }
    // An event of fanotify with a handle of a tmpfs.
    let mut event =
        [&48u32.to_ne_bytes()[..], &[3, 0, 24, 0], &8u64.to_ne_bytes(), &(-1i32).to_ne_bytes(), &7u32.to_ne_bytes()]
            .concat();
    event.extend(
        [
            &[1, 0, 24, 0][..],
            &[1; 8],
            &12u32.to_ne_bytes(),
            &1u32.to_ne_bytes(),
            &[5, 0, 0, 0, 42, 0, 0, 0, 0, 0, 0, 0],
        ]
        .concat(),
    );
    event[0] = event.len() as u8;
    keep("records", "fanotify", &event);
    // Two names, two structures with two members each, one of them in the other without a name, and a function.
    let types: Vec<u32> = [
        [1, 0x0400_0002, 16, 3, 0, 0, 0, 2, 32],
        [3, 0x0400_0002, 8, 3, 4, 0, 5, 4, 32],
        [7, 0x0100_0000, 4, 32, 7, 0x0c00_0000, 0, 0, 0],
    ]
    .concat();
    let types = &types[..types.len() - 2];
    let strings = b"\0s\0a\0b\0f\0";
    let length = types.len() as u32 * 4;
    let mut btf = [0x0018_eb9f_u32 & 0xffff | 1 << 16, 24, 0, length, length, strings.len() as u32]
        .map(u32::to_le_bytes)
        .concat();
    btf.extend(types.iter().flat_map(|word| word.to_le_bytes()));
    btf.extend(strings);
    keep("btf", "two-structures", &btf);
    keep("certificate", "node", &certificate());
    keep("archive", "image", &archive());
    // A container's record, with an OCI configuration in it.
    let spec = b"\x0a\x03abc\x12\x02{}";
    let record = [&b"\x0a\x01c\x1a\x01i"[..], &[0x2a, spec.len() as u8], spec].concat();
    keep("containerd", "record", &[&[0x0a, record.len() as u8][..], &record].concat());
}

fn journal(keep: &impl Fn(&str, &str, &[u8])) {
    use tranship_coordinator::{Failure, Journal, Record};
    let directory = tempfile::tempdir().unwrap();
    let begin = Record::Begin {
        id: "m-4k7tq0zd".parse().unwrap(),
        side: tranship_types::Side::Source,
        container: "redis".into(),
        peer: "b".parse().unwrap(),
        context: json!({"a": 1}),
    };
    let mut journal = Journal::create(directory.path(), "m-4k7tq0zd", &begin).unwrap();
    journal.append(&Record::step("freeze")).unwrap();
    journal.append(&Record::step("await-ready")).unwrap();
    journal.decide(&Record::Commit).unwrap();
    let text = fs::read(journal.path()).unwrap();
    let written = text.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    keep("journal", "committed", &text[..written + 64]);
    let cut = written - 20;
    keep("journal", "torn", &[&text[..cut], &[0; 64]].concat());
    journal.append(&Record::Undone { failure: Failure::new("no") }).unwrap();
    let text = fs::read(journal.path()).unwrap();
    keep("journal", "undone", &text[..text.iter().rposition(|byte| *byte != 0).unwrap() + 1]);
}

/// A node's certificate in DER, by the CA that `tranship init` makes.
fn certificate() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("key");
    let der = directory.path().join("der");
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            "/CN=b",
            "-addext",
            "subjectAltName=DNS:b",
            "-outform",
            "DER",
            "-keyout",
        ])
        .arg(key)
        .arg("-out")
        .arg(&der)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    fs::read(der).unwrap()
}

/// An archive of an image with two layers.
fn archive() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| fs::write(directory.path().join(name), content).unwrap();
    file("a", "layer");
    file("b", "other");
    file("manifest.json", r#"[{"Config": "c", "Layers": ["a", "b"]}]"#);
    let made = Command::new("tar")
        .args(["-b", "1", "-C"])
        .arg(directory.path())
        .args(["-c", "a", "b", "manifest.json"])
        .output()
        .unwrap();
    made.stdout
}
