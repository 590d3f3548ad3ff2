//! Which paths name a network namespace: those that `ip netns` makes, and no others.

use std::path::{Component, Path};

/// Where named network namespaces are (ip-netns(8)).
const DIRECTORY: &str = "/run/netns";
/// The same by another name, where `/var/run` is a link to `/run`.
const ALIAS: &str = "/var/run/netns";

/// Checks that `path` is `/run/netns/NAME`. Such a path leads to nothing else: a name is no symbolic link, and has letters, digits,
/// `-`, `_`, `.` and `@` only.
///
/// # Errors
/// Why it is not, as a clause.
pub fn check_name(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let Some(Component::Normal(name)) = path.components().next_back() else {
        return Err(format!("{shown:?} names no network namespace"));
    };
    let fits = |c: u8| c.is_ascii_alphanumeric() || b"-_.@".contains(&c);
    let name = name.as_encoded_bytes();
    let text = path.as_os_str().as_encoded_bytes();
    let is_in = |directory: &str| text == [directory.as_bytes(), b"/", name].concat();
    let linked = || Path::new("/var/run").canonicalize().is_ok_and(|real| real == Path::new("/run"));
    if !(is_in(DIRECTORY) || (is_in(ALIAS) && linked())) {
        return Err(format!("the network namespace {shown} is not {DIRECTORY}/NAME"));
    }
    if name.len() > 255 || !name.iter().copied().all(fits) || name.iter().all(|c| *c == b'.') {
        return Err(format!(
            "the network namespace {shown} has a name with other characters than letters, digits, -, _, . and @"
        ));
    }
    match path.symlink_metadata() {
        Ok(found) if found.is_symlink() => Err(format!("{shown} is a symbolic link, and no network namespace")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_ip_netns_are_network_namespaces() {
        for good in ["/run/netns/redis", "/run/netns/cni-0f.a_b@1", "/run/netns/..a"] {
            check_name(Path::new(good)).unwrap();
        }
        let bad = [
            "/proc/1/ns/net",
            "/run/netns",
            "/run/netns/",
            "/run/netns/..",
            "/run/netns/.",
            "/run/netns/../../proc/1/ns/net",
            "/run/netns/a/b",
            "/run/./netns/a",
            "run/netns/a",
            "/run/netns//a",
            "/run/netns/a b",
            "/run/netns/a\n",
            "",
            "/",
            "/run/docker/netns/a",
            "/run/netns/a/",
        ];
        for bad in bad {
            assert!(check_name(Path::new(bad)).is_err(), "{bad:?}");
        }
    }
}
