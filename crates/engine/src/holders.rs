//! Holders: containers of an engine that do nothing but have an address, so that the engine gives it to no other container of its node.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tranship_types::ReservedAddress;

use crate::json::said;
use crate::{AttachedNetwork, Container, EngineError};

/// The label of a holder: the name of the container that it holds addresses for.
pub(crate) const LABEL: &str = "tranship.holds-addresses-for";
/// The label with the migration by which that container left.
pub(crate) const MIGRATION: &str = "tranship.holds-addresses-since";
/// The image of holders.
pub(crate) const IMAGE: &str = "tranship-holder:1";
/// The program in it.
pub(crate) const PROGRAM: &str = "/hold";
/// A user who owns nothing, and a group of that kind.
pub(crate) const NOBODY: &str = "65534:65534";

/// What the names of holders begin with.
const NAME: &str = "tranship-holds-";
/// What the names of network namespaces for holders begin with.
const NAMESPACE: &str = "tranship-holder-";

/// For what a holder has addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding<'a> {
    /// The name of the container that has left.
    pub container: &'a str,
    /// The migration by which it left.
    pub migration: &'a str,
    /// The network's name.
    pub network: &'a str,
}

impl Holding<'_> {
    /// The holder's name.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{NAME}{}.{}.{}", self.container, self.network, self.migration)
    }
}

/// The network namespace, with closed gate, that the agent has made for the holder of this id: from before its start until the engine has
/// attached its network there.
pub fn holder_namespace(id: &str) -> Option<PathBuf> {
    let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_id.then(|| Path::new("/run/netns").join(format!("{NAMESPACE}{id}")))
}

/// Whether a network namespace of this path was made for a holder.
pub fn is_holder_namespace(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(NAMESPACE))
}

/// What an engine's network has given to one of its containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The container's id.
    pub id: String,
    /// The container's name.
    pub container: String,
    /// If the container is a holder, the name of the container that it holds addresses for.
    pub holds_for: Option<String>,
    /// If it is one, the migration by which that container left.
    pub migration: Option<String>,
    /// Whether it is one with an interface: it answers for the addresses, which are elsewhere.
    pub answers: bool,
    /// The network's name.
    pub network: String,
    /// The addresses that the container has there or, if it does not run, was made with.
    pub addresses: Vec<IpAddr>,
    /// Whether it runs: only then are the addresses reserved for it.
    pub runs: bool,
}

/// For which container the one of these labels, of this image and name is a holder. An image passes its labels on, so that these alone
/// make none.
pub(crate) fn held_for<'a>(labels: &'a Value, image: &Value, name: &Value) -> Option<&'a str> {
    let is_named = said(name).is_some_and(|name| name.trim_start_matches('/').starts_with(NAME));
    // Podman's name of it begins with a registry.
    let is_of_image = said(image).is_some_and(|image| image.rsplit('/').next() == Some(IMAGE));
    said(&labels[LABEL]).filter(|_| is_named && is_of_image)
}

/// A container's addresses in one network: those that `gives_out` is true of, and all others.
pub(crate) fn parted(
    container: &str,
    network: &AttachedNetwork,
    gives_out: impl Fn(IpAddr) -> bool,
) -> (Vec<ReservedAddress>, Vec<ReservedAddress>) {
    let reserved = |address: &IpAddr| ReservedAddress {
        network: network.name.clone(),
        owner: container.to_owned(),
        interface: String::new(),
        address: *address,
    };
    network.addresses.iter().map(reserved).partition(|one| gives_out(one.address))
}

/// Whether a process has an interface of the kind that engines make for their networks.
pub(crate) fn has_interface(pid: &Value) -> bool {
    let devices = pid.as_u64().filter(|pid| *pid > 0).and_then(|pid| {
        let pid = u32::try_from(pid).ok()?;
        tranship_sys::process::text(format!("/proc/{pid}/net/dev")).ok()
    });
    devices.is_some_and(|text| text.lines().any(|line| line.trim_start().starts_with("eth")))
}

/// Whether a container that is made from this configuration (OCI runtime specification) is a holder.
#[must_use]
pub fn is_holder(config: &Value) -> bool {
    let process = &config["process"];
    let (user, group) = NOBODY.split_once(':').unwrap_or_default();
    let is = |id: &Value, wanted: &str| id.as_u64().is_some_and(|id| id.to_string() == wanted);
    process["args"] == serde_json::json!([PROGRAM])
        && is(&process["user"]["uid"], user)
        && is(&process["user"]["gid"], group)
        && config["root"]["readonly"] == true
}

/// An engine with an IPAM of its own, in which a container reserves an address by running.
pub trait Holders {
    /// The container's addresses: those that the engine would give to another container of this node by itself, if this one were gone, and all
    /// others.
    ///
    /// # Errors
    /// If the engine cannot be asked.
    fn given_out(&self, container: &Container) -> Result<(Vec<ReservedAddress>, Vec<ReservedAddress>), EngineError>;

    /// The endpoints of all containers, whether they run or not, holders included.
    ///
    /// # Errors
    /// If the engine cannot be asked.
    fn endpoints(&self) -> Result<Vec<Endpoint>, EngineError>;

    /// Makes a holder of this name, which does not run yet, on a network: with these addresses, or with whichever the engine gives it. Its id.
    ///
    /// # Errors
    /// The engine's refusal.
    fn make_holder(&self, name: &str, holds: Holding<'_>, addresses: &[IpAddr]) -> Result<String, EngineError>;

    /// The path at which a network namespace with closed gate has to be when a holder is started: the runtime wrapper has its network
    /// attached there, and then takes the interface and this name away. `None` where a holder gets no interface.
    fn namespace(&self, id: &str) -> Option<PathBuf>;

    /// Starts a holder. `program` is the agent's.
    ///
    /// # Errors
    /// The engine's refusal.
    fn start_holder(&self, id: &str, program: &Path) -> Result<(), EngineError>;

    /// Removes a holder. Its image stays, for [`remove_image`](Self::remove_image). Success if it is gone.
    ///
    /// # Errors
    /// The engine's refusal.
    fn remove_holder(&self, id: &str) -> Result<(), EngineError>;

    /// Removes the image of holders, unless a holder uses it. False: a container is arriving, for which the engine
    /// would wait.
    ///
    /// # Errors
    /// The engine's refusal.
    fn remove_image(&self) -> Result<bool, EngineError>;

    /// Whether [`Engine::create`](crate::Engine::create) may remove holders, to make their network again.
    fn loses_holders(&self) -> bool;

    /// Whether the engine has refused an address because nobody has chosen the network's subnet.
    fn refuses_choice(&self, error: &EngineError) -> bool;
}

/// The program of a holder: an ELF executable (elf(5)) without anything but these instructions, which wait for ever.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] on a processor for which there are none.
fn program() -> io::Result<Vec<u8>> {
    const HEADERS: usize = 64 + 56;
    const AT: u64 = 0x40_0000;
    let (machine, code): (u16, &[u8]) = match std::env::consts::ARCH {
        // 1: mov $34, %eax (pause); syscall; jmp 1b
        "x86_64" => (62, &[0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7]),
        // 1: mov x0…x4, #0; mov x8, #73 (ppoll); svc #0; b 1b
        "aarch64" => (
            183,
            &[
                0x00, 0x00, 0x80, 0xd2, 0x01, 0x00, 0x80, 0xd2, 0x02, 0x00, 0x80, 0xd2, 0x03, 0x00, 0x80, 0xd2, 0x04,
                0x00, 0x80, 0xd2, 0x28, 0x09, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4, 0xf9, 0xff, 0xff, 0x17,
            ],
        ),
        other => return Err(io::Error::new(io::ErrorKind::Unsupported, format!("no holder for {other} is known"))),
    };
    let size = (HEADERS + code.len()) as u64;
    let mut file = Vec::with_capacity(HEADERS + code.len());
    // The file's header: ELF64, little-endian, version 1, System V; an executable.
    file.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend([2u16.to_le_bytes(), machine.to_le_bytes()].concat());
    file.extend(1u32.to_le_bytes());
    // Entry point; offsets of the program's header, which follows, and of sections, of which there are none.
    file.extend([AT + HEADERS as u64, 64, 0].map(u64::to_le_bytes).concat());
    file.extend(0u32.to_le_bytes());
    // Sizes: this header, a program's header, of which there is one, a section's.
    file.extend([64u16, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat());
    // One segment to load, which may be read and executed: the whole file.
    file.extend([1u32, 4 | 1].map(u32::to_le_bytes).concat());
    file.extend([0, AT, AT, size, size, 0x1000].map(u64::to_le_bytes).concat());
    file.extend(code);
    Ok(file)
}

/// The root filesystem of a holder, as a tar archive: its program.
pub(crate) fn image() -> io::Result<Vec<u8>> {
    let program = program()?;
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(program.len() as u64);
    header.set_mode(0o755);
    archive.append_data(&mut header, PROGRAM.trim_start_matches('/'), program.as_slice())?;
    archive.into_inner()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    /// The kernel's letter for the state of a process.
    fn state(pid: u32) -> String {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1[..1].to_owned()
    }

    #[test]
    fn a_namespace_is_for_the_holder_of_its_id() {
        assert!(is_holder_namespace(&holder_namespace("0f3a").unwrap()));
        assert!(!is_holder_namespace(Path::new("/run/netns/web")));
        assert!(holder_namespace("../0f3a").is_none() && holder_namespace("").is_none());
    }

    #[test]
    fn a_label_alone_makes_no_holder() {
        let json = |text: &str| serde_json::json!(text);
        let labels = serde_json::json!({LABEL: "web"});
        let name = json(&format!("/{}", Holding { container: "web", migration: "m-1", network: "lan" }.name()));
        let held = |image: &str, name: &Value| held_for(&labels, &json(image), name).map(str::to_owned);
        assert_eq!(held(IMAGE, &name).as_deref(), Some("web"));
        assert_eq!(held(&format!("localhost/{IMAGE}"), &name).as_deref(), Some("web"));
        assert_eq!((held("shop:2", &name), held(IMAGE, &json("/shop"))), (None, None));
        assert_eq!(held_for(&Value::Null, &json(IMAGE), &name), None);
    }

    #[test]
    fn a_holder_is_known_by_its_configuration() {
        let config = |program: &str, user: u32| serde_json::json!({"process": {"args": [program], "user": {"uid": user, "gid": user}}, "root": {"readonly": true}});
        assert!(is_holder(&config(PROGRAM, 65534)));
        assert!(!is_holder(&config("/bin/sh", 65534)) && !is_holder(&config(PROGRAM, 0)) && !is_holder(&Value::Null));
    }

    #[test]
    fn a_holder_waits_until_it_is_ended() {
        let mut archive = tar::Archive::new(io::Cursor::new(image().unwrap()));
        let mut entry = archive.entries().unwrap().next().unwrap().unwrap();
        assert_eq!((entry.path().unwrap().to_str(), entry.header().mode().unwrap()), (Some("hold"), 0o755));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hold");
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(&path).unwrap();
        io::copy(&mut entry, &mut file).unwrap();
        drop(file);
        let mut holder = Command::new(&path).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while state(holder.id()) != "S" && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(state(holder.id()), "S", "it does not sleep");
        assert_eq!(holder.try_wait().unwrap(), None);
        holder.kill().unwrap();
        assert_eq!(holder.wait().unwrap().signal(), Some(9));
    }
}
