//! Redis as the lab uses it: how it is started in a container, filled, and checked.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::process::wait_for;
use crate::resp::{Connection, Reply};
use crate::state::CLIENT;

/// The port that Redis listens on.
pub const REDIS_PORT: u16 = 6379;

/// What runs in a container that is a Redis without persistence, whose data can be filled and checked.
pub fn redis_command() -> Vec<String> {
    let port = REDIS_PORT.to_string();
    let arguments = [
        "redis-server",
        "--port",
        &port,
        "--bind",
        "0.0.0.0",
        "--protected-mode",
        "no",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        "/tmp",
        "--enable-debug-command",
        "yes",
        "--io-threads",
        "1",
    ];
    arguments.map(str::to_owned).to_vec()
}

/// A connection from the client node to a Redis in the lab.
#[derive(Debug)]
pub struct Redis {
    connection: Connection<TcpStream>,
    address: SocketAddr,
}

impl Redis {
    /// Connects, waiting up to `limit` until the server answers.
    ///
    /// # Errors
    /// If it does not.
    pub fn connect(lab: &Lab, ip: Ipv4Addr, limit: Duration) -> Result<Self> {
        let address = SocketAddr::from((ip, REDIS_PORT));
        let mut last = None;
        let connected = wait_for(limit, || {
            let attempt = || {
                let stream = lab.connect(CLIENT, address, Duration::from_secs(2))?;
                let mut redis = Self { connection: Connection::new(stream), address };
                redis.call(&["PING"]).map(|_| redis)
            };
            attempt().map_err(|e| last = Some(e)).ok()
        });
        connected.ok_or_else(|| {
            let why = last.map(|e| e.to_string()).unwrap_or_default();
            LabError::Deadline {
                what: format!("Redis at {address} did not answer"),
                seconds: limit.as_secs(),
                detail: format!(": {why}"),
            }
        })
    }

    /// Sends a command and waits for its reply; an error reply is an error.
    ///
    /// # Errors
    /// If the connection fails or Redis refuses.
    pub fn call<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Result<Reply> {
        let failed = |source| LabError::Connection { node: CLIENT.into(), address: self.address.to_string(), source };
        match self.connection.call(arguments).map_err(failed)? {
            Reply::Error(text) => {
                let command = arguments.first().map(|a| String::from_utf8_lossy(a.as_ref()).into_owned());
                Err(LabError::Refused(format!(
                    "Redis at {} refused {}: {text}",
                    self.address,
                    command.unwrap_or_default()
                )))
            }
            reply => Ok(reply),
        }
    }

    /// How many keys there are.
    ///
    /// # Errors
    /// As `call`.
    pub fn keys(&mut self) -> Result<u64> {
        match self.call(&["DBSIZE"])? {
            Reply::Integer(n) if n >= 0 => Ok(n.unsigned_abs()),
            other => Err(self.unexpected("DBSIZE", &other)),
        }
    }

    /// Makes keys `PREFIX:0` … `PREFIX:COUNT-1` with values of `size` bytes; those that exist stay as they are.
    ///
    /// # Errors
    /// As `call`.
    pub fn populate(&mut self, count: u64, prefix: &str, size: u32) -> Result<()> {
        self.call(&["DEBUG", "POPULATE", &count.to_string(), prefix, &size.to_string()]).map(drop)
    }

    /// How much memory Redis occupies, in bytes.
    ///
    /// # Errors
    /// As `call`.
    pub fn resident_bytes(&mut self) -> Result<u64> {
        let text = self.info("used_memory_rss")?;
        text.parse().map_err(|_| LabError::Refused(format!("used_memory_rss is not a number: {text}")))
    }

    /// A field of what `INFO everything` tells, e.g. `sync_full`.
    ///
    /// # Errors
    /// As `call`, and if there is no such field.
    pub fn info(&mut self, field: &str) -> Result<String> {
        let reply = self.call(&["INFO", "everything"])?;
        let Reply::Bulk(Some(text)) = &reply else { return Err(self.unexpected("INFO", &reply)) };
        let text = String::from_utf8_lossy(text);
        let found = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        found
            .map(|value| value.trim().to_owned())
            .ok_or_else(|| self.unexpected(&format!("INFO without {field}"), &reply))
    }

    /// A checksum of all keys and values (`DEBUG DIGEST`), 40 hexadecimal digits.
    ///
    /// # Errors
    /// As `call`.
    pub fn digest(&mut self) -> Result<String> {
        match self.call(&["DEBUG", "DIGEST"])? {
            Reply::Simple(digest) => Ok(digest),
            other => Err(self.unexpected("DEBUG DIGEST", &other)),
        }
    }

    /// Number of keys and checksum without the key that a counter counts in, which is put aside for the moment. The
    /// counter must be paused.
    ///
    /// # Errors
    /// As `call`.
    pub fn verify_without(&mut self, counter: &str) -> Result<(u64, String)> {
        let value = self.call(&["GET", counter])?;
        self.call(&["DEL", counter])?;
        let found = self.keys().and_then(|keys| Ok((keys, self.digest()?)));
        if let Reply::Bulk(Some(value)) = value {
            self.call(&[b"SET".as_slice(), counter.as_bytes(), &value])?;
        }
        found
    }

    fn unexpected(&self, command: &str, reply: &Reply) -> LabError {
        let source = io::Error::new(io::ErrorKind::InvalidData, format!("unexpected reply to {command}: {reply:?}"));
        LabError::Connection { node: CLIENT.into(), address: self.address.to_string(), source }
    }
}
