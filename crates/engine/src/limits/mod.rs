//! Limits of a running container's cgroups, which may have been changed since its start (`runc update`, `docker update`, or by writing
//! to the cgroup).

mod noted;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::Container;
use crate::json::section;
pub use noted::Limits;
use table::{DEVICES, Limit, UNIFIED, V1, V2};

/// From this many bytes on version 1 means that there is no limit.
const UNLIMITED: i64 = i64::MAX - 4095;
const PAGE: i64 = 4096;
/// What [`crate::Cpu::lift`] changes, by its names in a configuration.
const SHARE: &[&str] = &["shares", "quota", "period", "idle"];
const SHARE_OF_V2: &[&str] = &["cpu.weight", "cpu.max", "cpu.idle"];

/// Puts the limits that hold now into a container's configuration (OCI `linux.resources`). `cgroups` are its directories by controller, and
/// by no name that of version 2. What cannot be read stays as it is configured.
pub(crate) fn update(config: &mut Value, cgroups: &HashMap<String, PathBuf>) {
    let resources = &mut section(config, "linux")["resources"];
    let is_v1 = cgroups.keys().any(|controller| !controller.is_empty());
    for limit in if is_v1 { &V1[..] } else { &V2[..] } {
        let Some(path) = cgroups.get(limit.controller) else { continue };
        let parent = || number(&path.parent()?.join(limit.file));
        if let (Some(now), Some(default)) = (number(&path.join(limit.file)), limit.default.or_else(parent)) {
            set(resources, limit, now, default);
        }
    }
    let version_2 = cgroups.get("").filter(|_| !is_v1);
    if let Some(cpuset) = cgroups.get("cpuset").or(version_2) {
        ["cpus", "mems"].into_iter().for_each(|key| set_processors(resources, key, cpuset));
    }
    if let Some(path) = cgroups.get("hugetlb").or(version_2) {
        set_huge_pages(resources, path);
    }
    if let Some(path) = version_2 {
        set_version_2(resources, path);
    } else {
        set_devices(resources, |_, file, _| text(&cgroups.get("blkio")?.join(file)));
        if let Some(control) = cgroups.get("memory").and_then(|path| text(&path.join("memory.oom_control"))) {
            let now = control.lines().any(|line| line == "oom_kill_disable 1");
            if now || resources["memory"]["disableOOMKiller"].is_boolean() {
                section(resources, "memory")["disableOOMKiller"] = now.into();
            }
        }
    }
    if resources.is_null() {
        config["linux"].as_object_mut().map(|linux| linux.remove("resources"));
    }
}

/// Whether limits were changed since the container was looked at: before the freeze, whether the destination has others.
pub fn were_changed(container: &Container) -> bool {
    differ(container, Clone::clone)
}

/// The same in the freeze, while what the container may have of the CPUs is lifted ([`crate::Cpu::lift`]): but for that.
pub fn others_were_changed(container: &Container) -> bool {
    differ(container, |resources| {
        let Value::Object(mut others) = resources.clone() else { return Value::Null };
        for (section, keys) in [("cpu", SHARE), ("unified", SHARE_OF_V2)] {
            if let Some(section) = others.get_mut(section).and_then(Value::as_object_mut) {
                section.retain(|key, _| !keys.contains(&key.as_str()));
            }
        }
        // A section, and all of it, may be there for these alone.
        others.retain(|_, section| section.as_object().is_none_or(|keys| !keys.is_empty()));
        if others.is_empty() { Value::Null } else { Value::Object(others) }
    })
}

fn differ(container: &Container, of_interest: impl Fn(&Value) -> Value) -> bool {
    let mut now = container.config.clone();
    update(&mut now, &container.cgroups);
    let [now, before] = [&now, &container.config].map(|config| of_interest(&config["linux"]["resources"]));
    now != before
}

/// What of version 2 is more than one number, or has no other name in a configuration.
fn set_version_2(resources: &mut Value, path: &Path) {
    if let Some(max) = text(&path.join("cpu.max"))
        && let [Some(quota), Some(period)] = max.split_whitespace().map(parse).collect::<Vec<_>>()[..]
    {
        let named = |key| Limit { section: "cpu", key, controller: "", file: "cpu.max", default: None };
        set(resources, &named("quota"), quota, -1);
        set(resources, &named("period"), period, 100_000);
    }
    // The configuration counts memory and swap together, the cgroup swap alone.
    if let Some(swap) = number(&path.join("memory.swap.max")) {
        let limit = resources["memory"]["limit"].as_i64().filter(|limit| *limit > 0);
        let configured = !resources["memory"]["swap"].is_null();
        match (limit, swap) {
            (Some(limit), 0..) => section(resources, "memory")["swap"] = limit.saturating_add(swap).into(),
            (_, -1) if configured => section(resources, "memory")["swap"] = (-1).into(),
            (_, -1) => {}
            (None, _) => {
                resources["memory"].as_object_mut().map(|memory| memory.remove("swap"));
                section(resources, "unified")["memory.swap.max"] = swap.to_string().into();
            }
            (Some(_), _) => {}
        }
    }
    let io_max = text(&path.join("io.max"));
    set_devices(resources, |_, _, name| {
        // 8:0 rbps=1048576 wbps=max riops=max wiops=max
        let rate = |line: &str| {
            let (device, rates) = line.split_once(' ')?;
            let mut rates = rates.split(' ').filter_map(|rate| rate.split_once('='));
            rates.find(|(key, value)| *key == name && *value != "max").map(|(_, value)| format!("{device} {value}\n"))
        };
        Some(io_max.as_ref()?.lines().filter_map(rate).collect())
    });
    for (file, default, within, key) in UNIFIED {
        let Some(now) = text(&path.join(file)) else { continue };
        let first = now.lines().next().unwrap_or_default();
        let configured = !resources["unified"][file].is_null() || !resources[within][key].is_null();
        if first != default || configured {
            section(resources, "unified")[file] = first.into();
        }
    }
}

fn text(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

fn number(file: &Path) -> Option<i64> {
    parse(&text(file)?)
}

/// -1 where there is no limit.
fn parse(text: &str) -> Option<i64> {
    if text == "max" {
        return Some(-1);
    }
    text.parse().ok().map(|number: i64| if number >= UNLIMITED { -1 } else { number })
}

fn set(resources: &mut Value, limit: &Limit, now: i64, default: i64) {
    let configured = resources[limit.section][limit.key].as_i64();
    // The kernel rounds bytes down to pages; 0 and -1 are both "not set".
    let same = |was: i64| {
        was == now
            || (limit.section == "memory" && was / PAGE * PAGE == now)
            || (was <= 0 && (now <= 0 || now == default))
    };
    if !configured.map_or(now == default, same) {
        section(resources, limit.section)[limit.key] = now.into();
    }
}

/// The processors or memory nodes of a cgroup, if they are others than its parent's or than configured.
fn set_processors(resources: &mut Value, key: &str, cgroup: &Path) {
    let read = |path: &Path| text(&path.join(format!("cpuset.{key}")));
    let parent = cgroup.parent().and_then(read);
    let configured = resources["cpu"][key].as_str().is_some_and(|was| !was.is_empty());
    if let Some(now) = read(cgroup).filter(|now| !now.is_empty() && (configured || parent.as_ref() != Some(now))) {
        section(resources, "cpu")[key] = now.into();
    }
}

/// The rates of single devices. `read` has lines of a device's number and its rate, by the names of [`DEVICES`].
fn set_devices(resources: &mut Value, read: impl Fn(&str, &str, &str) -> Option<String>) {
    for (key, file, name) in DEVICES {
        let Some(lines) = read(key, file, name) else { continue };
        let entry = |line: &str| {
            let (device, rate) = line.split_once(' ')?;
            let (major, minor) = device.split_once(':')?;
            let number = |text: &str| text.parse::<u64>().ok();
            Some(json!({"major": number(major)?, "minor": number(minor)?, "rate": number(rate)?}))
        };
        let now: Vec<Value> = lines.lines().filter_map(entry).collect();
        if !now.is_empty() || resources["blockIO"][key].as_array().is_some_and(|was| !was.is_empty()) {
            section(resources, "blockIO")[key] = now.into();
        }
    }
}

/// The limits of huge pages, a file for each size: `hugetlb.2MB.limit_in_bytes`, or `hugetlb.2MB.max` in version 2.
fn set_huge_pages(resources: &mut Value, cgroup: &Path) {
    let mut configured = resources["hugepageLimits"].as_array().cloned().unwrap_or_default();
    let before = configured.len();
    for entry in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let size = name.to_str().and_then(|name| name.strip_prefix("hugetlb."));
        let size = size.and_then(|n| n.strip_suffix(".limit_in_bytes").or_else(|| n.strip_suffix(".max")));
        let Some(size) = size.filter(|size| !size.contains('.')) else { continue };
        let now = text(&entry.path()).filter(|now| now != "max").and_then(|now| now.parse::<u64>().ok());
        let known = configured.iter().position(|limit| limit["pageSize"] == size);
        match (now.filter(|now| *now < UNLIMITED.cast_unsigned() / 4), known) {
            (Some(now), Some(known)) => configured[known]["limit"] = now.into(),
            (Some(now), None) => configured.push(json!({"pageSize": size, "limit": now})),
            (None, Some(known)) => drop(configured.remove(known)),
            (None, None) => {}
        }
    }
    if !configured.is_empty() || before > 0 {
        section(resources, "hugepageLimits");
        resources["hugepageLimits"] = configured.into();
    }
}
