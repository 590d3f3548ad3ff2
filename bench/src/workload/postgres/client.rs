use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::{CLIENT, Lab};

use crate::workload::ADDRESS;

const PORT: u16 = 5432;
const PATIENCE: Duration = Duration::from_secs(300);
const MOST_BYTES: usize = 1 << 20;

/// A connection from the client node to the database, by PostgreSQL's protocol 3.0 (its manual, chapter "Frontend/Backend
/// Protocol"): one simple query at a time, without a password.
pub struct Client(TcpStream);

impl Client {
    /// Connects, waiting until the database takes connections.
    pub fn connect(lab: &Lab, limit: Duration) -> Result<Self> {
        let deadline = Instant::now() + limit;
        loop {
            match Self::attempt(lab) {
                Ok(client) => return Ok(client),
                Err(e) if Instant::now() >= deadline => return Err(e.context("the database does not answer")),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn attempt(lab: &Lab) -> Result<Self> {
        let stream = lab.connect(CLIENT, (ADDRESS, PORT).into(), Duration::from_secs(2))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut client = Self(stream);
        let parameters = b"user\0postgres\0database\0postgres\0\0";
        let mut startup = (8 + parameters.len() as u32).to_be_bytes().to_vec();
        startup.extend(0x0003_0000u32.to_be_bytes());
        startup.extend(parameters);
        client.0.write_all(&startup)?;
        client.until_ready()?;
        Ok(client)
    }

    /// Has a query carried out; returns the first column of the last row, if there is one and it is not null.
    pub fn query(&mut self, sql: &str) -> Result<Option<String>> {
        let mut message = vec![b'Q'];
        message.extend((4 + sql.len() as u32 + 1).to_be_bytes());
        message.extend(sql.as_bytes());
        message.push(0);
        self.0.write_all(&message).context("sending a query failed")?;
        self.until_ready().with_context(|| format!("the query {sql}"))
    }

    fn until_ready(&mut self) -> Result<Option<String>> {
        let (mut value, mut error) = (None, None);
        loop {
            let mut head = [0; 5];
            self.0.read_exact(&mut head).context("no answer")?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            if !(4..=MOST_BYTES).contains(&length) {
                bail!("the database sent a message of {length} bytes");
            }
            let mut body = vec![0; length - 4];
            self.0.read_exact(&mut body).context("half an answer")?;
            match head[0] {
                b'D' => value = first_column(&body),
                b'E' => error = Some(fields(&body)),
                b'R' if body != [0; 4] => bail!("the database wants a password"),
                b'Z' => match error {
                    Some(text) => bail!("the database refused: {text}"),
                    None => return Ok(value),
                },
                _ => {}
            }
            // At the start an error is the end; there is no "ready" after it.
            if let (b'E', Some(text)) = (head[0], &error)
                && text.contains("FATAL")
            {
                bail!("the database refused: {text}");
            }
        }
    }
}

/// The first column of a data row, as text.
fn first_column(body: &[u8]) -> Option<String> {
    let length = i32::from_be_bytes(body.get(2..6)?.try_into().ok()?);
    let bytes = body.get(6..6 + usize::try_from(length).ok()?)?;
    Some(String::from_utf8_lossy(bytes).into_owned())
}

/// The texts of an error message.
fn fields(body: &[u8]) -> String {
    let texts = body.split(|byte| *byte == 0).filter(|f| matches!(f.first(), Some(b'S' | b'M')));
    texts.map(|f| String::from_utf8_lossy(&f[1..]).into_owned()).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_column_is_read_where_there_is_one() {
        assert_eq!(first_column(b"\x00\x01\x00\x00\x00\x0242"), Some("42".into()));
        assert_eq!(first_column(b"\x00\x01\xff\xff\xff\xff"), None);
        assert_eq!(first_column(b"\x00\x00"), None);
        assert_eq!(first_column(b"\x00\x01\x00\x00\x00\x0942"), None);
    }

    #[test]
    fn an_error_tells_severity_and_message() {
        assert_eq!(
            fields(b"SFATAL\0C57P03\0Mthe database system is starting up\0\0"),
            "FATAL: the database system is starting up"
        );
    }
}
