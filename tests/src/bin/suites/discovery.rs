//! Which suites there are: every end-to-end test program is one, the unit and integration tests of every other crate are
//! one, and so are the examples in the documentation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The package whose test programs are suites of their own.
const END_TO_END: &str = "tranship-e2e";
/// The suites that are also run where version 2 of cgroups alone is mounted.
const WITH_CGROUP2: [&str; 2] = ["redis", "engine"];
/// What the name of such a suite ends with.
const CGROUP2: &str = "+cgroup2";
/// The suite of which a part is also run with a containerd that is not Docker's child, as Debian's units have it.
const WITH_CONTAINERD: &str = "docker";
/// What the name of such a suite ends with, what the lab knows it by, and the scenarios to which it matters.
const CONTAINERD: &str = "+containerd";
const CONTAINERD_APART: &str = "TRANSHIP_CONTAINERD_APART";
const RESTARTS: &[&str] = &["a_docker_that_is_restarted"];
/// What the name of a crate's suite begins with.
const UNIT: &str = "unit-";
const DOCUMENTATION: &str = "documentation";
/// Suites that take long, the longest first: begun first, they do not keep the others waiting at the end.
const LONG: [&str; 12] = [
    "faults",
    "pods",
    "podman",
    "traffic",
    "docker",
    "servers",
    "workloads",
    "zoo",
    "unit-coordinator",
    "containerd",
    "torture",
    "crossing",
];
/// Suites that use less than half of a processor (the table's columns of seconds and CPU seconds), the longest first. One of
/// them runs beside those that `--jobs` allows.
const WAITING: [&str; 10] =
    ["addresses", "group", "recover", "shared", "unchanged", "memory", "neighbours", "cancel", "drain", "journal"];

/// A test program.
#[derive(Debug, Clone)]
pub struct Program {
    /// Where it is.
    pub path: PathBuf,
    /// The directory of its package, which it is run in.
    pub directory: PathBuf,
}

/// What is run, judged and shown as one.
#[derive(Debug, Clone)]
pub struct Suite {
    /// Its name in the table.
    pub name: String,
    /// Whether it mostly waits, so that it can run beside others.
    pub waits: bool,
    /// How it is run.
    pub kind: Kind,
}

impl Suite {
    fn new(name: String, kind: Kind) -> Self {
        Self { waits: WAITING.contains(&name.as_str()), name, kind }
    }
}

/// How a suite is run.
#[derive(Debug, Clone)]
pub enum Kind {
    /// Test programs, one after the other, in namespaces of their own.
    Programs {
        /// They.
        programs: Vec<Program>,
        /// Whether with version 2 of cgroups alone.
        cgroup2: bool,
        /// A variable that is in the environment.
        variable: Option<&'static str>,
        /// Arguments for each.
        arguments: &'static [&'static str],
    },
    /// The examples in the documentation, which cargo compiles.
    Documentation,
}

/// Builds the tests and finds those of these names; all where there are none. In the order in which they are to be
/// started.
pub fn suites(wanted: &[String]) -> Result<Vec<Suite>> {
    let mut units: BTreeMap<String, Vec<Program>> = BTreeMap::new();
    let mut found = Vec::new();
    for (package, target, program) in build(&selection(wanted))? {
        if package != END_TO_END {
            let name = package.strip_prefix("tranship-").unwrap_or(&package);
            units.entry(format!("{UNIT}{name}")).or_default().push(program);
        } else if !target.1 {
            units.entry(format!("{UNIT}e2e")).or_default().push(program);
        } else {
            found.extend(end_to_end(&target.0, &program));
        }
    }
    let units = units.into_iter().map(|(name, programs)| {
        Suite::new(name, Kind::Programs { programs, cgroup2: false, variable: None, arguments: &["--show-output"] })
    });
    found.extend(units);
    found.push(Suite::new(DOCUMENTATION.into(), Kind::Documentation));
    if !wanted.is_empty() {
        let unknown: Vec<_> = wanted.iter().filter(|name| !found.iter().any(|suite| suite.name == **name)).collect();
        ensure!(unknown.is_empty(), "there are no suites {unknown:?}; `suites run --list` shows all");
        found.retain(|suite| wanted.contains(&suite.name));
    }
    let rank = |suite: &Suite| {
        let among = |names: &[&str]| names.iter().position(|name| *name == suite.name).unwrap_or(names.len());
        (suite.waits, among(&LONG), among(&WAITING))
    };
    found.sort_by(|x, y| rank(x).cmp(&rank(y)).then_with(|| x.name.cmp(&y.name)));
    Ok(found)
}

fn end_to_end(name: &str, program: &Program) -> Vec<Suite> {
    let suite = |name: String, cgroup2, variable, arguments| {
        Suite::new(name, Kind::Programs { programs: vec![program.clone()], cgroup2, variable, arguments })
    };
    let mut suites = vec![suite(name.to_owned(), false, None, &[])];
    if WITH_CGROUP2.contains(&name) {
        suites.push(suite(format!("{name}{CGROUP2}"), true, None, &[]));
    }
    if name == WITH_CONTAINERD {
        suites.push(suite(format!("{name}{CONTAINERD}"), false, Some(CONTAINERD_APART), RESTARTS));
    }
    suites
}

/// The arguments by which cargo builds no more than what suites of these names need.
fn selection(wanted: &[String]) -> Vec<String> {
    let mut selected = Vec::new();
    for name in wanted.iter().filter(|name| *name != DOCUMENTATION) {
        match name.strip_prefix(UNIT) {
            // Unit tests cannot be combined with single test programs.
            Some(_) => return vec!["--workspace".into()],
            None => {
                let (name, _variant) = name.split_once('+').unwrap_or((name, ""));
                selected.extend(["--test".into(), name.to_owned()]);
            }
        }
    }
    // Of the whole workspace, so that dependencies have the same features and are not built again.
    selected.insert(0, "--workspace".into());
    selected
}

/// The package's name, the target's name and whether it is an integration test, and the program.
type Built = (String, (String, bool), Program);

fn build(selected: &[String]) -> Result<Vec<Built>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["test", "--release", "--no-run", "--message-format=json-render-diagnostics"]).args(selected);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the tests could not be built");
    }
    let text = String::from_utf8(output.stdout).context("what cargo prints")?;
    let messages = text.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>();
    Ok(messages.context("what cargo prints")?.iter().filter_map(program).collect())
}

/// The test program that a message of cargo's is about.
fn program(message: &Value) -> Option<Built> {
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let path = message["executable"].as_str().filter(|_| is_test)?;
    let directory = Path::new(message["manifest_path"].as_str()?).parent()?;
    let target = &message["target"];
    let integration = target["kind"].as_array()?.iter().any(|kind| kind == "test");
    let program = Program { path: path.into(), directory: directory.into() };
    Some((package(message["package_id"].as_str()?)?, (target["name"].as_str()?.to_owned(), integration), program))
}

/// The name in a package's id: `path+file:///w/crates/lab#tranship-lab@0.1.0`, or `path+file:///w/tranship-lab#0.1.0`.
fn package(id: &str) -> Option<String> {
    let (place, name) = id.rsplit_once('#')?;
    let name = name.split_once('@').map_or_else(|| place.rsplit('/').next(), |(name, _)| Some(name));
    name.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_named_in_both_forms_of_ids() {
        assert_eq!(package("path+file:///w/crates/lab#tranship-lab@0.1.0").as_deref(), Some("tranship-lab"));
        assert_eq!(package("path+file:///w/tranship-lab#0.1.0").as_deref(), Some("tranship-lab"));
    }

    #[test]
    fn no_more_is_built_than_what_is_wanted() {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(selection(&[]), ["--workspace"]);
        let selected = selection(&names(&["zoo", "redis+cgroup2", "docker+containerd"]));
        assert_eq!(selected, ["--workspace", "--test", "zoo", "--test", "redis", "--test", "docker"]);
        assert_eq!(selection(&names(&["zoo", "unit-sys"])), ["--workspace"]);
    }
}
