//! Limits that an engine at the destination does not know of: they travel in the configuration, and the runtime wrapper puts them into the
//! one that the engine has made there.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::note;

/// Where they are noted in a bundle.
const NOTE: &str = "limits.json";
/// The parts of `linux.resources` that have limits. Devices are the destination's own.
const SECTIONS: [&str; 7] = ["pids", "cpu", "memory", "blockIO", "network", "hugepageLimits", UNIFIED];
/// The part that no node with version 1 can have.
const UNIFIED: &str = "unified";

/// The limits in an OCI configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits(Map<String, Value>);

impl Limits {
    /// Those of this configuration.
    pub fn of(config: &Value) -> Self {
        let resources = &config["linux"]["resources"];
        let given = |name: &&str| Some(((*name).to_owned(), resources.get(*name)?.clone()));
        Self(SECTIONS.iter().filter_map(given).filter(|(_, section)| !section.is_null()).collect())
    }

    /// Notes them in a bundle.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn note(&self, bundle: &Path) -> io::Result<()> {
        note::write(bundle, NOTE, self)
    }

    /// Those that were noted in a bundle; `None` if none were.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn noted(bundle: &Path) -> io::Result<Option<Self>> {
        note::read(bundle, NOTE)
    }

    /// Puts them into a configuration of this node, which has cgroups of version 2 or 1.
    pub fn give_to(&self, config: &mut Value, is_v2: bool) {
        if self.0.is_empty() || !config["linux"].is_object() {
            return;
        }
        let resources = &mut config["linux"]["resources"];
        if !resources.is_object() {
            *resources = Value::Object(Map::new());
        }
        for (name, section) in self.0.iter().filter(|(name, _)| is_v2 || *name != UNIFIED) {
            resources[name] = section.clone();
        }
    }
}
