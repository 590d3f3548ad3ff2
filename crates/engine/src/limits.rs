//! Limits of a running container's cgroups, which may have been changed since its start (`runc update`, or by writing to the cgroup).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// From this many bytes on version 1 means that there is no limit.
const UNLIMITED: i64 = i64::MAX - 4095;
const PAGE: i64 = 4096;

/// One limit: its place in the resources of a configuration, its file, and what it is where nobody has set it.
struct Limit {
    section: &'static str,
    key: &'static str,
    controller: &'static str,
    file: &'static str,
    default: i64,
}

const fn limit(section: &'static str, key: &'static str, place: (&'static str, &'static str), default: i64) -> Limit {
    Limit { section, key, controller: place.0, file: place.1, default }
}

/// Version 1.
const V1: [Limit; 7] = [
    limit("pids", "limit", ("pids", "pids.max"), -1),
    limit("cpu", "shares", ("cpu", "cpu.shares"), 1024),
    limit("cpu", "quota", ("cpu", "cpu.cfs_quota_us"), -1),
    limit("cpu", "period", ("cpu", "cpu.cfs_period_us"), 100_000),
    limit("memory", "limit", ("memory", "memory.limit_in_bytes"), -1),
    limit("memory", "swap", ("memory", "memory.memsw.limit_in_bytes"), -1),
    limit("memory", "reservation", ("memory", "memory.soft_limit_in_bytes"), -1),
];

/// Version 2, whose controllers are all in one directory; by no name that is the cgroup of version 2. Its `cpu.max` is read apart.
const V2: [Limit; 3] = [
    limit("pids", "limit", ("", "pids.max"), -1),
    limit("memory", "limit", ("", "memory.max"), -1),
    limit("memory", "reservation", ("", "memory.low"), 0),
];

/// Puts the limits that hold now into a container's configuration (OCI `linux.resources`). `cgroups` are its directories by controller.
/// What cannot be read stays as it is configured.
pub(crate) fn update(config: &mut Value, cgroups: &HashMap<String, PathBuf>) {
    let resources = &mut config["linux"]["resources"];
    let is_v1 = cgroups.keys().any(|controller| !controller.is_empty());
    for limit in if is_v1 { &V1[..] } else { &V2[..] } {
        if let Some(now) = cgroups.get(limit.controller).and_then(|path| number(&path.join(limit.file))) {
            set(resources, limit, now);
        }
    }
    for key in ["cpus", "mems"] {
        if let Some(processors) = cgroups.get("cpuset").and_then(|path| processors(key, path)) {
            section(resources, "cpu")[key] = processors.into();
        }
    }
    if !is_v1
        && let Some(text) = cgroups.get("").and_then(|path| std::fs::read_to_string(path.join("cpu.max")).ok())
        && let [quota, period] = text.split_whitespace().map(parse).collect::<Vec<_>>()[..]
    {
        let own = |key, default| limit("cpu", key, ("", "cpu.max"), default);
        quota.into_iter().for_each(|quota| set(resources, &own("quota", -1), quota));
        period.into_iter().for_each(|period| set(resources, &own("period", 100_000), period));
    }
    if resources.is_null() {
        config["linux"].as_object_mut().map(|linux| linux.remove("resources"));
    }
}

fn number(file: &Path) -> Option<i64> {
    parse(std::fs::read_to_string(file).ok()?.trim())
}

/// -1 where there is no limit.
fn parse(text: &str) -> Option<i64> {
    if text == "max" {
        return Some(-1);
    }
    text.parse().ok().map(|number: i64| if number >= UNLIMITED { -1 } else { number })
}

fn set(resources: &mut Value, limit: &Limit, now: i64) {
    let configured = resources[limit.section][limit.key].as_i64();
    // The kernel rounds bytes down to pages; 0 and -1 are both "not set".
    let same = |was: i64| {
        was == now
            || (limit.section == "memory" && was / PAGE * PAGE == now)
            || (was <= 0 && (now <= 0 || now == limit.default))
    };
    if !configured.map_or(now == limit.default, same) {
        section(resources, limit.section)[limit.key] = now.into();
    }
}

fn section<'a>(resources: &'a mut Value, name: &str) -> &'a mut Value {
    if !resources.is_object() {
        *resources = Value::Object(serde_json::Map::new());
    }
    let section = &mut resources[name];
    if !section.is_object() {
        *section = Value::Object(serde_json::Map::new());
    }
    section
}

/// The processors or memory nodes of a cgroup, if they are others than its parent's.
fn processors(key: &str, cgroup: &Path) -> Option<String> {
    let file = format!("cpuset.{key}");
    let read = |path: &Path| std::fs::read_to_string(path.join(&file)).ok().map(|text| text.trim().to_owned());
    let (now, parent) = (read(cgroup), cgroup.parent().and_then(read));
    now.filter(|now| !now.is_empty() && parent.as_ref() != Some(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn cgroups(files: &[(&str, &str, &str)]) -> (tempfile::TempDir, HashMap<String, PathBuf>) {
        let root = tempfile::tempdir().unwrap();
        let mut all = HashMap::new();
        for (controller, file, text) in files {
            let path = root.path().join(format!("c-{controller}")).join("own");
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join(file), format!("{text}\n")).unwrap();
            all.insert((*controller).to_owned(), path);
        }
        (root, all)
    }

    #[test]
    fn what_was_changed_since_the_start_is_in_the_configuration() {
        let (_root, cgroups) = cgroups(&[
            ("pids", "pids.max", "10"),
            ("cpu", "cpu.cfs_quota_us", "50000"),
            ("cpu", "cpu.cfs_period_us", "100000"),
            ("cpu", "cpu.shares", "1024"),
            ("memory", "memory.limit_in_bytes", "9223372036854771712"),
            ("memory", "memory.soft_limit_in_bytes", "1048576"),
        ]);
        let mut config = json!({"linux": {"resources": {"memory": {"limit": 4_194_304}, "pids": {"limit": 100}}}});
        update(&mut config, &cgroups);
        let expected = json!({"memory": {"limit": -1, "reservation": 1_048_576}, "pids": {"limit": 10},
                              "cpu": {"quota": 50000}});
        assert_eq!(config["linux"]["resources"], expected);
    }

    #[test]
    fn what_is_as_configured_stays_as_it_is() {
        let (_root, cgroups) = cgroups(&[
            ("pids", "pids.max", "max"),
            ("cpu", "cpu.cfs_quota_us", "-1"),
            ("cpu", "cpu.cfs_period_us", "100000"),
            ("memory", "memory.limit_in_bytes", "4194304"),
        ]);
        let config = json!({"linux": {"resources": {"memory": {"limit": 4_194_999}, "pids": {"limit": 0}}}});
        let mut updated = config.clone();
        update(&mut updated, &cgroups);
        assert_eq!(updated, config);
        let mut bare = json!({"linux": {}});
        update(&mut bare, &HashMap::new());
        assert_eq!(bare, json!({"linux": {}}));
    }

    #[test]
    fn version_2_has_both_numbers_of_the_processor_in_one_file() {
        let (_root, cgroups) =
            cgroups(&[("", "cpu.max", "20000 50000"), ("", "memory.max", "max"), ("", "pids.max", "7")]);
        let mut config = json!({"linux": {}});
        update(&mut config, &cgroups);
        let expected = json!({"cpu": {"quota": 20000, "period": 50000}, "pids": {"limit": 7}});
        assert_eq!(config["linux"]["resources"], expected);
    }
}
