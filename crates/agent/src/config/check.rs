//! What can be seen to be wrong in a configuration before anything is done by it.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::Config;

/// Checks what the types do not. The text names the key, and says what to do.
pub(super) fn check(config: &Config) -> Result<(), String> {
    addresses(config)?;
    paths(config)?;
    config.accept.check().map_err(|why| format!("[accept] {why}"))?;
    if config.criu.log_level.is_some_and(|level| !(0..=4).contains(&level)) {
        return Err("[criu] log_level: criu has levels 0 to 4; take one of them out of these".to_owned());
    }
    private(&config.tls.key)
}

fn addresses(config: &Config) -> Result<(), String> {
    let node = &config.node;
    if config.peers.contains_key(node) {
        return Err(format!("[peers] {node}: that is this node itself; take the line out"));
    }
    let mut seen = BTreeMap::from([(config.listen.as_str(), "listen".to_owned())]);
    address(&config.listen).map_err(|why| format!("listen: {why}"))?;
    for (name, peer) in &config.peers {
        let own = &peer.address;
        if let Some(Err(why)) = peer.accept.as_ref().map(super::Accept::check) {
            return Err(format!("[peers] {name}: accept: {why}"));
        }
        address(own).map_err(|why| format!("[peers] {name}: {why}"))?;
        if let Some(other) = seen.insert(own, format!("[peers] {name}")) {
            return Err(format!("[peers] {name}: {own} is the address of {other}, too; give each node its own"));
        }
    }
    Ok(())
}

/// `host:port`, where the host may be a name, and an IPv6 address stands in brackets.
fn address(text: &str) -> Result<(), String> {
    let form = "write host:port, like 10.77.0.1:7077, [fd00::1]:7077 or db1.example.org:7077";
    let Some((host, port)) = text.rsplit_once(':') else { return Err(format!("{text:?} has no port; {form}")) };
    if port.parse::<u16>().ok().is_none_or(|port| port == 0) {
        return Err(format!("{port:?} in {text:?} is no port from 1 to 65535; {form}"));
    }
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_host = match bracketed {
        Some(inner) => inner.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)),
    };
    if is_host { Ok(()) } else { Err(format!("{host:?} in {text:?} is no address and no name; {form}")) }
}

fn paths(config: &Config) -> Result<(), String> {
    let tls = &config.tls;
    for (key, path) in [
        ("socket", &config.socket),
        ("run_dir", &config.run_dir),
        ("state_dir", &config.state_dir),
        ("[tls] ca", &tls.ca),
        ("[tls] cert", &tls.cert),
        ("[tls] key", &tls.key),
    ]
    .into_iter()
    .chain(tls.crl.as_ref().map(|crl| ("[tls] crl", crl)))
    {
        if !path.is_absolute() {
            return Err(format!("{key}: {path:?} depends on where the agent is started; give the path from / on"));
        }
    }
    // What a move keeps below run_dir is in memory, and goes with it; what is below state_dir has to outlive it.
    if config.state_dir.starts_with(&config.run_dir) {
        let (state, run) = (config.state_dir.display(), config.run_dir.display());
        return Err(format!(
            "state_dir: {state} is in run_dir, {run}, which is lost with the host; give it a place on a disk"
        ));
    }
    Ok(())
}

/// Whoever has the key can take this node's place. That there is none is said by whoever reads it.
fn private(key: &Path) -> Result<(), String> {
    let mode = std::fs::metadata(key).map_or(0, |found| found.permissions().mode() & 0o777);
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let key = key.display();
    Err(format!(
        "[tls] key: others than its owner may use {key} (mode {mode:o}), and be this node with it; `chmod 600 {key}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of the packaged example with one piece of it changed.
    fn said(from: &str, to: &str) -> String {
        let example = include_str!("../../../../packaging/agent.toml");
        assert!(example.contains(from), "{from:?} is not in the example");
        Config::read(&example.replacen(from, to, 1)).map(|_| ()).unwrap_err()
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place_and_a_remedy() {
        let listen = "listen = \"10.77.0.1:7077\"";
        for (from, to, place, why) in [
            (listen, "listen = \"10.77.0.1\"", "listen: ", "has no port"),
            (listen, "listen = \"10.77.0.1:0\"", "listen: ", "no port from 1"),
            (listen, "listen = \"10.77.0.1:70777\"", "listen: ", "no port from 1"),
            (listen, "listen = \"fd00::1:7077\"", "listen: ", "no address"),
            (listen, "listen = \":7077\"", "listen: ", "no address"),
            (listen, "listen = \"10.77.0.2:7077\"", "[peers] b: ", "address of listen, too"),
            (
                "b = \"10.77.0.2:7077\"",
                "b = \"10.77.0.2:7077\"\nc = \"10.77.0.2:7077\"",
                "[peers] c: ",
                "address of [peers] b",
            ),
            ("b = \"10.77.0.2:7077\"", "a = \"10.77.0.2:7077\"", "[peers] a: ", "this node itself"),
            ("#run_dir = \"/run/tranship\"", "run_dir = \"run\"", "run_dir: ", "depends on where"),
            (
                "#state_dir = \"/var/lib/tranship\"",
                "state_dir = \"/run/tranship/state\"",
                "state_dir: ",
                "is in run_dir",
            ),
            ("#log_level = 2", "log_level = 5", "[criu] log_level: ", "0 to 4"),
            ("node = \"a\"", "nod = \"a\"", "line 5: ", "unknown field `nod`"),
            ("node = \"a\"", "node = \"a", "line 5: ", ""),
        ] {
            let text = said(from, to);
            assert!(text.starts_with(place) && text.contains(why) && text.contains("; "), "{to}: {text}");
            assert!(!text.contains('\n'), "{text}");
        }
        for good in ["[fd00::1]:7077", "[fe80::1%eth0]:7077", "node-1.example.org:1", "10.0.0.1:65535"] {
            address(good).unwrap();
        }
    }

    #[test]
    fn a_key_that_others_may_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("node.key");
        private(&key).unwrap();
        std::fs::write(&key, "secret").unwrap();
        for (mode, fits) in [(0o600, true), (0o400, true), (0o640, false), (0o644, false), (0o602, false)] {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(private(&key).is_ok(), fits, "{mode:o}");
        }
        assert!(private(&key).unwrap_err().contains(&format!("`chmod 600 {}`", key.display())));
    }
}
