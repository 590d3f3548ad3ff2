//! What the machine looks like from outside the lab, to prove by comparison that a lab left nothing behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cgroup;
use crate::lab::MARK;
use crate::process::{arguments, depth, has_variable, pids, wait_for};
use crate::program::on_path;

/// Where Tranship, the engine, CRIU or the plugins could leave files, and parts of the names that they would have.
const PLACES: [&str; 9] =
    ["/run", "/tmp", "/var/tmp", "/dev/shm", "/etc", "/var/lib", "/var/run/netns", "/run/runc", "/run/crun"];
const NAMES: [&str; 6] = ["tranship", "criu", "runc", "cni", "containers", "netns"];
const PROGRAMS: [&str; 3] = ["transhipd", "tranship", "tranship-lab"];

/// The machine's mounts, interfaces, namespaces, cgroups, firewall rules, processes and files, as far as a lab could
/// change them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot(BTreeMap<&'static str, BTreeSet<String>>);

impl Snapshot {
    /// Takes it now.
    pub fn take() -> Self {
        let mut all = BTreeMap::new();
        all.insert("mount", mounts());
        all.insert("interface", names_in("/sys/class/net"));
        all.insert("network namespace", names_in("/run/netns"));
        all.insert("cgroup", cgroups());
        all.insert("firewall rule", firewall());
        all.insert("process", processes());
        all.insert("file", files());
        Self(all)
    }

    /// What is there in `later` and was not here, one line each; and what is gone of the things that nobody but the
    /// machine's owner removes. (Processes, cgroups and files of others come and go.)
    pub fn differences(&self, later: &Self) -> Vec<String> {
        let empty = BTreeSet::new();
        let kinds: BTreeSet<_> = self.0.keys().chain(later.0.keys()).collect();
        let mut lines = Vec::new();
        for kind in kinds {
            let (before, after) = (self.0.get(kind).unwrap_or(&empty), later.0.get(kind).unwrap_or(&empty));
            lines.extend(after.difference(before).map(|thing| format!("{kind} left behind: {thing}")));
            if matches!(*kind, "mount" | "interface" | "firewall rule") {
                lines.extend(before.difference(after).map(|thing| format!("{kind} gone: {thing}")));
            }
        }
        lines
    }

    /// Compares with the machine as it is now, giving the kernel a moment to finish what it does in the background.
    pub fn compare(&self) -> Vec<String> {
        let mut found = Vec::new();
        wait_for(Duration::from_secs(3), || {
            found = self.differences(&Self::take());
            found.is_empty().then_some(())
        });
        found
    }
}

fn mounts() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let describe = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        Some(format!("{} ({})", before.split(' ').nth(4)?, after.split(' ').next()?))
    };
    text.lines().filter_map(describe).collect()
}

fn names_in(directory: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// All cgroups but those that systemd makes and removes as it pleases, and those of test suites in namespaces of their own.
fn cgroups() -> BTreeSet<String> {
    let of_others = |path: &Path| {
        path.components().filter_map(|c| c.as_os_str().to_str()).any(|part| {
            part.starts_with("tranship-suite-")
                || [".slice", ".scope", ".service", ".socket", ".mount", ".swap"].iter().any(|end| part.ends_with(end))
        })
    };
    let all = cgroup::hierarchies().into_iter().flat_map(|root| cgroup::tree(&root));
    all.filter(|path| !of_others(path)).map(|path| path.display().to_string()).collect()
}

fn firewall() -> BTreeSet<String> {
    let programs: [(&str, &[&str]); 5] = [
        ("nft", &["list", "ruleset"]),
        ("iptables-save", &[]),
        ("ip6tables-save", &[]),
        ("iptables-legacy-save", &[]),
        ("ip6tables-legacy-save", &[]),
    ];
    let mut rules = BTreeSet::new();
    for (program, arguments) in programs {
        let Some(path) = on_path(program, Some(Path::new("/usr/sbin"))) else { continue };
        let output = Command::new(path).args(arguments).stderr(Stdio::null()).output();
        let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        rules.extend(rules_of(&text).map(|rule| format!("{program}: {rule}")));
    }
    rules
}

/// The rules in what nft or iptables-save prints, numbered so that two equal ones count as two, without what changes all
/// the time: comments and counters.
fn rules_of(text: &str) -> impl Iterator<Item = String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).map(move |line| {
        let (line, _) = line.split_once(" [").unwrap_or((line, ""));
        let words: Vec<_> = line.split_whitespace().collect();
        let mut kept = Vec::new();
        let mut skip = 0;
        for word in words {
            if matches!(word, "packets" | "bytes") {
                skip = 2;
            }
            if skip == 0 {
                kept.push(word);
            } else {
                skip -= 1;
            }
        }
        let rule = kept.join(" ");
        let count = seen.entry(rule.clone()).or_default();
        *count += 1;
        if *count == 1 { rule } else { format!("{rule} ({count})") }
    })
}

/// Processes that a lab started, or that run Tranship's programs; without this one, and without those in other pid
/// namespaces: the kernel ends them with their node, and other labs have theirs.
fn processes() -> BTreeSet<String> {
    let ours = |pid: &u32| {
        if depth(*pid) != 1 {
            return false;
        }
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let name = program.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        has_variable(*pid, MARK) || PROGRAMS.contains(&name.trim_end_matches(" (deleted)"))
    };
    let others = pids().into_iter().filter(|pid| *pid != std::process::id());
    others.filter(ours).map(|pid| format!("{pid} {}", arguments(pid).join(" "))).collect()
}

fn files() -> BTreeSet<String> {
    let in_place = |place: &'static str| {
        // Labs in other namespaces have directories on the same disk; a lab that goes down reports its own that stays.
        let of_a_lab = move |name: &str| place == "/var/lib" && name.starts_with("tranship-lab-");
        let named = move |name: &String| NAMES.iter().any(|part| name.contains(part)) && !of_a_lab(name);
        names_in(place).into_iter().filter(named).map(move |name| format!("{place}/{name}"))
    };
    PLACES.into_iter().flat_map(in_place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(kind: &'static str, things: &[&str]) -> Snapshot {
        Snapshot(BTreeMap::from([(kind, things.iter().map(|t| (*t).to_owned()).collect())]))
    }

    #[test]
    fn additions_and_losses_are_told_apart() {
        let before = snapshot("mount", &["/a", "/b"]);
        let after = snapshot("mount", &["/b", "/c"]);
        assert_eq!(before.differences(&after), ["mount left behind: /c", "mount gone: /a"]);
        assert!(before.differences(&before).is_empty());
        assert!(snapshot("process", &["7 x"]).differences(&snapshot("process", &[])).is_empty());
    }

    #[test]
    fn counters_and_comments_are_no_rules() {
        let rules = |text| rules_of(text).collect::<Vec<_>>();
        assert_eq!(rules("# Generated now\n:INPUT ACCEPT [12:34]\n"), [":INPUT ACCEPT"]);
        assert_eq!(rules("  counter packets 5 bytes 99 accept"), ["counter accept"]);
        assert_eq!(rules("drop\ndrop\n"), ["drop", "drop (2)"]);
    }
}
