use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tranship_lab::resp::{Reply, parse};

/// The port that the programs listen on: Redis's, since they speak like one.
pub const PORT: u16 = tranship_lab::REDIS_PORT;

/// What a program answers to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// A number.
    Integer(i64),
    /// A text of one line.
    Text(String),
    /// There is no such thing.
    Null,
    /// It was not understood, or cannot be done.
    Refused(String),
}

/// Answers a program's own commands: the words of one, in capitals as the client sent them. `None` if there is no such.
pub trait Service: Send + Sync + 'static {
    /// The answer; may take its time, other connections are served meanwhile.
    fn answer(&self, command: &[String]) -> Option<Answer>;
}

#[derive(Default)]
struct Counters {
    values: Mutex<HashMap<String, i64>>,
    clients: AtomicI64,
}

/// Serves clients until the process ends, each on a thread of its own. What every program answers: `PING`, `CLIENT ID`, `GET`
/// and `INCR` of counters, and `RESIDENT` (the process's resident memory in bytes).
///
/// # Errors
/// If the port cannot be listened on.
pub fn serve(service: &Arc<impl Service>) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    let counters = Arc::new(Counters::default());
    for stream in listener.incoming().flatten() {
        let (service, counters) = (Arc::clone(service), Arc::clone(&counters));
        std::thread::spawn(move || {
            let id = counters.clients.fetch_add(1, Ordering::Relaxed) + 1;
            // The end of a connection, however it comes, is the client's affair.
            let _ = attend(stream, id, &counters, &*service);
        });
    }
    Ok(())
}

fn attend(mut stream: TcpStream, id: i64, counters: &Counters, service: &impl Service) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut pending, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        while let Some((reply, length)) = parse(&pending).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))? {
            pending.drain(..length);
            let answer = match words(&reply) {
                Some(command) => counted(&command, id, counters)
                    .or_else(|| service.answer(&command))
                    .unwrap_or_else(|| Answer::Refused(format!("unknown command {command:?}"))),
                None => Answer::Refused("a command is an array of texts".to_owned()),
            };
            stream.write_all(&encode(&answer))?;
        }
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => pending.extend_from_slice(&buffer[..length]),
        }
    }
}

/// What every program answers.
fn counted(command: &[String], id: i64, counters: &Counters) -> Option<Answer> {
    let command: Vec<_> = command.iter().map(String::as_str).collect();
    let mut values = counters.values.lock().unwrap_or_else(PoisonError::into_inner);
    Some(match command.as_slice() {
        ["PING"] => Answer::Text("PONG".to_owned()),
        ["CLIENT", "ID"] => Answer::Integer(id),
        ["GET", key] => values.get(*key).map_or(Answer::Null, |value| Answer::Text(value.to_string())),
        ["INCR", key] => {
            let value = values.entry((*key).to_owned()).or_default();
            *value += 1;
            Answer::Integer(*value)
        }
        ["RESIDENT"] => resident().map_or_else(|e| Answer::Refused(e.to_string()), Answer::Integer),
        _ => return None,
    })
}

/// Resident memory of this process, in bytes.
fn resident() -> io::Result<i64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    line.map(|kilobytes: i64| kilobytes << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn words(reply: &Reply) -> Option<Vec<String>> {
    let Reply::Array(Some(elements)) = reply else { return None };
    let word = |element: &Reply| match element {
        Reply::Bulk(Some(bytes)) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    };
    elements.iter().map(word).collect()
}

fn encode(answer: &Answer) -> Vec<u8> {
    match answer {
        Answer::Integer(n) => format!(":{n}\r\n"),
        Answer::Text(text) => format!("${}\r\n{text}\r\n", text.len()),
        Answer::Null => "$-1\r\n".to_owned(),
        Answer::Refused(why) => format!("-ERR {}\r\n", why.replace(['\r', '\n'], " ")),
    }
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_replies_of_the_protocol() {
        for (answer, reply) in [
            (Answer::Integer(-3), Reply::Integer(-3)),
            (Answer::Text("a b".into()), Reply::Bulk(Some(b"a b".to_vec()))),
            (Answer::Null, Reply::Bulk(None)),
            (Answer::Refused("no\nway".into()), Reply::Error("ERR no way".into())),
        ] {
            let bytes = encode(&answer);
            assert_eq!(parse(&bytes).unwrap(), Some((reply, bytes.len())), "{answer:?}");
        }
    }

    #[test]
    fn counters_count() {
        let counters = Counters::default();
        let ask = |words: &[&str]| counted(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>(), 7, &counters);
        assert_eq!(ask(&["GET", "n"]), Some(Answer::Null));
        assert_eq!(ask(&["INCR", "n"]), Some(Answer::Integer(1)));
        assert_eq!(ask(&["INCR", "n"]), Some(Answer::Integer(2)));
        assert_eq!(ask(&["GET", "n"]), Some(Answer::Text("2".into())));
        assert_eq!(ask(&["CLIENT", "ID"]), Some(Answer::Integer(7)));
        assert!(matches!(ask(&["RESIDENT"]), Some(Answer::Integer(bytes)) if bytes > 1 << 16));
        assert_eq!(ask(&["VERIFY"]), None);
    }
}
