//! Calls of Docker's HTTP API over its Unix socket. In HTTP/1.0, so that an answer is what comes until the end.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Largest answer that is read.
const ANSWER_CAP: u64 = 64 << 20;

/// An answer: the status, and what came with it (null where nothing did).
#[derive(Debug)]
pub(super) struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    /// What Docker says of a call that failed.
    pub fn message(&self) -> String {
        self.body["message"].as_str().map_or_else(|| format!("it answered {}", self.status), str::to_owned)
    }
}

/// Makes one call; `patience` is for each read, `None` for ever.
pub(super) fn call(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&Value>,
    patience: Option<Duration>,
) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    let text = body.map(Value::to_string).unwrap_or_default();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(text.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_CAP).read_to_end(&mut answer)?;
    parse(&answer).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its answer cannot be read"))
}

fn parse(answer: &[u8]) -> Option<Answer> {
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let body = &answer[end + 4..];
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(body).ok()? };
    Some(Answer { status, body })
}

/// A name as a part of a path: only what needs no escape there, which all names of containers, images and networks keep
/// to but for those that cannot exist.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-:/@".contains(&b))
        && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_its_status_and_its_json() {
        let answer = parse(b"HTTP/1.0 404 Not Found\r\nServer: x\r\n\r\n{\"message\":\"no such image\"}").unwrap();
        assert_eq!((answer.status, answer.message()), (404, "no such image".to_owned()));
        assert_eq!(parse(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap().body, Value::Null);
        assert!(parse(b"HTTP/1.0 200 OK\r\n\r\n{").is_none());
        assert!(parse(b"nonsense").is_none());
    }

    #[test]
    fn a_name_cannot_leave_its_part_of_the_path() {
        assert!(is_plain("redis") && is_plain("registry:5000/a/b@sha256:0f"));
        assert!(!is_plain("a?b") && !is_plain("../x") && !is_plain("a b") && !is_plain(""));
    }
}
