//! The check of images that come from a peer, before criu restores what they describe, as root.
//!
//! A peer that sends a container sends its configuration, which the policy has compared with what the peer may send
//! and from which the engine here has made the container, and CRIU's images, which describe its processes. Forged
//! images could give these other rights: capabilities, mounts of the node, the node's namespaces. So the images are
//! compared with the configuration:
//!
//! ```text
//!  images, by name ──▶ known kinds only ──▶ tasks: namespaces, credentials, filters    ─┐
//!  OCI configuration of this node ──▶ Allowed ──▶ mounts: the configuration's, options ├─▶ findings
//!                                     files: made inside, no paths upwards             ─┘
//! ```
//!
//! What a program in the container can have done itself is allowed: with CAP_SYS_ADMIN, mounts and namespaces of its
//! own. Not compared are which calls a filter allows, users and groups, limits, the content of memory and of sockets.
//! And CRIU itself parses all of it.

mod allowed;
mod files;
mod kinds;
mod messages;
mod mounts;
mod network;
mod tasks;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use prost::Message;
use tranship_sys::mount::Restrictions;
use tranship_types::escaped;

pub use self::allowed::{Allowed, Profile};
use self::kinds::{Entries, Kind, LARGEST};

/// Kinds that are read; of the others the names are looked at.
const READ: [&str; 10] =
    ["apparmor", "core", "files", "ghost-file", "ids", "inventory", "mountpoints", "pstree", "seccomp", "userns"];
/// Bytes of a ghost file's image that are read: its entry, not the content of the file.
const GHOST: u64 = 64 << 10;
/// Most findings of one check that are told.
const TOLD: usize = 8;
/// The most entries of one image.
const MOST_ENTRIES: usize = 1 << 18;

/// What images do that the configuration does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// A verb and its objects: what "the images" do.
    pub what: String,
    /// How the container could come all the same, where an honest source could send this.
    pub remedy: Option<&'static str>,
}

impl Finding {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: None }
    }

    fn with_remedy(self, remedy: &'static str) -> Self {
        Self { remedy: Some(remedy), ..self }
    }
}

/// Text from an image, for messages.
fn shown(bytes: &[u8]) -> String {
    escaped(&String::from_utf8_lossy(&bytes[..bytes.len().min(200)]))
}

/// The kind of an image, and its number.
type Name = (&'static str, Option<u64>);

/// The images of one container.
#[derive(Debug, Default)]
pub struct Images {
    content: BTreeMap<Name, (Kind, Vec<u8>)>,
    /// Files that are no images.
    unknown: Vec<String>,
}

impl Images {
    /// Reads what is checked of the images in a directory. `others` are the names of files there that are not CRIU's.
    ///
    /// # Errors
    /// If the directory or a file in it cannot be read.
    pub fn read(directory: &Path, others: &[&str]) -> io::Result<Self> {
        let mut images = Self::default();
        let mut room = LARGEST as u64;
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if others.contains(&name.as_str()) {
                continue;
            }
            let mut bytes = Vec::new();
            match Kind::of(&name) {
                Some((kind, _)) if kind.name == "ghost-file" => {
                    File::open(entry.path())?.take(GHOST).read_to_end(&mut bytes)?;
                }
                Some((kind, _)) if READ.contains(&kind.name) || network::READ.contains(&kind.name) => {
                    // One byte more than there is room for, as a sign that there is more.
                    File::open(entry.path())?.take(room + 1).read_to_end(&mut bytes)?;
                    room = room.checked_sub(bytes.len() as u64).ok_or_else(|| {
                        io::Error::new(io::ErrorKind::InvalidData, format!("the images have more than {LARGEST} bytes"))
                    })?;
                }
                _ => {}
            }
            images.add(&name, bytes);
        }
        Ok(images)
    }

    /// Adds a file.
    pub fn add(&mut self, name: &str, bytes: Vec<u8>) {
        match Kind::of(name) {
            Some((kind, number)) => drop(self.content.insert((kind.name, number), (kind, bytes))),
            None => self.unknown.push(name.to_owned()),
        }
    }

    fn has(&self, kind: &'static str, number: u64) -> bool {
        self.content.contains_key(&(kind, Some(number)))
    }

    fn has_any(&self, kind: &'static str) -> bool {
        self.content.keys().any(|(one, _)| *one == kind)
    }

    /// Whether there is more than an empty file of a kind.
    fn has_content(&self, kind: &'static str) -> bool {
        self.content.iter().any(|((one, _), (_, bytes))| *one == kind && !bytes.is_empty())
    }

    fn numbers(&self, kind: &'static str) -> impl Iterator<Item = u64> {
        self.content.keys().filter(move |(one, _)| *one == kind).filter_map(|(_, number)| *number)
    }

    /// The entries of an image; of one that does not exist, none.
    fn each<M: Message + Default>(
        &self,
        kind: &'static str,
        number: Option<u64>,
    ) -> Result<impl Iterator<Item = Result<M, Finding>>, Finding> {
        let name = move || number.map_or_else(|| kind.to_owned(), |number| format!("{kind}-{number}"));
        let bad = move |why: &str| Finding::new(format!("have a {}.img that {why}", name()));
        let content = match self.content.get(&(kind, number)) {
            Some((kind, bytes)) => kind.content(bytes).map_err(&bad)?,
            None => &[],
        };
        // An entry may take four bytes, and much more as a message.
        if Entries(content).nth(MOST_ENTRIES).is_some() {
            return Err(bad("has too many entries"));
        }
        let decode = move |entry: Result<&[u8], &str>| {
            entry.and_then(|entry| M::decode(entry).map_err(|_| "cannot be decoded")).map_err(&bad)
        };
        Ok(Entries(content).map(decode))
    }

    fn all_if_there<M: Message + Default>(&self, kind: &'static str, number: Option<u64>) -> Result<Vec<M>, Finding> {
        self.each(kind, number)?.collect()
    }

    fn all<M: Message + Default>(&self, kind: &'static str, number: Option<u64>) -> Result<Vec<M>, Finding> {
        if !self.content.contains_key(&(kind, number)) {
            let number = number.map_or_else(String::new, |number| format!("-{number}"));
            return Err(Finding::new(format!("lack {kind}{number}.img")));
        }
        self.all_if_there(kind, number)
    }

    /// The first entry, of an image that has other bytes after it.
    fn first<M: Message + Default>(&self, kind: &'static str, number: Option<u64>) -> Result<M, Finding> {
        self.each(kind, number)?.next().unwrap_or_else(|| Err(Finding::new(format!("have an empty {kind}.img"))))
    }

    /// The entry of an image that has one.
    fn only<M: Message + Default>(&self, kind: &'static str, number: Option<u64>) -> Result<M, Finding> {
        let mut all = self.all(kind, number)?;
        match (all.pop(), all.len()) {
            (Some(one), 0) => Ok(one),
            (_, others) => Err(Finding::new(format!("have {others} entries more than one in {kind}.img"))),
        }
    }
}

/// The first process's number among CRIU's images.
const FIRST: u64 = 1;

/// Where the mounts of the first process are, and which restrictions each has, by the images in a directory.
///
/// # Errors
/// The images cannot be read.
pub fn restrictions(directory: &Path) -> io::Result<Vec<(String, Restrictions)>> {
    let bad = |finding: Finding| io::Error::new(io::ErrorKind::InvalidData, format!("the images {}", finding.what));
    let mut images = Images::default();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("mountpoints-") || name == format!("ids-{FIRST}.img") {
            images.add(&name, std::fs::read(directory.join(&name))?);
        }
    }
    let ids: Vec<messages::Ids> = images.all_if_there("ids", Some(FIRST)).map_err(bad)?;
    let namespace = ids.first().and_then(|ids| ids.mnt).map(u64::from);
    let mounts: Vec<messages::Mount> = images.all_if_there("mountpoints", namespace).map_err(bad)?;
    Ok(mounts.iter().map(mounts::place_and_restrictions).collect())
}

/// Compares images with what the container may have.
///
/// # Errors
/// What they do besides; no more than a few of it.
pub fn check(images: &Images, allowed: &Allowed) -> Result<(), Vec<Finding>> {
    let mut found: Vec<_> = images
        .unknown
        .iter()
        .map(|name| Finding::new(format!("have a file {}, which CRIU has not", escaped(name))))
        .collect();
    let checks = [
        tasks::check(images, allowed, &mut found),
        all_mounts(images, allowed, &mut found),
        files::check(images, allowed, &mut found),
        network::check(images, allowed, &mut found),
        profiles(images),
    ];
    found.extend(checks.into_iter().filter_map(Result::err));
    found.truncate(TOLD);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

fn all_mounts(images: &Images, allowed: &Allowed, found: &mut Vec<Finding>) -> Result<(), Finding> {
    let processes: Vec<messages::Process> = images.all("pstree", None)?;
    let first = processes.first().ok_or_else(|| Finding::new("have no process"))?;
    let ids: messages::Ids = images.only("ids", Some(first.pid.into()))?;
    let own = ids.mnt.map(u64::from);
    let others = images.numbers("mountpoints").map(Some).filter(|number| *number != own);
    let namespaces: Result<Vec<_>, _> =
        std::iter::once(own).chain(others).map(|number| images.all("mountpoints", number)).collect();
    mounts::check(&namespaces?, allowed, found);
    Ok(())
}

/// Profiles of AppArmor that CRIU would load into the node's kernel.
fn profiles(images: &Images) -> Result<(), Finding> {
    let Some((kind, bytes)) = images.content.get(&("apparmor", None)) else { return Ok(()) };
    let content = kind.content(bytes).map_err(|why| Finding::new(format!("have an apparmor.img that {why}")))?;
    match Entries(content).all(|entry| entry.is_ok_and(<[u8]>::is_empty)) {
        true => Ok(()),
        false => Err(Finding::new("have AppArmor profiles for the node's kernel")),
    }
}

#[cfg(test)]
mod tests;
