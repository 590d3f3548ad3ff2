//! The first process of the container: starts the others, gathers what they say, and tells it over TCP.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Time between two lines to a client.
const REPORT: Duration = Duration::from_millis(50);

/// What a process tells the keeper, one line of JSON each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Word {
    /// How often things were done.
    Counts(BTreeMap<String, u64>),
    /// Memory is not what it must be, or something cannot be done that can.
    Complaint(String),
}

#[derive(Default)]
struct Book {
    counts: BTreeMap<String, u64>,
    complaint: Option<String>,
}

/// One line to a client.
#[derive(Serialize)]
struct Line<'a> {
    line: u64,
    complaint: Option<&'a str>,
    counts: &'a BTreeMap<String, u64>,
}

impl Book {
    /// The first complaint stays: what follows is often its consequence.
    fn complain(&mut self, text: String) {
        eprintln!("complaint: {text}");
        self.complaint.get_or_insert(text);
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the processes, given by a name and their command lines, and serves for ever.
pub fn keep(processes: &[(&'static str, Vec<String>)], port: u16) -> Result<()> {
    let book = Arc::new(Mutex::new(Book::default()));
    let mut children: Vec<(&str, Child)> = Vec::new();
    for (name, command) in processes {
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the {name}"))?;
        let output = child.stdout.take().context("a process without output")?;
        let (book, name) = (Arc::clone(&book), *name);
        thread::spawn(move || listen(name, output, &book));
        children.push((name, child));
    }
    let listener = TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("cannot listen on TCP port {port}"))?;
    let door = Arc::clone(&book);
    thread::spawn(move || {
        for guest in listener.incoming().flatten() {
            let book = Arc::clone(&door);
            thread::spawn(move || serve(guest, &book));
        }
    });
    loop {
        for at in (0..children.len()).rev() {
            if let Some(status) = children[at].1.try_wait()? {
                let (name, _) = children.swap_remove(at);
                lock(&book).complain(format!("the {name} ended: {status}"));
            }
        }
        thread::sleep(REPORT);
    }
}

fn listen(name: &'static str, output: impl Read, book: &Mutex<Book>) {
    for line in BufReader::new(output).lines() {
        match line.map_err(anyhow::Error::from).and_then(|l| Ok(serde_json::from_str(&l)?)) {
            Ok(Word::Counts(counts)) => lock(book).counts.extend(counts),
            Ok(Word::Complaint(text)) => lock(book).complain(format!("the {name}: {text}")),
            Err(error) => lock(book).complain(format!("the {name} says something odd: {error}")),
        }
    }
}

fn serve(mut guest: TcpStream, book: &Mutex<Book>) {
    for line in 0u64.. {
        let text = {
            let book = lock(book);
            serde_json::to_string(&Line { line, complaint: book.complaint.as_deref(), counts: &book.counts })
        };
        let Ok(mut text) = text else { return };
        text.push('\n');
        if guest.write_all(text.as_bytes()).is_err() {
            return;
        }
        thread::sleep(REPORT);
    }
}
