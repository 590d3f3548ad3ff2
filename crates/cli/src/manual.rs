//! `tranship man` and `tranship completions`: what is generated from the definition of the command line.

use std::io;
use std::path::Path;

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::env::Shells;
use clap_mangen::Man;

use crate::args::Arguments;

/// The variable that asks this program for candidates of completion.
pub const COMPLETE: &str = "TRANSHIP_COMPLETE";

/// The manual page of the program, in roff.
pub fn page() -> io::Result<Vec<u8>> {
    render(definition())
}

/// Writes a page for the program and one for each command to a directory; returns how many.
pub fn write_pages(directory: &Path) -> anyhow::Result<usize> {
    let write = |command: Command| {
        let path = directory.join(format!("{}.1", command.get_name()));
        render(command)
            .and_then(|page| std::fs::write(&path, page))
            .with_context(|| format!("cannot write {}; check that its directory exists and has space", path.display()))
    };
    let definition = definition();
    let commands: Vec<Command> = definition.get_subcommands().filter(|c| c.get_name() != "help").cloned().collect();
    write(definition)?;
    for command in &commands {
        let name: &'static str = Box::leak(format!("tranship-{}", command.get_name()).into_boxed_str());
        write(command.clone().name(name))?;
    }
    Ok(commands.len() + 1)
}

/// The script that makes a shell ask this program for candidates.
pub fn completions(shell: Shell) -> anyhow::Result<String> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&name).with_context(|| format!("there is no completion for {name}; use bash"))?;
    let mut script = Vec::new();
    completer.write_registration(COMPLETE, "tranship", "tranship", "tranship", &mut script)?;
    Ok(String::from_utf8_lossy(&script).into_owned())
}

fn definition() -> Command {
    let mut definition = Arguments::command();
    definition.build();
    definition
}

fn render(command: Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_with_its_options() {
        let directory = tempfile::tempdir().unwrap();
        let written = write_pages(directory.path()).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), written);
        let page = std::fs::read_to_string(directory.path().join("tranship-move.1")).unwrap();
        assert!(page.contains("freeze\\-timeout") && page.contains("tranship move redis"), "{page}");
        assert!(String::from_utf8(self::page().unwrap()).unwrap().contains("evacuate"));
        let error = write_pages(Path::new("/no/such/directory")).unwrap_err();
        assert!(error.to_string().contains("/no/such/directory"), "{error}");
    }

    #[test]
    fn shells_ask_the_program_for_candidates() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = completions(shell).unwrap();
            assert!(script.contains(COMPLETE), "{shell}: {script}");
        }
    }
}
