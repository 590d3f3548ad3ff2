//! Candidates of shell completion that the agent of this node knows: containers, nodes, ids.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::CompletionCandidate;
use tranship_api::{Client, ClientError, DEFAULT_SOCKET};

/// The longest time that a shell waits for candidates.
const PATIENCE: Duration = Duration::from_millis(500);

/// Names of containers of this node.
pub fn containers(typed: &OsStr) -> Vec<CompletionCandidate> {
    candidates(typed, async |client| names_of_containers(&client).await)
}

/// Names of nodes that this node knows.
pub fn nodes(typed: &OsStr) -> Vec<CompletionCandidate> {
    candidates(typed, async |client| Ok(client.peers().await?.iter().map(ToString::to_string).collect()))
}

/// Ids of moves that this node knows, newest first, and names of its containers.
pub fn ids_and_containers(typed: &OsStr) -> Vec<CompletionCandidate> {
    candidates(typed, async |client| {
        let mut names = names_of_containers(&client).await?;
        for report in client.reports().await? {
            names.push(report.id.to_string());
        }
        Ok(names)
    })
}

async fn names_of_containers(client: &Client) -> Result<Vec<String>, ClientError> {
    Ok(client.containers().await?.into_iter().map(|container| container.name).collect())
}

/// What begins as it was typed. Nothing, where the agent does not answer in time: a shell has no place for errors.
fn candidates(
    typed: &OsStr,
    question: impl AsyncFnOnce(Client) -> Result<Vec<String>, ClientError>,
) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    let socket = std::env::var_os("TRANSHIP_SOCKET").map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from);
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let names = runtime.block_on(async { tokio::time::timeout(PATIENCE, question(Client::new(socket))).await });
    let names = names.ok().and_then(Result::ok).unwrap_or_default();
    // Names of containers are chosen by others, and a shell gets them.
    let plain = |name: &String| !name.contains(|c: char| c.is_control() || c.is_whitespace());
    names.into_iter().filter(|n| n.starts_with(&*typed)).filter(plain).map(CompletionCandidate::new).collect()
}
