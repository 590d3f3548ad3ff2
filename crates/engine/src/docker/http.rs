//! Calls of Docker's HTTP API over its Unix socket. In HTTP/1.0, so that an answer is what comes until the end.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use serde_json::Value;

/// Largest answer that is read.
const ANSWER_CAP: u64 = 64 << 20;

/// Largest head of an answer.
const HEAD_CAP: u64 = 64 << 10;
/// Bytes that are read, and sent, at a time.
const PIECE: usize = 256 << 10;

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

/// A connection on which no read, no write and no wait to be accepted takes longer than `patience`. A daemon that stands still is behind a queue of
/// those that were there before, which may be full.
fn connect(path: &Path, patience: Option<Duration>) -> io::Result<UnixStream> {
    let new = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(new);
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    match socket::connect(stream.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) => Ok(stream),
        Err(nix::Error::EAGAIN) => {
            let why = format!("it has taken no connection for {:?}", patience.unwrap_or_default());
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        }
        Err(error) => Err(error.into()),
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
    // It would begin another request.
    if path.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{path:?} is no path of Docker's")));
    }
    let mut stream = connect(socket, patience)?;
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

/// Asks for something of any length, which is read as it comes.
pub(super) fn download(socket: &Path, path: &str, patience: Duration) -> io::Result<impl Read + use<>> {
    let mut stream = connect(socket, Some(patience))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n").as_bytes())?;
    let mut answer = BufReader::with_capacity(PIECE, stream);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if (&mut answer).take(HEAD_CAP).read_until(b'\n', &mut head)? == 0 || head.len() as u64 > HEAD_CAP {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its answer cannot be read"));
        }
    }
    if parse(&head).is_some_and(|answer| answer.status == 200) {
        return Ok(answer);
    }
    answer.take(ANSWER_CAP).read_to_end(&mut head)?;
    Err(io::Error::other(parse(&head).map_or_else(|| "it refused".to_owned(), |answer| answer.message())))
}

/// Sends something of any length. An end that does not come is none for Docker either.
pub(super) fn upload(socket: &Path, path: &str, body: &mut dyn Read, patience: Duration) -> io::Result<()> {
    let mut stream = connect(socket, Some(patience))?;
    let head = "Host: docker\r\nConnection: close\r\nContent-Type: application/x-tar\r\nTransfer-Encoding: chunked";
    stream.write_all(format!("POST {path} HTTP/1.1\r\n{head}\r\n\r\n").as_bytes())?;
    let mut piece = vec![0; PIECE];
    loop {
        let got = body.read(&mut piece)?;
        let sent = stream.write_all(format!("{got:x}\r\n").as_bytes());
        // If Docker has hung up, its answer says why.
        if sent.and_then(|()| stream.write_all(&piece[..got])).and_then(|()| stream.write_all(b"\r\n")).is_err()
            || got == 0
        {
            break;
        }
    }
    let mut answer = Vec::new();
    stream.take(ANSWER_CAP).read_to_end(&mut answer)?;
    // Objects that tell of progress, in pieces; or of an error, whatever the status.
    let answer = String::from_utf8_lossy(&answer);
    let objects = answer.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let error = objects.filter_map(|o| Some(o["error"].as_str().or(o["message"].as_str())?.to_owned())).next();
    error.map_or(Ok(()), |error| Err(io::Error::other(error)))
}

pub(super) fn parse(answer: &[u8]) -> Option<Answer> {
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let body = &answer[end + 4..];
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(body).ok()? };
    Some(Answer { status, body })
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::Backlog;

    use super::*;

    #[test]
    fn a_daemon_that_takes_no_connection_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("docker.sock");
        let daemon = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        socket::bind(daemon.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        socket::listen(&daemon, Backlog::new(0).unwrap()).unwrap();
        let waiting = connect(&path, Some(Duration::from_millis(10)));
        let refused = (0..4).find_map(|_| connect(&path, Some(Duration::from_millis(10))).err());
        assert!(waiting.is_ok());
        assert_eq!(refused.unwrap().kind(), io::ErrorKind::TimedOut);
        assert!(call(&path, "GET", "/info", None, Some(Duration::from_millis(10))).is_err());
    }

    #[test]
    fn an_answer_is_its_status_and_its_json() {
        let answer = parse(b"HTTP/1.0 404 Not Found\r\nServer: x\r\n\r\n{\"message\":\"no such image\"}").unwrap();
        assert_eq!((answer.status, answer.message()), (404, "no such image".to_owned()));
        assert_eq!(parse(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap().body, Value::Null);
        assert!(parse(b"HTTP/1.0 200 OK\r\n\r\n{").is_none());
        assert!(parse(b"nonsense").is_none());
    }
}
