//! Redis's protocol (RESP 2), as much of it as a client needs that checks what it gets.

use std::io::{self, Read, Write};

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// `+OK`.
    Simple(String),
    /// `-ERR …`.
    Error(String),
    /// `:7`.
    Integer(i64),
    /// `$5 hello`; `None` for the null that stands for "no such thing".
    Bulk(Option<Vec<u8>>),
    /// `*2 …`; `None` for null.
    Array(Option<Vec<Reply>>),
}

/// Longest reply in bytes that is accepted.
const MOST_BYTES: usize = 64 << 20;
const MOST_ELEMENTS: usize = 1 << 20;
const MOST_DEPTH: usize = 8;

/// What is wrong with bytes that are no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the server sent something that is not Redis's protocol: {0}")]
pub struct Malformed(&'static str);

/// Reads one reply from the beginning of `bytes`: the reply and its length in bytes, or `None` if more bytes are needed.
///
/// # Errors
/// If no further bytes can make it a reply.
pub fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, Malformed> {
    parse_nested(bytes, 0)
}

fn parse_nested(bytes: &[u8], depth: usize) -> Result<Option<(Reply, usize)>, Malformed> {
    let Some(kind) = bytes.first() else { return Ok(None) };
    if !b"+-:$*".contains(kind) {
        return Err(Malformed("unknown kind of reply"));
    }
    let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") else {
        return if bytes.len() > 64 * 1024 { Err(Malformed("endless line")) } else { Ok(None) };
    };
    let line = std::str::from_utf8(&bytes[1..end]).map_err(|_| Malformed("line is not text"))?;
    let number = || line.parse::<i64>().map_err(|_| Malformed("not a number"));
    let after = end + 2;
    Ok(match kind {
        b'+' => Some((Reply::Simple(line.to_owned()), after)),
        b'-' => Some((Reply::Error(line.to_owned()), after)),
        b':' => Some((Reply::Integer(number()?), after)),
        b'$' => match number()? {
            -1 => Some((Reply::Bulk(None), after)),
            length => {
                let length = usize::try_from(length).ok().filter(|n| *n <= MOST_BYTES);
                let length = length.ok_or(Malformed("impossible length"))?;
                match bytes.get(after..after + length + 2) {
                    None => None,
                    Some(body) if body.ends_with(b"\r\n") => {
                        Some((Reply::Bulk(Some(body[..length].to_vec())), after + length + 2))
                    }
                    Some(_) => return Err(Malformed("text is longer than it says")),
                }
            }
        },
        _ => match number()? {
            -1 => Some((Reply::Array(None), after)),
            count => {
                let count = usize::try_from(count).ok().filter(|n| *n <= MOST_ELEMENTS && depth < MOST_DEPTH);
                let count = count.ok_or(Malformed("impossible array"))?;
                let (mut elements, mut at) = (Vec::new(), after);
                for _ in 0..count {
                    let Some((element, length)) = parse_nested(&bytes[at..], depth + 1)? else { return Ok(None) };
                    elements.push(element);
                    at += length;
                }
                Some((Reply::Array(Some(elements)), at))
            }
        },
    })
}

/// The bytes of a command.
pub fn encode<S: AsRef<[u8]>>(arguments: &[S]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments.iter().map(AsRef::as_ref) {
        bytes.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
        bytes.extend_from_slice(argument);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// A connection that sends one command at a time and reads its reply.
#[derive(Debug)]
pub struct Connection<S> {
    stream: S,
    pending: Vec<u8>,
}

impl<S: Read + Write> Connection<S> {
    /// Speaks over `stream`.
    pub fn new(stream: S) -> Self {
        Self { stream, pending: Vec::new() }
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    /// If the connection fails, or the server's answer is no reply. An error reply is `Reply::Error`.
    pub fn call<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> io::Result<Reply> {
        self.send(arguments)?;
        loop {
            if let Some(reply) = self.receive()? {
                return Ok(reply);
            }
        }
    }

    /// Sends a command without waiting.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn send<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> io::Result<()> {
        self.stream.write_all(&encode(arguments))
    }

    /// Reads from the connection once, unless a reply is there already; `None` if it is still incomplete.
    ///
    /// # Errors
    /// If the connection fails or is closed (`UnexpectedEof`), or its read timeout passes.
    pub fn receive(&mut self) -> io::Result<Option<Reply>> {
        if let Some(reply) = self.take()? {
            return Ok(Some(reply));
        }
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
            length => {
                self.pending.extend_from_slice(&buffer[..length]);
                self.take()
            }
        }
    }

    fn take(&mut self) -> io::Result<Option<Reply>> {
        let parsed = parse(&self.pending).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(parsed.map(|(reply, length)| {
            self.pending.drain(..length);
            reply
        }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_kind_of_reply_is_read() {
        let bytes = b"*5\r\n+OK\r\n-ERR no\r\n:-7\r\n$5\r\nhe\r\no\r\n$-1\r\nrest";
        let expected = vec![
            Reply::Simple("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Integer(-7),
            Reply::Bulk(Some(b"he\r\no".to_vec())),
            Reply::Bulk(None),
        ];
        assert_eq!(parse(bytes), Ok(Some((Reply::Array(Some(expected)), bytes.len() - 4))));
    }

    #[test]
    fn a_reply_that_is_cut_anywhere_is_waited_for() {
        let bytes = b"*2\r\n$3\r\nabc\r\n:12\r\n";
        for length in 0..bytes.len() {
            assert_eq!(parse(&bytes[..length]), Ok(None), "{length}");
        }
    }

    #[test]
    fn nonsense_is_refused_without_allocating_what_it_asks_for() {
        for bad in ["?\r\n", "$-2\r\n", "$99999999999\r\n", "*9999999999\r\n", ":x\r\n", "$1\r\nabc\r\n"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(parse("*1\r\n".repeat(100).as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_command_is_an_array_of_its_arguments(
            arguments in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..6)
        ) {
            let bytes = encode(&arguments);
            let expected = arguments.into_iter().map(|a| Reply::Bulk(Some(a))).collect();
            prop_assert_eq!(parse(&bytes), Ok(Some((Reply::Array(Some(expected)), bytes.len()))));
        }
    }
}
