//! Podman's command line: one process for each question.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Podman;
use super::parameters::is_word;
use crate::EngineError;

/// How long Podman may take for one command.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a process said, read as it says it.
fn reading(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut said = Vec::new();
        // What cannot be read was not said: the status tells whether that matters.
        let _ = stream.map(|mut stream| stream.read_to_end(&mut said));
        said
    })
}

/// The last line that Podman said.
fn last_words(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    line.trim().trim_start_matches("Error: ").to_owned()
}

/// Whether it said that it does not know the container.
pub(super) fn is_unknown(error: &EngineError) -> bool {
    matches!(error, EngineError::Refused { why, .. } if why.contains("no such container"))
}

impl Podman {
    /// Runs a command of Podman's to its end; what it printed.
    pub(super) fn run<S: AsRef<str>>(
        &self,
        arguments: &[S],
        what: &'static str,
        name: &str,
    ) -> Result<Vec<u8>, EngineError> {
        let mut command = Command::new(&self.path);
        command.args(arguments.iter().map(AsRef::as_ref)).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let unusable = |source| EngineError::Run { program: self.path.clone().into(), source };
        let mut child = command.spawn().map_err(unusable)?;
        let (output, errors) = (reading(child.stdout.take()), reading(child.stderr.take()));
        let deadline = Instant::now() + PATIENCE;
        let refused = |why| EngineError::Refused { engine: Self::NAME, what, name: name.to_owned(), why };
        let status = loop {
            match child.try_wait().map_err(unusable)? {
                Some(status) => break status,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                None => {
                    child.kill().and_then(|()| child.wait()).map_err(unusable)?;
                    let seconds = PATIENCE.as_secs();
                    return Err(refused(format!(
                        "it was not done within {seconds} s; end the command that has it locked"
                    )));
                }
            }
        };
        let [output, errors] = [output, errors].map(|said| said.join().unwrap_or_default());
        if status.success() { Ok(output) } else { Err(refused(last_words(&errors))) }
    }

    /// What a command printed, as JSON.
    pub(super) fn json<S: AsRef<str>>(
        &self,
        arguments: &[S],
        what: &'static str,
        name: &str,
    ) -> Result<Value, EngineError> {
        let text = self.run(arguments, what, name)?;
        serde_json::from_slice(&text).map_err(|e| EngineError::Unreadable {
            path: "podman's answer".into(),
            name: name.to_owned(),
            why: e.to_string(),
        })
    }

    /// A network as Podman describes it; null if there is none of this name.
    pub(super) fn network(&self, name: &str) -> Value {
        let found = self.json(&["network", "inspect", name], "show the network", name);
        found.map(|mut found| found[0].take()).unwrap_or_default()
    }

    /// A volume as Podman describes it; null if there is none of this name.
    pub(super) fn volume(&self, name: &str) -> Value {
        let found = is_word(name).then(|| self.json(&["volume", "inspect", name], "show the volume", name));
        found.and_then(Result::ok).map(|mut found| found[0].take()).unwrap_or_default()
    }

    /// The containers that have a volume of this name, whether they run or not.
    pub(super) fn users(&self, volume: &str) -> Result<Vec<String>, EngineError> {
        let filter = format!("--filter=volume={volume}");
        let rows = self.json(&["ps", "--all", "--format=json", &filter], "list the users of the volume", volume)?;
        let name = |row: &Value| Some(row["Names"][0].as_str()?.to_owned());
        Ok(rows.as_array().into_iter().flatten().filter_map(name).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn podman_s_last_words_are_plain() {
        assert_eq!(last_words(b"time=x level=warning\nError: no such container web\n"), "no such container web");
        assert_eq!(last_words(b""), "it said nothing");
    }
}
