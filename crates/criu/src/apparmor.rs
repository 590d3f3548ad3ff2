//! Profiles of AppArmor that confine a container's processes: CRIU puts each restored process under the profile of its original, which the
//! node's kernel must have.

use std::collections::BTreeSet;
use std::fs;

/// The profiles that a kernel has, each on a line with its mode in brackets.
const PROFILES: &str = "/sys/kernel/security/apparmor/profiles";
/// Where CRIU finds out whether a kernel has AppArmor.
const SECURITYFS: &str = "/sys/kernel/security/apparmor";

/// Whether this node's kernel confines processes by AppArmor.
pub fn is_on() -> bool {
    fs::read("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.starts_with(b"Y"))
}

/// Names of the profiles of these processes, each once; those of processes that have ended, or that none confines, are left out. None where this
/// node's kernel does not have AppArmor.
pub fn profiles(pids: &[u32]) -> Vec<String> {
    if !is_on() {
        return Vec::new();
    }
    let labels = pids.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/attr/current")).ok());
    let names: BTreeSet<_> = labels.filter_map(|label| confining(&label)).collect();
    names.into_iter().collect()
}

/// The name of a profile as a task's `attr/current` has it: with its mode behind it.
fn confining(label: &str) -> Option<String> {
    let label = label.trim_end_matches(['\0', '\n']);
    let name = label.rsplit_once(" (").map_or(label, |(name, _)| name);
    (!matches!(name, "" | "unconfined")).then(|| name.to_owned())
}

/// Why this node cannot put processes under profiles of these names, if it cannot, and what to do there.
pub fn obstacle(profiles: &[String]) -> Option<(String, &'static str)> {
    if profiles.is_empty() {
        return None;
    }
    if !is_on() {
        let name = &profiles[0];
        let cause =
            format!("is confined by the AppArmor profile {name}, which a kernel without AppArmor does not enforce");
        return Some((cause, "start the container without a profile, or choose a node with AppArmor"));
    }
    let Ok(loaded) = fs::read_to_string(PROFILES) else {
        let cause = format!("is confined by AppArmor, and {SECURITYFS} cannot be read");
        return Some((cause, "mount securityfs there (`mount -t securityfs securityfs /sys/kernel/security`)"));
    };
    let missing = profiles.iter().find(|name| !has(&loaded, name))?;
    let cause = format!("is confined by the AppArmor profile {missing}, which is not loaded");
    Some((cause, "load it there (`apparmor_parser`)"))
}

fn has(loaded: &str, name: &str) -> bool {
    loaded.lines().filter_map(|line| line.rsplit_once(" (")).any(|(own, _)| own == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_a_name_and_a_mode() {
        assert_eq!(confining("docker-default (enforce)\n").as_deref(), Some("docker-default"));
        assert_eq!(confining("a//b (complain)\0").as_deref(), Some("a//b"));
        assert_eq!(confining("own").as_deref(), Some("own"));
        assert_eq!(confining("unconfined\n"), None);
        assert_eq!(confining(""), None);
    }

    #[test]
    fn a_profile_is_loaded_by_its_whole_name() {
        let loaded = "docker-default (enforce)\nusr.bin (mine) (complain)\n";
        assert!(has(loaded, "docker-default") && has(loaded, "usr.bin (mine)"));
        assert!(!has(loaded, "docker") && !has(loaded, "usr.bin"));
    }

    #[test]
    fn nothing_is_in_the_way_of_what_nothing_confines() {
        assert_eq!(obstacle(&[]), None);
        assert!(obstacle(&["no such profile".to_owned()]).is_some());
    }
}
