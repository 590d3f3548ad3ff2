//! Podman's command line: one process for each question.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::Value;
use tranship_sys::launch::{Program, Started, Stream, ended, reading};

use super::Podman;
use super::parameters::is_word;
use crate::EngineError;

/// How long Podman may take for one command.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to pack or unpack a part of an image.
const UNPACK: Duration = Duration::from_secs(600);
/// Bytes of an archive that are handed over at a time.
const PIECE: usize = 256 << 10;

/// A pipe to or from Podman that nobody waits for without end.
struct Patient<P>(P);

impl<P: AsFd> Patient<P> {
    fn await_ready(&self, events: PollFlags) -> io::Result<()> {
        let limit = PollTimeout::try_from(UNPACK).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.0.as_fd(), events)], limit)? {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "it hangs; end the command that has it locked")),
            _ => Ok(()),
        }
    }
}

impl<P: AsFd + Read> Read for Patient<P> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.await_ready(PollFlags::POLLIN)?;
        self.0.read(into)
    }
}

impl<P: AsFd + Write> Write for Patient<P> {
    /// At most what a pipe that is ready takes at once.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.await_ready(PollFlags::POLLOUT)?;
        self.0.write(&bytes[..bytes.len().min(nix::libc::PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The last line that Podman said; of an archive that it could not load, what was wrong with it as the archive that it is (it tries
/// others, too, and says of each that it is none).
fn last_words(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let archive = text.lines().find_map(|line| line.trim_start().strip_prefix("* docker-archive: "));
    if let Some(words) = archive {
        return words.trim().to_owned();
    }
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
        self.run_in(&[], PATIENCE, arguments, what, name)
    }

    /// The same with more in its environment, and with this patience.
    pub(super) fn run_in<S: AsRef<str>>(
        &self,
        environment: &[(&str, &OsStr)],
        patience: Duration,
        arguments: &[S],
        what: &'static str,
        name: &str,
    ) -> Result<Vec<u8>, EngineError> {
        let mut child = self.begin(environment, arguments, Stream::Null, Stream::Piped)?;
        let output = reading(&mut child, |child| child.stdout.take()).map_err(|source| self.unusable(source))?;
        self.conclude(&mut child, patience, what, name)?;
        Ok(output.said())
    }

    /// Runs a command whose output `take` reads as it comes.
    pub(super) fn give_out(
        &self,
        arguments: &[&str],
        what: &'static str,
        name: &str,
        take: &mut dyn FnMut(&mut dyn Read) -> io::Result<()>,
    ) -> Result<(), EngineError> {
        let mut child = self.begin(&[], arguments, Stream::Null, Stream::Piped)?;
        let mut output = child.stdout.take().map(Patient);
        let taken = output.as_mut().map_or(Ok(()), |output| {
            take(output)?;
            // What follows the archive's end is padding.
            io::copy(output, &mut io::sink()).map(drop)
        });
        // One that still writes ends for want of a reader.
        drop(output);
        let concluded = self.conclude(&mut child, PATIENCE, what, name);
        taken.map_err(|error| Self::refused(what, name, error.to_string()))?;
        concluded
    }

    /// Runs a command whose input comes from `source`. Where that breaks, so does the input, and Podman gives up what it has.
    pub(super) fn take_in(
        &self,
        arguments: &[&str],
        what: &'static str,
        name: &str,
        source: &mut dyn Read,
    ) -> Result<(), EngineError> {
        let mut child = self.begin(&[], arguments, Stream::Piped, Stream::Null)?;
        let mut input = child.stdin.take().map(Patient);
        let mut piece = vec![0; PIECE];
        let given = loop {
            match source.read(&mut piece) {
                Ok(0) => break Ok(()),
                // If Podman has hung up, its last words say why.
                Ok(got) if input.as_mut().is_some_and(|input| input.write_all(&piece[..got]).is_err()) => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        drop(input);
        let concluded = self.conclude(&mut child, UNPACK, what, name);
        given.map_err(|error| Self::refused(what, name, error.to_string()))?;
        concluded
    }

    fn begin<S: AsRef<str>>(
        &self,
        environment: &[(&str, &OsStr)],
        arguments: &[S],
        input: Stream,
        output: Stream,
    ) -> Result<Started, EngineError> {
        let mut command = Program::new(&self.path);
        command.envs(environment.iter().copied());
        command.args(arguments.iter().map(AsRef::as_ref)).current_dir("/");
        command.stdin(input).stdout(output).stderr(Stream::Piped);
        command.with_usual_umask().spawn().map_err(|source| self.unusable(source))
    }

    /// Waits for a command's end; an error, with its last words, if that is none.
    fn conclude(
        &self,
        child: &mut Started,
        patience: Duration,
        what: &'static str,
        name: &str,
    ) -> Result<(), EngineError> {
        let errors = reading(child, |child| child.stderr.take()).map_err(|source| self.unusable(source))?;
        let status = ended(child, patience).map_err(|source| self.unusable(source))?;
        let Some(status) = status else {
            let seconds = patience.as_secs();
            let why = format!("it was not done within {seconds} s; end the command that has it locked");
            return Err(Self::refused(what, name, why));
        };
        let errors = errors.said();
        if status.success() { Ok(()) } else { Err(Self::refused(what, name, last_words(&errors))) }
    }

    fn unusable(&self, source: io::Error) -> EngineError {
        EngineError::Run { program: self.path.clone().into(), source }
    }

    fn refused(what: &'static str, name: &str, why: String) -> EngineError {
        EngineError::Refused { engine: Self::NAME, what, name: name.to_owned(), why }
    }

    /// What a command printed, as JSON.
    pub(super) fn json<S: AsRef<str>>(
        &self,
        arguments: &[S],
        what: &'static str,
        name: &str,
    ) -> Result<Value, EngineError> {
        self.json_within(PATIENCE, arguments, what, name)
    }

    pub(super) fn json_within<S: AsRef<str>>(
        &self,
        patience: Duration,
        arguments: &[S],
        what: &'static str,
        name: &str,
    ) -> Result<Value, EngineError> {
        let text = self.run_in(&[], patience, arguments, what, name)?;
        serde_json::from_slice(&text).map_err(|e| EngineError::Unreadable {
            path: "podman's answer".into(),
            name: name.to_owned(),
            why: e.to_string(),
        })
    }

    /// Podman's descriptions of all containers but those whose restore is under way.
    pub(super) fn all_described(&self) -> Result<Vec<Value>, EngineError> {
        self.all_described_within(PATIENCE)
    }

    /// The same, where each of the commands may take so long.
    pub(super) fn all_described_within(&self, patience: Duration) -> Result<Vec<Value>, EngineError> {
        let mut found = Vec::new();
        for rows in self.rows(patience)? {
            let ids: Vec<&str> = rows.as_array().into_iter().flatten().filter_map(|row| row["Id"].as_str()).collect();
            if ids.is_empty() {
                continue;
            }
            let arguments = [&["container", "inspect"], ids.as_slice()].concat();
            let described = match self.json_within(patience, &arguments, "show the containers", "") {
                // One of them has gone meanwhile.
                Err(error) if is_unknown(&error) => {
                    let one = |id: &&str| self.json_within(patience, &["container", "inspect", id], "show", id).ok();
                    ids.iter().filter_map(one).filter_map(|mut one| Some(one.get_mut(0)?.take())).collect()
                }
                other => other?.as_array().cloned().unwrap_or_default(),
            };
            found.extend(described);
        }
        Ok(found)
    }

    /// Podman's lists of its containers, but for those whose restore is under way: while one is, it is locked.
    pub(super) fn rows(&self, patience: Duration) -> Result<Vec<Value>, EngineError> {
        let arriving = Self::arriving();
        let ids: Vec<&str> = arriving.iter().filter_map(|container| container["Id"].as_str()).collect();
        // Those that are older than the first that is locked, those between it and the next …
        let between = |after: usize| {
            let bound = |word: &str, id: Option<&&str>| id.map(|id| format!("--filter={word}={id}"));
            let before = bound("before", ids.get(after));
            let since = bound("since", after.checked_sub(1).and_then(|at| ids.get(at)));
            let mut arguments: Vec<String> = ["ps", "--all", "--no-trunc", "--format=json"].map(str::to_owned).to_vec();
            arguments.extend(since.into_iter().chain(before));
            self.json_within(patience, &arguments, "list containers in", "")
        };
        (0..=ids.len()).map(between).collect()
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

    /// An image as Podman describes it; null if there is none of this name or id.
    pub(super) fn image_of(&self, name: &str) -> Value {
        let found = is_word(name).then(|| self.json(&["image", "inspect", name], "show the image", name));
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
        let formats = b"Error: payload does not match any of them:\n * oci: no such file\n * docker-archive: no space left\n * dir: no directory\n";
        assert_eq!(last_words(formats), "no space left");
    }
}
