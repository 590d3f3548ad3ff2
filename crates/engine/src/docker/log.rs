//! The log files of Docker's drivers `json-file` and `local`.
//!
//! dockerd reads the current file as far as it has written it, and rotated files by their names, as they are when it
//! is asked for the log. So what a container has logged elsewhere is a rotated file of its copy.

use std::path::Path;

use serde_json::{Value, json};

use super::Docker;
use crate::described;
use crate::logs::{self, LogFiles};

/// What dockerd takes for yes (strconv.ParseBool of Go).
const TRUE: [&str; 6] = ["1", "t", "T", "true", "TRUE", "True"];
/// More files than these of one log are not looked for.
const MOST: usize = 1000;

/// The files of a container's log, below Docker's directory `root`; `None` for drivers that keep it elsewhere. They
/// are not there before the first start.
pub fn files(described: &Value, root: &Path) -> Option<LogFiles> {
    let id = described["Id"].as_str()?;
    let directory = root.join("containers").join(id);
    let log = &described["HostConfig"]["LogConfig"];
    let option = |name: &str| log["Config"][name].as_str();
    let most = |default| option("max-file").map_or(Some(default), |most| most.parse().ok()).map(|most| MOST.min(most));
    let compress = |default| option("compress").map_or(default, |text| TRUE.contains(&text));
    let driver = log["Type"].as_str()?.to_owned();
    match driver.as_str() {
        "json-file" => Some(LogFiles {
            driver,
            current: directory.join(format!("{id}-json.log")),
            most: most(1)?,
            max_bytes: option("max-size").and_then(logs::bytes),
            compressed: compress(false),
        }),
        "local" => Some(LogFiles {
            driver,
            current: directory.join("local-logs/container.log"),
            most: most(5)?,
            max_bytes: logs::bytes(option("max-size").unwrap_or("20m")),
            compressed: compress(true),
        }),
        _ => None,
    }
}

/// Has a container that is made with this `LogConfig` read one rotated file at least. dockerd reads rotated files
/// where more than one file is allowed, also where none is rotated by its size.
pub fn show_rotated(log: &mut Value) {
    let most = log["Config"]["max-file"].as_str().or_else(|| (log["Type"] == "json-file").then_some("1"));
    if most == Some("1") {
        if !log["Config"].is_object() {
            log["Config"] = json!({});
        }
        log["Config"]["max-file"] = "2".into();
    }
}

/// What becomes of the log of a container where it stays behind.
pub fn left(name: &str, described: &Value, root: &Path) -> Option<String> {
    match described["HostConfig"]["LogConfig"]["Type"].as_str()? {
        "journald" => Some(described::logged_to_journal(Docker::NAME, name)),
        // Other drivers' logs are elsewhere, where they stay.
        _ => described::logged(Docker::NAME, name, files(described, root)?.bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_file_is_given_a_rotated_one_beside_it() {
        let shown = |mut log: Value| {
            show_rotated(&mut log);
            log["Config"]["max-file"].clone()
        };
        assert_eq!(shown(json!({"Type": "json-file", "Config": null})), "2");
        assert_eq!(shown(json!({"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}})), "2");
        assert_eq!(shown(json!({"Type": "json-file", "Config": {"max-file": "3"}})), "3");
        assert_eq!(shown(json!({"Type": "local", "Config": {}})), Value::Null);
        assert_eq!(shown(json!({"Type": "journald"})), Value::Null);
    }

    #[test]
    fn files_are_those_of_the_driver() {
        let of = |log: Value| files(&json!({"Id": "x", "HostConfig": {"LogConfig": log}}), Path::new("/d"));
        let json_file = of(json!({"Type": "json-file", "Config": {"max-size": "10k", "max-file": "3"}})).unwrap();
        assert_eq!((json_file.most, json_file.max_bytes, json_file.compressed), (3, Some(10_000), false));
        let local = of(json!({"Type": "local", "Config": {}})).unwrap();
        assert_eq!((local.most, local.compressed), (5, true));
        assert_eq!(local.current, Path::new("/d/containers/x/local-logs/container.log"));
        assert_eq!(of(json!({"Type": "journald", "Config": {}})), None);
    }
}
