//! The settings of a network namespace (`/proc/sys/net`) that somebody has changed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::OnceLock;

use crate::NetworkError;
use crate::namespace::in_a_new_one;

/// Shows the namespace of the thread that looks.
const ROOT: &str = "/proc/sys/net";
const PARTS: [&str; 3] = ["core", "ipv4", "ipv6"];
/// Those that versions before this one do not know. Rules of netfilter have settings that come with modules.
const MORE_PARTS: [&str; 2] = ["mptcp", "unix"];
/// Made by the kernel (a key, a secret), or another view of what is carried by itself (the interface's MTU).
const NOT_SETTINGS: [&str; 3] = ["tcp_fastopen_key", "stable_secret", "mtu"];
/// Directories in which each interface has one of its own, besides these.
const PER_INTERFACE: [&str; 2] = ["conf", "neigh"];
const NO_INTERFACES: [&str; 3] = ["all", "default", "lo"];

type Settings = BTreeMap<String, String>;

/// The settings of the calling thread's namespace that are not as in a new one on this node: those of [`PARTS`], and others.
pub(crate) fn changed() -> Result<(Settings, Settings), NetworkError> {
    static FRESH: OnceLock<Settings> = OnceLock::new();
    let fresh = match FRESH.get() {
        Some(fresh) => fresh,
        None => {
            let read = in_a_new_one(|| Ok(read()))?;
            FRESH.get_or_init(|| read)
        }
    };
    let mut settings = read();
    settings.retain(|key, value| fresh.get(&default_of(key)) != Some(value));
    let is_old = |key: &str| key.split('/').next().is_some_and(|part| PARTS.contains(&part));
    Ok(settings.into_iter().partition(|(key, _)| is_old(key)))
}

/// What a new interface gets its value from; the setting itself if it is no interface's.
fn default_of(key: &str) -> String {
    let parts: Vec<_> = key.split('/').collect();
    match parts.as_slice() {
        [part, kind, interface, rest @ ..] if PER_INTERFACE.contains(kind) && !NO_INTERFACES.contains(interface) => {
            // Of neighbours only the host's own namespace has a default; what is on `lo` is the same.
            let model = if *kind == "neigh" { "lo" } else { "default" };
            [&[*part, *kind, model], rest].concat().join("/")
        }
        _ => key.to_owned(),
    }
}

fn read() -> Settings {
    let mut all = Settings::new();
    for part in PARTS.into_iter().chain(MORE_PARTS) {
        collect(&Path::new(ROOT).join(part), part, &mut all);
    }
    all
}

/// What cannot be read is left out: some settings can only be written, and interfaces may go while this looks.
fn collect(directory: &Path, name: &str, all: &mut Settings) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, Ok(file)) = (entry.path(), entry.file_name().into_string()) else { continue };
        let key = format!("{name}/{file}");
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            collect(&path, &key, all);
        } else if metadata.permissions().mode() & 0o600 == 0o600
            && !NOT_SETTINGS.contains(&file.as_str())
            && let Ok(value) = value(&path)
        {
            all.insert(key, value);
        }
    }
}

fn value(path: &Path) -> io::Result<String> {
    Ok(fs::read_to_string(path)?.trim_end().to_owned())
}

/// Makes the settings of the calling thread's namespace, that of the container at `netns`, so.
pub(crate) fn apply(netns: &Path, settings: &Settings) -> Result<(), NetworkError> {
    for (key, wanted) in settings {
        let path = Path::new(ROOT).join(key);
        if !is_setting(key) {
            return Err(NetworkError::refused(
                format!("set {key:?} in network namespace {}", netns.display()),
                "this is no setting of a network namespace",
            ));
        }
        // Some follow others, and are right by now.
        if value(&path).is_ok_and(|value| value == *wanted) {
            continue;
        }
        fs::write(&path, wanted).map_err(|e| NetworkError::Refused {
            what: format!("set {key} to {wanted:?} in network namespace {}", netns.display()),
            why: e.to_string(),
            remedy: "the container's node has this setting and this node has not: load the module that brings it, or set it \
                     back there",
        })?;
    }
    Ok(())
}

/// Whether this, which another node has sent, is the name of a setting and leads nowhere else.
fn is_setting(key: &str) -> bool {
    let fits = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    let mut parts = key.split('/');
    parts.next().is_some_and(|part| PARTS.contains(&part) || MORE_PARTS.contains(&part))
        && key.contains('/')
        && parts.all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interfaces_settings_are_compared_with_the_default() {
        assert_eq!(default_of("ipv4/conf/eth0/rp_filter"), "ipv4/conf/default/rp_filter");
        assert_eq!(default_of("ipv6/neigh/eth0/gc_stale_time"), "ipv6/neigh/lo/gc_stale_time");
        assert_eq!(default_of("ipv4/conf/all/rp_filter"), "ipv4/conf/all/rp_filter");
        assert_eq!(default_of("ipv4/tcp_keepalive_time"), "ipv4/tcp_keepalive_time");
    }

    #[test]
    fn names_that_lead_elsewhere_are_no_settings() {
        assert!(is_setting("ipv4/tcp_keepalive_time") && is_setting("ipv6/conf/eth0.7/accept_ra"));
        assert!(is_setting("unix/max_dgram_qlen"));
        for bad in ["ipv4", "ipv4/", "/ipv4/x", "ipv4/../../kernel/x", "ipv4//x", "kernel/x", "", "ipv4/./x"] {
            assert!(!is_setting(bad), "{bad}");
        }
    }
}
