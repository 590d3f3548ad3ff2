//! The peer: the plain recipe of runc and CRIU, bench/peer/recipe.sh, run between two nodes of the lab.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tranship_lab::Lab;

use crate::program;
use crate::run::Moved;
use crate::timeline::slices;

const SCRIPT: &str = include_str!("../peer/recipe.sh");
/// Where `make setup` puts a criu where the machine's own does not work.
const PRIVATE_CRIU: &str = "/opt/tranship/criu";

/// The recipe, ready to be run.
pub struct Recipe(Command);

impl Recipe {
    /// Puts the bundle on the destination, which the recipe expects to be there. Its restore will begin `delay_ms` later than
    /// it could.
    pub fn prepare(lab: &Lab, [source, destination]: [&str; 2], name: &str, delay_ms: u64) -> Result<Self> {
        let bundle = format!("/run/containers/{name}");
        let config = lab.path(source, &bundle)?.join("config.json");
        let text = fs::read(&config).with_context(|| format!("cannot read {}", config.display()))?;
        let mut value: Value = serde_json::from_slice(&text).context("the bundle's config.json is no JSON")?;
        // All nodes share one kernel, so each has a cgroup parent of its own.
        let path = value["linux"]["cgroupsPath"].as_str().context("the bundle has no cgroupsPath")?;
        value["linux"]["cgroupsPath"] = json!(path.replace(&format!("/{source}/"), &format!("/{destination}/")));
        let there = lab.path(destination, &bundle)?;
        fs::create_dir_all(&there)
            .and_then(|()| fs::write(there.join("config.json"), value.to_string()))
            .with_context(|| format!("cannot write the bundle {}", there.display()))?;

        let mut command = Command::new("bash");
        command.args(["-c", SCRIPT, "recipe", "--name", name, "--dest-bundle", &bundle]);
        command.arg("--dest-address").arg(lab.address(destination)?.to_string());
        command.arg("--delay").arg((delay_ms as f64 / 1e3).to_string());
        for (option, node) in [("--source", source), ("--dest", destination)] {
            let shell = lab.command(node, &["bash"])?;
            let words = std::iter::once(shell.get_program()).chain(shell.get_args());
            command.arg(option).arg(words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" "));
        }
        command.env("PATH", path_with_criu(&lab.command(source, &["bash"])?));
        Ok(Self(command))
    }

    /// Runs it; if it has not ended within `limit`, it has failed.
    pub fn perform(self, limit: Duration) -> Result<Moved> {
        let begin = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let output = program::run(self.0, limit)?;
        if !output.status.success() {
            bail!("the recipe failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        let said = parse(&String::from_utf8_lossy(&output.stdout))?;
        let blackout_ms = (said.running - said.freeze) * 1e3;
        let from_freeze = |time: f64| (time - said.freeze) * 1e3;
        let end = said.steps.last().map_or(said.running, |s| s.2);
        let parts: Vec<_> =
            said.steps.into_iter().map(|(name, begin, end)| (name, from_freeze(begin), from_freeze(end))).collect();
        Ok(Moved {
            // What the script does after its last step is for us, not for the migration.
            total_ms: (end - begin) * 1e3,
            blackout_ms: Some(blackout_ms),
            slices: slices(&parts, blackout_ms),
            report: None,
        })
    }
}

/// The PATH that a lab's command has, with the private criu first if there is one.
pub fn path_with_criu(command: &Command) -> String {
    let environment: HashMap<_, _> = command.get_envs().collect();
    let path = environment.get(std::ffi::OsStr::new("PATH")).copied().flatten().unwrap_or_default().to_string_lossy();
    let private = Path::new(PRIVATE_CRIU).join("criu").is_file();
    if private { format!("{PRIVATE_CRIU}:{path}") } else { path.into_owned() }
}

/// What the script prints: times in s since the Unix epoch.
#[derive(Debug, Default)]
struct Said {
    steps: Vec<(String, f64, f64)>,
    freeze: f64,
    running: f64,
}

fn parse(text: &str) -> Result<Said> {
    let mut said = Said::default();
    for line in text.lines() {
        let wrong = || format!("the recipe printed a line that is none of its own: {line:?}");
        let mut words: Vec<_> = line.split(' ').collect();
        let last: f64 = words.pop().and_then(|w| w.parse().ok()).with_context(wrong)?;
        match words.as_slice() {
            ["freeze"] => said.freeze = last,
            ["running"] => said.running = last,
            ["step", name @ .., begin] if !name.is_empty() => {
                said.steps.push((name.join(" "), begin.parse().ok().with_context(wrong)?, last));
            }
            _ => bail!(wrong()),
        }
    }
    if said.freeze <= 0.0 || said.running <= said.freeze {
        bail!("CRIU's logs have no plausible times of freeze and resume: {} and {}", said.freeze, said.running);
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_may_have_names_of_several_words() {
        let said = parse("step dump 1.0 2.5\nstep source network 2.5 2.6\nfreeze 1.1\nrunning 3.0\n").unwrap();
        assert_eq!(said.steps[1], ("source network".to_owned(), 2.5, 2.6));
        assert_eq!((said.freeze, said.running), (1.1, 3.0));
    }

    #[test]
    fn a_recipe_that_does_not_know_its_blackout_has_failed() {
        assert!(parse("step dump 1.0 2.0\nfreeze 3.0\n").is_err());
        assert!(parse("freeze x\n").is_err());
        assert!(parse("hello 1\n").is_err());
    }
}
