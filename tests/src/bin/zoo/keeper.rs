use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::species::{Check, Species, Watch};

/// Time between two checks of one animal, and between two ticks of the keeper.
const PACE: Duration = Duration::from_millis(20);
/// Time between two lines to a client.
const REPORT: Duration = Duration::from_millis(50);
/// More different complaints than this are only noise.
const MOST_COMPLAINTS: usize = 100;

/// What a cage tells the keeper, one line of JSON each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    /// All animals are set up and in order.
    Ready,
    /// How often each animal was found in order.
    Checks(BTreeMap<String, u64>),
    /// An animal is not what it was.
    Complaint(String),
    /// An animal cannot be set up here.
    Failed(String),
}

/// What is known of all animals.
#[derive(Default)]
struct Book {
    tick: u64,
    checks: BTreeMap<String, u64>,
    complaints: Vec<String>,
    words: BTreeMap<&'static str, u64>,
}

impl Book {
    fn complain(&mut self, text: String) {
        if self.complaints.len() < MOST_COMPLAINTS && !self.complaints.contains(&text) {
            eprintln!("complaint: {text}");
            self.complaints.push(text);
        }
    }
}

/// One line to a client.
#[derive(Serialize)]
struct Line<'a> {
    line: u64,
    tick: u64,
    complaints: &'a [String],
    checks: &'a BTreeMap<String, u64>,
}

/// Sets up the animals of one cage and checks them for ever; ends when the keeper is gone.
pub fn run_cage(cage: &str, chosen: &[&Species], dir: &Path) -> Result<()> {
    // If the keeper goes (or never comes: a race lost to its death) the pipe breaks and `say` ends this process too.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    let mut animals: Vec<(&str, Check, u64)> = Vec::new();
    for species in chosen.iter().filter(|s| s.cage == cage) {
        let settled = (|| {
            let place = dir.join("zoo").join(species.name);
            std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
            let mut check = (species.settle)(&place)?;
            check().context("it is not in order right after it was set up")?;
            anyhow::Ok(check)
        })();
        match settled {
            Ok(check) => animals.push((species.name, check, 0)),
            Err(error) => {
                say(&Word::Failed(format!("{}: {error:#}", species.name)))?;
                bail!("{} cannot be set up: {error:#}", species.name);
            }
        }
    }
    say(&Word::Ready)?;
    for round in 0u64.. {
        for (name, check, count) in &mut animals {
            match check() {
                Ok(()) => *count += 1,
                Err(error) => say(&Word::Complaint(format!("{name}: {error:#}")))?,
            }
        }
        if round % 5 == 0 {
            say(&Word::Checks(animals.iter().map(|(name, _, count)| ((*name).to_owned(), *count)).collect()))?;
        }
        thread::sleep(PACE);
    }
    Ok(())
}

fn say(word: &Word) -> Result<()> {
    let mut line = serde_json::to_string(word)?;
    line.push('\n');
    std::io::stdout().lock().write_all(line.as_bytes()).context("the keeper is gone")
}

/// Starts the cages, serves reports, and watches that every cage goes on.
pub fn keep(chosen: &[&Species], dir: &Path, port: u16) -> Result<()> {
    let book = Arc::new(Mutex::new(Book::default()));
    let mut cages: Vec<(&'static str, Child, Watch)> = Vec::new();
    let (settled, news) = mpsc::channel();
    for species in chosen {
        if cages.iter().any(|(name, ..)| *name == species.cage) {
            continue;
        }
        let only: Vec<_> = chosen.iter().filter(|s| s.cage == species.cage).map(|s| s.name).collect();
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--cage", species.cage, "--only", &only.join(","), "--dir"])
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the cage {}", species.cage))?;
        let output = child.stdout.take().context("a cage without output")?;
        let (book, settled, cage) = (Arc::clone(&book), settled.clone(), species.cage);
        thread::Builder::new().name(format!("ear-{cage}")).spawn(move || listen(cage, output, &book, &settled))?;
        cages.push((species.cage, child, Watch::new("the number of its reports")));
    }
    for _ in &cages {
        match news.recv()? {
            Ok(()) => {}
            Err(message) => {
                for (_, child, _) in &mut cages {
                    // Already gone is as good.
                    let _ = child.kill();
                    let _ = child.wait();
                }
                bail!("cannot set up {message}");
            }
        }
    }
    let listener = TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("cannot listen on TCP port {port}"))?;
    let door = Arc::clone(&book);
    thread::Builder::new().name("door".into()).spawn(move || {
        for guest in listener.incoming().flatten() {
            let book = Arc::clone(&door);
            // A guest that cannot be served is closed; it will notice.
            let _ = thread::Builder::new().name("guide".into()).spawn(move || serve(guest, &book));
        }
    })?;
    println!("zoo open: {} animals in {} cages, port {port}", chosen.len(), cages.len());
    loop {
        thread::sleep(PACE);
        let mut book = lock(&book);
        book.tick += 1;
        for (name, child, watch) in &mut cages {
            let words = book.words.get(name).copied().unwrap_or(0);
            if let Some(status) = child.try_wait()? {
                book.complain(format!("the cage {name} ended: {status}"));
            } else if let Err(error) = watch.look(words) {
                book.complain(format!("the cage {name}: {error}"));
            }
        }
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn listen(
    cage: &'static str,
    output: impl std::io::Read,
    book: &Mutex<Book>,
    settled: &mpsc::Sender<std::result::Result<(), String>>,
) {
    let mut ready = false;
    for line in BufReader::new(output).lines() {
        let word = match line.map_err(anyhow::Error::from).and_then(|l| Ok(serde_json::from_str(&l)?)) {
            Ok(word) => word,
            Err(error) => {
                lock(book).complain(format!("the cage {cage} says something odd: {error}"));
                continue;
            }
        };
        let mut book = lock(book);
        *book.words.entry(cage).or_default() += 1;
        match word {
            Word::Ready => {
                ready = true;
                let _ = settled.send(Ok(()));
            }
            Word::Checks(checks) => book.checks.extend(checks),
            Word::Complaint(text) => book.complain(text),
            Word::Failed(text) => {
                let _ = settled.send(Err(text));
                return;
            }
        }
    }
    if !ready {
        let _ = settled.send(Err(format!("the cage {cage}, which ended early")));
    }
}

fn serve(mut guest: TcpStream, book: &Mutex<Book>) {
    for line in 0u64.. {
        let text = {
            let book = lock(book);
            serde_json::to_string(&Line { line, tick: book.tick, complaints: &book.complaints, checks: &book.checks })
        };
        let Ok(mut text) = text else { return };
        text.push('\n');
        if guest.write_all(text.as_bytes()).is_err() {
            return;
        }
        thread::sleep(REPORT);
    }
}
