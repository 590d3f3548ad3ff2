//! What an agent or a program of another version may send: kinds that this version does not know.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Value, from_value, json};
use tranship_api::{ContainerState, Keep, Leftover, LeftoverKind, PeerState};
use tranship_types::{
    AddressState, Attachment, Blocker, BlockerKind, Compress, EngineName, GroupOrder, Logs, MemberOutcome, Mode,
    OnTimeout, Original, Outcome, Phase, RuleVerdict, SharedKind, Side, StdioKind, TreeKind, WaitKind,
};
use tranship_wire::message::{Holding, Known, Request, Response};

const UNKNOWN: &str = "a-kind-of-tomorrow";

/// How an enum reads a kind that it does not know: shows it as `T`'s variant for that, or refuses it.
fn read<T: DeserializeOwned + Debug>() -> Result<String, String> {
    let tagged = json!({ "kind": UNKNOWN, "request": UNKNOWN, "response": UNKNOWN, "state": UNKNOWN });
    let read = [json!(UNKNOWN), tagged].map(from_value::<T>);
    let shown = read.iter().find_map(|one| one.as_ref().ok()).map(|value| format!("{value:?}"));
    shown.ok_or_else(|| format!("{read:?}"))
}

/// The name of an enum, and how it reads a kind that it does not know.
type Enum = (&'static str, fn() -> Result<String, String>);

/// Enums that only report something: what is unknown must not hide the rest of an answer.
const SHOWN: [(Enum, &str); 9] = [
    (("AddressState", read::<AddressState>), "Unknown"),
    (("BlockerKind", read::<BlockerKind>), "Other"),
    (("WaitKind", read::<WaitKind>), "Other"),
    (("Original", read::<Original>), "Unknown"),
    (("Phase", read::<Phase>), "Unknown"),
    (("PeerState", read::<PeerState>), "Unknown"),
    (("ContainerState", read::<ContainerState>), "Unknown"),
    (("LeftoverKind", read::<LeftoverKind>), "Other"),
    (("Known", read::<Known>), "Unknown"),
];

/// Enums that something is done by: what is unknown must not be taken for anything else.
const REFUSED: [Enum; 18] = [
    ("Attachment", read::<Attachment>),
    ("Compress", read::<Compress>),
    ("EngineName", read::<EngineName>),
    ("GroupOrder", read::<GroupOrder>),
    ("Holding", read::<Holding>),
    ("Keep", read::<Keep>),
    ("Logs", read::<Logs>),
    ("MemberOutcome", read::<MemberOutcome>),
    ("Mode", read::<Mode>),
    ("OnTimeout", read::<OnTimeout>),
    ("Outcome", read::<Outcome>),
    ("Request", read::<Request>),
    ("Response", read::<Response>),
    ("RuleVerdict", read::<RuleVerdict>),
    ("SharedKind", read::<SharedKind>),
    ("Side", read::<Side>),
    ("StdioKind", read::<StdioKind>),
    ("TreeKind", read::<TreeKind>),
];

#[test]
fn unknown_kinds_are_shown_or_refused() {
    for ((name, read), expected) in SHOWN {
        assert_eq!(read().as_deref(), Ok(expected), "{name}");
    }
    for (name, read) in REFUSED {
        assert!(read().is_err(), "{name} is read as {:?}", read());
    }
}

/// The enums that a crate reads from others.
fn enums_of(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        if entry.path().is_dir() {
            enums_of(&entry.path(), found);
            continue;
        }
        let mut is_read = false;
        for line in fs::read_to_string(entry.path()).unwrap().lines() {
            match line.strip_prefix("pub enum ") {
                Some(rest) if is_read => drop(found.insert(rest.trim_end_matches([' ', '{']).to_owned())),
                _ if line.starts_with("#[derive(") => is_read = line.contains("Deserialize"),
                _ => {}
            }
            is_read &= line.starts_with("#[") || line.starts_with("///");
        }
    }
}

#[test]
fn every_enum_that_crosses_versions_is_in_the_tables() {
    let mut found = BTreeSet::new();
    for one in ["types", "api", "wire"] {
        enums_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(one).join("src"), &mut found);
    }
    let names = SHOWN.map(|((name, _), _)| name).into_iter().chain(REFUSED.map(|(name, _)| name));
    assert_eq!(found, names.map(str::to_owned).collect());
}

#[test]
fn a_blocker_of_an_unknown_kind_keeps_its_words() {
    let blocker = json!({ "kind": UNKNOWN, "cause": "the moon is in the way", "remedy": "wait" });
    let told = |answer: Value| -> Blocker {
        match from_value(answer).unwrap() {
            Response::Failed { mut blockers, .. } | Response::Checked { mut blockers, .. } => blockers.remove(0),
            other => panic!("{other:?}"),
        }
    };
    for answer in [
        json!({ "response": "failed", "message": "no", "blockers": [blocker] }),
        json!({ "response": "checked", "blockers": [blocker] }),
    ] {
        assert_eq!(told(answer).to_string(), "the moon is in the way; wait");
    }
    let leftover = json!({ "kind": UNKNOWN, "name": "moon", "removed": false });
    assert_eq!(from_value::<Leftover>(leftover).unwrap().name, "moon");
}
