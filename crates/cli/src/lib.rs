//! `tranship`: the command line. It talks to this node's agent and to nothing else. A library for the fuzz targets' sake.

mod args;
mod calls;
mod candidates;
mod command;
mod evacuate;
mod follow;
pub mod fuzz;
mod group;
mod init;
mod launch;
mod manual;
mod plain;
mod progress;
mod screen;
mod show;
mod units;
mod watch;

use std::process::ExitCode;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;
use tranship_api::{Client, ErrorBody};

use crate::args::Arguments;
use crate::calls::{Calls, Exit};
use crate::command::{Command, Invocation};
use crate::screen::Screen;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    CompleteEnv::with_factory(Arguments::command).var(manual::COMPLETE).complete();
    let mut screen = Screen::here();
    let invocation = Arguments::try_parse().and_then(|arguments| {
        Invocation::try_from(arguments)
            .map_err(|sentence| Arguments::command().error(ErrorKind::ValueValidation, sentence))
    });
    let invocation = match invocation {
        Ok(invocation) => invocation,
        Err(error) => senseless(&error, &mut screen),
    };
    screen.versioned = invocation.versioned;
    let exit = run(invocation, &screen).unwrap_or_else(|e| {
        screen.error(&format!("{e:#}"));
        if screen.versioned {
            screen.json_error(&show::split(&format!("{e:#}"), &[]));
        }
        Exit::Failed
    });
    ExitCode::from(exit as u8)
}

/// Reports a command line that makes no sense, or prints the help that was asked for, and ends the process.
fn senseless(error: &clap::Error, screen: &mut Screen) -> ! {
    let words: Vec<String> = std::env::args().collect();
    let asked = |words: &[String]| words == ["--output", "json"] || words.last().is_some_and(|w| w == "--output=json");
    if error.use_stderr() && words.windows(2).any(asked) {
        screen.versioned = true;
        let text = error.to_string();
        let mut paragraphs = text.split("\n\n");
        let message = paragraphs.next().unwrap_or_default().trim_start_matches("error: ").replace('\n', " ");
        screen.json_error(&ErrorBody { message, remedy: "see `tranship --help`".into(), blockers: Vec::new() });
    }
    error.exit()
}

fn run(invocation: Invocation, screen: &Screen) -> anyhow::Result<Exit> {
    let calls = Calls { client: Client::new(invocation.socket).of_node(invocation.node), screen };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot open an event queue; raise the limit of open files (`ulimit -n`)")?;
    Ok(match invocation.command {
        Command::Move { request, retry, json } => runtime.block_on(calls.begin_move(&request, retry, json)),
        Command::Plan { request, json } => runtime.block_on(calls.plan(&request, json)),
        Command::Recover { request, json } => runtime.block_on(calls.recover(&request, json)),
        Command::Cancel { name, json } => runtime.block_on(calls.cancel(&name, json)),
        Command::PlanGroup { request, json } => runtime.block_on(calls.plan_group(&request, json)),
        Command::MoveGroup { request, json } => runtime.block_on(calls.move_group(&request, json)),
        Command::Evacuate { evacuation, json } => runtime.block_on(calls.evacuate(&evacuation, json)),
        Command::Group { id, json } => runtime.block_on(calls.group(&id, json)),
        Command::FollowGroup { id, json } => runtime.block_on(calls.follow_group(&id, json)),
        Command::Containers { json } => runtime.block_on(calls.containers(json)),
        Command::UnderWay { json } => runtime.block_on(calls.under_way(json)),
        Command::Status { of, json } => runtime.block_on(calls.status(&of, json)),
        Command::Timing { of } => runtime.block_on(calls.timing(&of)),
        Command::Trace { of } => runtime.block_on(calls.trace(&of)),
        Command::Follow { of, json } => runtime.block_on(calls.follow(&of, json)),
        Command::Watch { of } => runtime.block_on(calls.watch(of.as_deref())),
        Command::History { filter, json } => runtime.block_on(calls.history(&filter, json)),
        Command::Node { json } => runtime.block_on(calls.node(json)),
        Command::Doctor { fix, json } => runtime.block_on(calls.doctor(fix, json)),
        Command::HeldAddresses { json } => runtime.block_on(calls.held_addresses(json)),
        Command::Release { container, even_if_alive, json } => {
            runtime.block_on(calls.release(&container, even_if_alive, json))
        }
        Command::Agent { arguments } => anyhow::bail!(launch::become_agent(&arguments)),
        Command::Init { dir, nodes, revoke: true, .. } => {
            Screen::print(&init::revoke(&dir, &nodes)?);
            Exit::Done
        }
        Command::Init { dir, nodes, renew, .. } => {
            Screen::print(&init::init(&dir, &nodes, renew)?);
            Exit::Done
        }
        Command::Completions(shell) => {
            Screen::print(&manual::completions(shell)?);
            Exit::Done
        }
        Command::Man { dir: None } => {
            Screen::print(&String::from_utf8_lossy(&manual::page()?));
            Exit::Done
        }
        Command::Man { dir: Some(directory) } => {
            let pages = manual::write_pages(&directory)?;
            Screen::print(&format!("{pages} pages in {}\n", directory.display()));
            Exit::Done
        }
    })
}
