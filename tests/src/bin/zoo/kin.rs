use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Pid;

use crate::raw;

/// What a kin answers to one question.
pub type Answer = Box<dyn FnMut(&str) -> Result<String>>;

/// A process that an animal has forked and asks questions, one line each.
pub struct Kin {
    pub pid: Pid,
    ask: UnixStream,
    hear: BufReader<UnixStream>,
}

impl Kin {
    /// Forks; the child runs `prepare` and then answers questions until its parent is gone.
    pub fn fork(prepare: impl FnOnce() -> Result<Answer>) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        // A wait of no end would hide a child that is gone; a move takes less than this.
        ours.set_read_timeout(Some(Duration::from_secs(60)))?;
        let pid = raw::fork(|| {
            let served = (|| {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
                serve(&theirs, prepare())
            })();
            i32::from(served.is_err())
        })?;
        let mut kin = Self { pid, hear: BufReader::new(ours.try_clone()?), ask: ours };
        kin.hear().context("setting up the child process")?;
        Ok(kin)
    }

    /// Asks one question and waits for the answer.
    pub fn ask(&mut self, question: &str) -> Result<String> {
        self.ask.write_all(format!("{question}\n").as_bytes())?;
        self.hear()
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        self.hear.read_line(&mut line).with_context(|| format!("no answer from child process {}", self.pid))?;
        ensure!(line.ends_with('\n'), "child process {} is gone", self.pid);
        match line.trim_end_matches('\n').split_once(' ') {
            Some(("ok", text)) => Ok(text.to_owned()),
            Some((_, text)) => bail!("child process {}: {text}", self.pid),
            None => bail!("child process {} said {line:?}", self.pid),
        }
    }
}

fn serve(stream: &UnixStream, prepared: Result<Answer>) -> Result<()> {
    let tell = |result: Result<String>| {
        let line = match result {
            Ok(text) => format!("ok {text}\n"),
            Err(error) => format!("no {}\n", format!("{error:#}").replace('\n', " ")),
        };
        (&mut &*stream).write_all(line.as_bytes())
    };
    let mut answer = match prepared {
        Ok(answer) => answer,
        Err(error) => {
            tell(Err(error))?;
            return Ok(());
        }
    };
    tell(Ok(String::new()))?;
    for question in BufReader::new(stream).lines() {
        tell(answer(&question?))?;
    }
    Ok(())
}
