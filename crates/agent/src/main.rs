//! `transhipd`: the agent of a node, and the two small programs that it starts.
//!
//! - `transhipd [--config FILE]` is the agent.
//! - `transhipd pager DIRECTORY WORK` is the page store and fault server of one migration.
//! - called as `criu`, it is the CRIU front that an engine executes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use tranship_criu::front;
use tranship_memory::pager;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let called_as = arguments.first().and_then(|a| Path::new(a).file_name().map(|n| n.to_owned()));
    let done = match (called_as.as_deref().and_then(|n| n.to_str()), arguments.get(1).and_then(|a| a.to_str())) {
        (Some("criu"), _) => criu_front(&arguments),
        (_, Some("pager")) => run_pager(&arguments),
        _ => Ok(0),
    };
    match done {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("transhipd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `criu swrk FD`.
fn criu_front(arguments: &[OsString]) -> anyhow::Result<i32> {
    let plan = std::env::var_os(front::PLAN_VARIABLE).map(PathBuf::from);
    let plan = plan.with_context(|| format!("{} must name the front's plan", front::PLAN_VARIABLE))?;
    let number = match arguments {
        [_, swrk, number] if swrk == "swrk" => number.to_str().and_then(|n| n.parse().ok()),
        _ => None,
    };
    let number = number.context("the CRIU front understands `criu swrk FD` only")?;
    let engine = tranship_sys::descriptor::inherited(number)?;
    Ok(front::run(&plan, engine, number)?)
}

fn run_pager(arguments: &[OsString]) -> anyhow::Result<i32> {
    let [_, _, directory, work] = arguments else { anyhow::bail!("usage: transhipd pager DIRECTORY WORK") };
    pager::run(Path::new(directory), Path::new(work))?;
    Ok(0)
}
