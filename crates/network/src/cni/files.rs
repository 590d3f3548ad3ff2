//! The files of host-local and libcni.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use tranship_types::{CniAttachment, ReservedAddress};

use crate::NetworkError;

/// Where host-local keeps a directory for each network, in it a file for each address that is given away.
const NETWORKS: &str = "/var/lib/cni/networks";
/// Where libcni keeps results.
const RESULTS: &str = "/var/lib/cni/results";

/// An address that host-local has given away.
pub(super) struct Reservation {
    pub network: String,
    pub address: IpAddr,
    pub container: String,
    /// Empty where a host-local before 0.8 has made it.
    pub interface: String,
}

/// A CNI name is part of a file's name.
pub(super) fn names_are_plain(attachment: &CniAttachment) -> Result<(), NetworkError> {
    let CniAttachment { network, container, interface, .. } = attachment;
    for name in [network, container, interface] {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0', '\r', '\n']) || name.len() > 200
        {
            return Err(NetworkError::refused("attach a container by CNI", format!("{name:?} is no name")));
        }
    }
    Ok(())
}

fn entries(directory: &Path) -> Result<Vec<String>, NetworkError> {
    match fs::read_dir(directory) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(NetworkError::refused(format!("read {}", directory.display()), e)),
        Ok(list) => Ok(list.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()),
    }
}

fn read(path: &Path) -> Result<Option<String>, NetworkError> {
    match fs::read_to_string(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(NetworkError::refused(format!("read {}", path.display()), e)),
        Ok(text) => Ok(Some(text)),
    }
}

/// The results that libcni has cached, as text and read.
pub(super) fn results() -> Result<Vec<(String, Value)>, NetworkError> {
    let directory = Path::new(RESULTS);
    let mut all = Vec::new();
    for name in entries(directory)? {
        // One may go meanwhile.
        let Some(text) = read(&directory.join(name))? else { continue };
        if let Ok(value) = serde_json::from_str::<Value>(&text)
            && value["kind"] == "cniCacheV1"
        {
            all.push((text, value));
        }
    }
    Ok(all)
}

pub(super) fn reservation_path(network: &str, address: IpAddr) -> PathBuf {
    Path::new(NETWORKS).join(network).join(address.to_string())
}

/// Whose an address is in a network.
pub(super) fn reservation(network: &str, address: IpAddr) -> Result<Option<Reservation>, NetworkError> {
    let Some(text) = read(&reservation_path(network, address))? else { return Ok(None) };
    let mut lines = text.lines().map(|line| line.trim().to_owned());
    let (container, interface) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    Ok(Some(Reservation { network: network.to_owned(), address, container, interface }))
}

/// Those of the addresses that are given away, in whatever network.
pub(super) fn reservations(addresses: &[IpAddr]) -> Result<Vec<Reservation>, NetworkError> {
    let mut all = Vec::new();
    for network in entries(Path::new(NETWORKS))? {
        for address in addresses {
            all.extend(reservation(&network, *address)?);
        }
    }
    Ok(all)
}

/// The lock that host-local takes before it looks at a network.
fn lock(network: &str) -> Result<Flock<File>, NetworkError> {
    let directory = Path::new(NETWORKS).join(network);
    let refused = |e: &dyn std::fmt::Display| {
        NetworkError::refused(format!("lock the reservations in {}", directory.display()), e)
    };
    tranship_sys::directory::make_public(&directory).map_err(|e| refused(&e))?;
    let path = directory.join("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    Flock::lock(file.map_err(|e| refused(&e))?, FlockArg::LockExclusive).map_err(|(_, e)| refused(&e.desc()))
}

/// Gives an address to the attachment's container, unless it is somebody else's; `holder` has it for the container.
pub(super) fn reserve(attachment: &CniAttachment, address: IpAddr, holder: &str) -> Result<(), NetworkError> {
    let CniAttachment { network, container, interface, .. } = attachment;
    let what = || format!("reserve {address} in CNI's network {network}");
    let _lock = lock(network)?;
    match reservation(network, address)? {
        Some(own) if own.container == *container => return Ok(()),
        Some(held) if held.container == holder => {}
        Some(other) => {
            return Err(NetworkError::refused(what(), format!("container {} has it", other.container)));
        }
        None => {}
    }
    write(&reservation_path(network, address), container, interface).map_err(|e| NetworkError::refused(what(), e))
}

/// Writes a reservation, or replaces one. Only while the network is locked.
fn write(path: &Path, container: &str, interface: &str) -> std::io::Result<()> {
    let new = path.with_file_name("tranship.new");
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
    file.write_all(format!("{container}\r\n{interface}").as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)
}

/// Reserves an address in the name of `holder`, if it is free, or its owner's where `of_owner` lets it be taken. Otherwise whose it is.
pub(super) fn hold(reserved: &ReservedAddress, holder: &str, of_owner: bool) -> Result<Option<String>, NetworkError> {
    let ReservedAddress { network, owner, interface, address } = reserved;
    let _lock = lock(network)?;
    match reservation(network, *address)? {
        Some(held) if held.container == holder => return Ok(None),
        Some(own) if own.container == *owner && of_owner => {}
        Some(other) => return Ok(Some(other.container)),
        None => {}
    }
    let written = write(&reservation_path(network, *address), holder, interface);
    written.map_err(|e| NetworkError::refused(format!("hold {address} in CNI's network {network}"), e)).map(|()| None)
}

/// All reservations of all networks.
pub(super) fn all() -> Result<Vec<Reservation>, NetworkError> {
    let mut all = Vec::new();
    for network in entries(Path::new(NETWORKS))? {
        let addresses = entries(&Path::new(NETWORKS).join(&network))?;
        for address in addresses.iter().filter_map(|name| name.parse().ok()) {
            all.extend(reservation(&network, address)?);
        }
    }
    Ok(all)
}

/// Takes an address back, if it is the container's.
pub(super) fn release(network: &str, container: &str, address: IpAddr) -> Result<(), NetworkError> {
    if !Path::new(NETWORKS).join(network).exists() {
        return Ok(());
    }
    let _lock = lock(network)?;
    match reservation(network, address)? {
        Some(own) if own.container == container => remove(&reservation_path(network, address)),
        _ => Ok(()),
    }
}

fn remove(path: &Path) -> Result<(), NetworkError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(NetworkError::refused(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// As libcni names it.
fn result_path(attachment: &CniAttachment) -> PathBuf {
    let CniAttachment { network, container, interface, .. } = attachment;
    Path::new(RESULTS).join(format!("{network}-{container}-{interface}"))
}

/// Keeps a result for the `DEL` that will come.
pub(super) fn keep_result(attachment: &CniAttachment, cached: &Value) -> Result<(), NetworkError> {
    let path = result_path(attachment);
    let kept = DirBuilder::new().recursive(true).mode(0o700).create(RESULTS).and_then(|()| {
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path)?;
        file.write_all(cached.to_string().as_bytes())
    });
    kept.map_err(|e| NetworkError::refused(format!("write {}", path.display()), e))
}

pub(super) fn forget_result(attachment: &CniAttachment) -> Result<(), NetworkError> {
    remove(&result_path(attachment))
}
