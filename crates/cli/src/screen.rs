//! What is known of the streams that we write to.

use std::io::{IsTerminal, Write};

use jiff::tz::TimeZone;
use serde::Serialize;
use tranship_api::{ApiError, ErrorBody};
use tranship_types::escaped;

/// Where output goes, found out once.
#[derive(Debug, Clone)]
pub struct Screen {
    /// Colours of stdout.
    pub out: Paint,
    /// Colours of stderr.
    pub err: Paint,
    /// Whether people watch stdout.
    pub out_is_terminal: bool,
    /// Whether people watch stderr.
    pub err_is_terminal: bool,
    /// In which zone times are shown.
    pub zone: TimeZone,
    /// Whether JSON has the version of its schema around it.
    pub versioned: bool,
}

/// The version of the schema of `--output json`. It changes where a field is renamed or removed, or gets another meaning.
const SCHEMA_VERSION: u32 = 1;

/// What `--output json` prints.
#[derive(Debug, Serialize)]
struct Envelope<'a, T> {
    schema_version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a ErrorBody>,
}

impl Screen {
    /// The process's own.
    pub fn here() -> Self {
        let (out, err) = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self {
            out: Paint(out && wanted),
            err: Paint(err && wanted),
            out_is_terminal: out,
            err_is_terminal: err,
            zone: TimeZone::system(),
            versioned: false,
        }
    }

    /// Prints an answer as a line of JSON.
    pub fn json<T: Serialize>(&self, answer: &T) {
        self.json_of(answer, None);
    }

    /// Prints an answer as a line of JSON; beside it, where JSON has its version, the error that it is about.
    pub fn json_of<T: Serialize>(&self, answer: &T, error: Option<&ErrorBody>) {
        match self.versioned {
            true => line_of_json(&Envelope { schema_version: SCHEMA_VERSION, data: Some(answer), error }),
            false => line_of_json(answer),
        }
    }

    /// Prints an error as a line of JSON.
    pub fn json_error(&self, error: &ErrorBody) {
        match self.versioned {
            true => line_of_json(&Envelope::<()> { schema_version: SCHEMA_VERSION, data: None, error: Some(error) }),
            false => line_of_json(&ApiError { error: error.clone() }),
        }
    }

    /// Prints on stdout. That nobody reads any more is no error: what was asked for has been done all the same.
    pub fn print(text: &str) {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// Prints on stderr: `error: SENTENCE`, its lines below each other, all else that a terminal obeys escaped.
    pub fn error(&self, sentence: &str) {
        let lines: Vec<String> = sentence.lines().map(escaped).collect();
        Self::tell(&format!("{} {}\n", self.err.bad("error:"), lines.join("\n")));
    }

    /// Prints on stderr.
    pub fn tell(text: &str) {
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

fn line_of_json<T: Serialize>(value: &T) {
    match serde_json::to_string(value) {
        Ok(line) => Screen::print(&(line + "\n")),
        Err(e) => Screen::tell(&format!("error: the answer cannot be written as JSON: {e}; report this as a bug\n")),
    }
}

/// Colours, or none.
#[derive(Debug, Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    fn wrap(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn good(self, text: &str) -> String {
        self.wrap("32;1", text)
    }

    pub fn bad(self, text: &str) -> String {
        self.wrap("31;1", text)
    }

    pub fn strong(self, text: &str) -> String {
        self.wrap("1", text)
    }
}
