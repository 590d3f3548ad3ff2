//! `tranship`: the command line. It talks to this node's agent and to nothing else. A library for the fuzz targets' sake.

mod args;
mod calls;
mod command;
mod follow;
pub mod fuzz;
mod group;
mod init;
mod launch;
mod plain;
mod progress;
mod screen;
mod show;
mod units;

use std::process::ExitCode;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use tranship_api::Client;

use crate::args::Arguments;
use crate::calls::{Calls, Exit};
use crate::command::{Command, Invocation};
use crate::screen::Screen;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let invocation = match Invocation::try_from(Arguments::parse()) {
        Ok(invocation) => invocation,
        Err(sentence) => Arguments::command().error(ErrorKind::ValueValidation, sentence).exit(),
    };
    let screen = Screen::here();
    let exit = run(invocation, &screen).unwrap_or_else(|e| {
        screen.error(&format!("{e:#}"));
        Exit::Failed
    });
    ExitCode::from(exit as u8)
}

fn run(invocation: Invocation, screen: &Screen) -> anyhow::Result<Exit> {
    let calls = Calls { client: Client::new(invocation.socket), screen };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot open an event queue; raise the limit of open files (`ulimit -n`)")?;
    Ok(match invocation.command {
        Command::Move { request, json } => runtime.block_on(calls.begin_move(&request, json)),
        Command::Plan { request, json } => runtime.block_on(calls.plan(&request, json)),
        Command::Recover { request, json } => runtime.block_on(calls.recover(&request, json)),
        Command::Cancel { name, json } => runtime.block_on(calls.cancel(&name, json)),
        Command::PlanGroup { request, json } => runtime.block_on(calls.plan_group(&request, json)),
        Command::MoveGroup { request, json } => runtime.block_on(calls.move_group(&request, json)),
        Command::Group { id, json } => runtime.block_on(calls.group(&id, json)),
        Command::FollowGroup { id, json } => runtime.block_on(calls.follow_group(&id, json)),
        Command::Containers { json } => runtime.block_on(calls.containers(json)),
        Command::UnderWay { json } => runtime.block_on(calls.under_way(json)),
        Command::Status { id, json } => runtime.block_on(calls.status(&id, json)),
        Command::Timing { id } => runtime.block_on(calls.timing(&id)),
        Command::Trace { id } => runtime.block_on(calls.trace(&id)),
        Command::Follow { id, json } => runtime.block_on(calls.follow(&id, json)),
        Command::History { json } => runtime.block_on(calls.history(json)),
        Command::Node { json } => runtime.block_on(calls.node(json)),
        Command::Doctor { fix, json } => runtime.block_on(calls.doctor(fix, json)),
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
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tranship", &mut script);
            Screen::print(&String::from_utf8_lossy(&script));
            Exit::Done
        }
    })
}
