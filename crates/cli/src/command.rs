//! What is to be done: the command line after it was judged. What is here makes sense.

use std::ffi::OsString;
use std::path::PathBuf;

use clap_complete::Shell;
use tranship_api::MoveRequest;
use tranship_types::{MigrationId, Mode, NodeName};

use crate::args::{self, Arguments, Call, ModeName};

/// A sensible command line.
#[derive(Debug)]
pub struct Invocation {
    /// The agent's socket.
    pub socket: PathBuf,
    /// What to do.
    pub command: Command,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub enum Command {
    Move { request: MoveRequest, json: bool },
    Containers { json: bool },
    UnderWay { json: bool },
    Status { id: MigrationId, json: bool },
    Follow { id: MigrationId, json: bool },
    History { json: bool },
    Node { json: bool },
    Agent { arguments: Vec<OsString> },
    Init { dir: PathBuf, nodes: Vec<NodeName>, renew: bool },
    Completions(Shell),
}

impl TryFrom<Arguments> for Invocation {
    /// Why it makes no sense, in one sentence.
    type Error = String;

    fn try_from(arguments: Arguments) -> Result<Self, String> {
        let command = match arguments.call {
            Call::Move(m) => {
                let json = m.json;
                Command::Move { request: request(m)?, json }
            }
            Call::Ls(a) => Command::Containers { json: a.json },
            Call::Status(args::Status { id: None, json, .. }) => Command::UnderWay { json },
            Call::Status(args::Status { id: Some(id), follow, json }) => {
                let id = id.parse().map_err(|e| format!("{e}; see `tranship history` for the ids that there are"))?;
                if follow { Command::Follow { id, json } } else { Command::Status { id, json } }
            }
            Call::History(a) => Command::History { json: a.json },
            Call::Node(a) => Command::Node { json: a.json },
            Call::Agent(a) => Command::Agent { arguments: a.arguments },
            Call::Init(a) => Command::Init { dir: a.dir, nodes: nodes(&a.nodes)?, renew: a.renew },
            Call::Completions { shell } => Command::Completions(shell),
        };
        Ok(Self { socket: arguments.socket, command })
    }
}

fn request(m: args::Move) -> Result<MoveRequest, String> {
    if m.name.is_empty() || m.name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) {
        return Err(format!("container name {:?} is not usable: no container has it; see `tranship ls`", m.name));
    }
    let mode = match m.mode {
        ModeName::Cold => Mode::Cold,
        ModeName::Precopy => Mode::Precopy,
    };
    let (blackout_budget_ms, max_rounds) = (m.blackout_budget, m.max_rounds);
    Ok(MoveRequest { container: m.name, to: node(&m.to)?, mode, dry_run: m.dry_run, blackout_budget_ms, max_rounds })
}

fn node(name: &str) -> Result<NodeName, String> {
    name.parse().map_err(|e| format!("{e}"))
}

fn nodes(names: &[String]) -> Result<Vec<NodeName>, String> {
    let mut nodes: Vec<NodeName> = Vec::new();
    for name in names {
        let name = node(name)?;
        if nodes.contains(&name) {
            return Err(format!("node {name} is named twice; each node has one certificate"));
        }
        nodes.push(name);
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    fn parse(line: &str) -> Result<Command, String> {
        let arguments = Arguments::try_parse_from(line.split(' ')).map_err(|e| e.to_string())?;
        Invocation::try_from(arguments).map(|i| i.command)
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_move_is_understood() {
        let expected = MoveRequest { dry_run: true, ..MoveRequest::new("redis", "b".parse().unwrap()) };
        let command = parse("tranship move redis --to b --mode cold --dry-run").unwrap();
        assert_eq!(command, Command::Move { request: expected, json: false });
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_words() {
        for (line, word) in [
            ("tranship move redis", "--to"),
            ("tranship move redis --to ../b", "node name \"../b\" is not usable"),
            ("tranship move a/b --to b", "container name"),
            ("tranship move redis --to b --mode warm", "warm"),
            ("tranship status ../etc", "migration id"),
            ("tranship status --follow", "<ID>"),
            ("tranship init --node a b a", "twice"),
            ("tranship init", "--node"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn the_agent_gets_its_arguments_untouched() {
        let command = parse("tranship agent --config x.toml --help").unwrap();
        assert_eq!(command, Command::Agent { arguments: ["--config", "x.toml", "--help"].map(Into::into).into() });
    }
}
