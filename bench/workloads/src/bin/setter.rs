//! Keeps a Redis busy: sets keys drawn at random from the whole key space, over several connections, several at a time, and
//! checks every reply. Answers lines on stdin by lines of JSON: `report`, and at last `verify`, which stops setting and
//! reads every key back.

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::json;
use tranship_lab::resp::encode;

/// Bytes of a value, as many as `DEBUG POPULATE` gave it.
const VALUE: usize = 100;
const OK: &[u8] = b"+OK\r\n";
const PATIENCE: Duration = Duration::from_secs(120);

/// Sets the keys key:0 … key:N-1 of a Redis over and over.
#[derive(Parser, Clone)]
struct Arguments {
    #[arg(long)]
    address: SocketAddr,
    /// How many keys there are
    #[arg(long)]
    keys: u64,
    /// Connections; each has a share of the keys for itself
    #[arg(long, default_value_t = 8)]
    connections: u64,
    /// Commands that are sent before the first reply is waited for
    #[arg(long, default_value_t = 16)]
    pipeline: usize,
    /// Sets in a second, over all connections; 0 for as many as the server takes
    #[arg(long, default_value_t = 0)]
    rate: u64,
}

/// One connection, with the keys that are its own: `number`, `number + connections`, …
struct Share {
    stream: TcpStream,
    number: u64,
    of: u64,
    /// Of each key: which version was set last; 0 for what was there before.
    versions: Vec<u32>,
    random: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (stop, sets) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let threads: Vec<_> = (0..arguments.connections)
        .map(|number| {
            let mut share = Share::open(&arguments, number)?;
            let (stop, sets, arguments) = (Arc::clone(&stop), Arc::clone(&sets), arguments.clone());
            Ok(std::thread::spawn(move || share.set(&arguments, &stop, &sets).map(|()| share)))
        })
        .collect::<Result<_>>()?;
    let start = Instant::now();
    let say = |value: serde_json::Value| -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{value}").and_then(|()| stdout.flush()).context("nobody reads the reports")
    };
    for line in std::io::stdin().lock().lines() {
        match line.context("stdin cannot be read")?.as_str() {
            "report" => {
                let ended = threads.iter().any(std::thread::JoinHandle::is_finished);
                say(
                    json!({"sets": sets.load(Ordering::Relaxed), "s": start.elapsed().as_secs_f64(), "failed": ended}),
                )?;
            }
            "verify" => break,
            other => bail!("{other:?} is neither report nor verify"),
        }
    }
    stop.store(true, Ordering::Relaxed);
    let mut wrong = Vec::new();
    for thread in threads {
        let checked = thread.join().expect("a setting thread does not panic").and_then(|mut share| share.verify());
        wrong.extend(checked.err().map(|e| format!("{e:#}")));
    }
    say(json!({"sets": sets.load(Ordering::Relaxed), "wrong": wrong}))
}

impl Share {
    fn open(arguments: &Arguments, number: u64) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&arguments.address, Duration::from_secs(5))
            .with_context(|| format!("cannot connect to {}", arguments.address))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let of = arguments.connections;
        let keys = arguments.keys / of + u64::from(number < arguments.keys % of);
        ensure!(keys > 0, "connection {number} of {of} has none of {} keys", arguments.keys);
        Ok(Self { stream, number, of, versions: vec![0; keys as usize], random: 0x9e37_79b9_7f4a_7c15 ^ (number + 1) })
    }

    fn key(&self, index: usize) -> u64 {
        self.number + index as u64 * self.of
    }

    fn draw(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * self.versions.len() as u128) >> 64) as usize
    }

    fn set(&mut self, arguments: &Arguments, stop: &AtomicBool, sets: &AtomicU64) -> Result<()> {
        let rate = arguments.rate as f64 / arguments.connections as f64;
        let pause = if rate > 0.0 { arguments.pipeline as f64 / rate } else { 0.0 };
        let mut replies = vec![0; arguments.pipeline * OK.len()];
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let mut commands = Vec::with_capacity(arguments.pipeline * (VALUE + 64));
            for _ in 0..arguments.pipeline {
                let index = self.draw();
                self.versions[index] += 1;
                let key = self.key(index);
                let name = format!("key:{key}");
                commands.extend(encode(&[b"SET".as_slice(), name.as_bytes(), &value(key, self.versions[index])]));
            }
            self.stream.write_all(&commands).context("sending failed")?;
            self.stream.read_exact(&mut replies).context("no reply")?;
            if let Some(other) = replies.chunks(OK.len()).find(|reply| *reply != OK) {
                bail!("the server replied {:?} to a SET", String::from_utf8_lossy(other));
            }
            sets.fetch_add(arguments.pipeline as u64, Ordering::Relaxed);
            next += Duration::from_secs_f64(pause);
            let now = Instant::now();
            // After a pause it goes on at its rate: no burst makes up for it.
            if next < now { next = now } else { std::thread::sleep(next - now) }
        }
        Ok(())
    }

    /// Reads every key of the share that was set, and compares.
    fn verify(&mut self) -> Result<()> {
        const AT_A_TIME: usize = 256;
        let set: Vec<usize> = (0..self.versions.len()).filter(|index| self.versions[*index] > 0).collect();
        let head = format!("${VALUE}\r\n");
        for indices in set.chunks(AT_A_TIME) {
            let commands: Vec<u8> = indices
                .iter()
                .flat_map(|index| encode(&["GET".to_owned(), format!("key:{}", self.key(*index))]))
                .collect();
            self.stream.write_all(&commands)?;
            let mut reply = vec![0; head.len() + VALUE + 2];
            for index in indices {
                let (key, version) = (self.key(*index), self.versions[*index]);
                self.stream.read_exact(&mut reply).with_context(|| format!("no reply to GET key:{key}"))?;
                let expected = [head.as_bytes(), &value(key, version), b"\r\n"].concat();
                ensure!(reply == expected, "key:{key} is {:?}, not version {version}", String::from_utf8_lossy(&reply));
            }
        }
        Ok(())
    }
}

/// A value that tells the key and the version, of digits that do not repeat.
fn value(key: u64, version: u32) -> Vec<u8> {
    let mut text = format!("{key}/{version}/").into_bytes();
    let mut z = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(version);
    while text.len() < VALUE {
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb).wrapping_add(1);
        text.extend(format!("{z:016x}").bytes());
    }
    text.truncate(VALUE);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_one_length_and_differ() {
        assert_eq!(value(3, 1).len(), VALUE);
        assert_eq!(value(u64::MAX, u32::MAX).len(), VALUE);
        assert_ne!(value(3, 1), value(3, 2));
        assert_ne!(value(3, 1), value(4, 1));
    }
}
