//! A program that keeps files in a directory, `disk-files DIRECTORY MIB RATE SEED`: a large one of MIB MiB, of which it writes RATE
//! MB a second at random places, and others of all kinds that come, change and go. It knows what each must contain, and goes on
//! comparing. Tells everybody who connects, every 20 ms: `ok TICK`, or `bad TICK: WHAT`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const PORT: u16 = 7003;
const TICK: Duration = Duration::from_millis(20);
const BLOCK: usize = 4096;
/// Words of the mapped file: 1 MiB.
const WORDS: usize = 1 << 17;
/// Files that come and go, at most.
const SMALL: u64 = 60;

/// A small generator, so that the seed says everything.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What a block of the large file must contain: its number and version, again and again.
fn block(number: u64, version: u32) -> Vec<u8> {
    (0..BLOCK as u64 / 8).flat_map(|n| (number << 32 ^ u64::from(version) ^ n << 20).to_le_bytes()).collect()
}

fn small(seed: u64) -> Vec<u8> {
    (0..seed % 9000).map(|n| (n * 31 + seed) as u8).collect()
}

/// The whole of a file, mapped shared and never unmapped.
fn map(file: &File) -> Result<&'static [AtomicU64]> {
    let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, WORDS * 8);
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    // SAFETY: the mapping has this length, is aligned to pages, is never unmapped, and the file is never cut.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), WORDS) })
}

struct Files {
    directory: PathBuf,
    chance: Chance,
    large: File,
    versions: Vec<u32>,
    /// Blocks of the large file that are written in a tick.
    writes: u64,
    mapped: &'static [AtomicU64],
    mapped_file: File,
    words: BTreeMap<usize, u64>,
    log: File,
    logged: String,
    /// Files that come and go, and what they contain.
    small: BTreeMap<String, u64>,
    unlinked: File,
}

impl Files {
    fn make(directory: &Path, mib: u64, rate: u64, seed: u64) -> Result<Self> {
        let open = |name: &str| {
            File::options().read(true).write(true).create_new(true).open(directory.join(name)).context(name.to_owned())
        };
        let large = open("large")?;
        let versions = vec![0; (mib << 20) as usize / BLOCK];
        for (number, group) in (0..versions.len() as u64).step_by(256).zip(versions.chunks(256)) {
            let bytes: Vec<u8> = (number..number + group.len() as u64).flat_map(|n| block(n, 0)).collect();
            large.write_all_at(&bytes, number * BLOCK as u64)?;
        }
        let mapped_file = open("mapped")?;
        mapped_file.set_len(WORDS as u64 * 8)?;
        let unlinked = open("unlinked")?;
        unlinked.write_all_at(b"nobody sees me", 0)?;
        fs::remove_file(directory.join("unlinked"))?;
        fs::create_dir(directory.join("small"))?;
        symlink("small/nowhere", directory.join("sym"))?;
        Ok(Self {
            directory: directory.to_owned(),
            chance: Chance(seed | 1),
            large,
            versions,
            writes: (rate * 1_000_000 / BLOCK as u64).div_ceil(50),
            mapped: map(&mapped_file)?,
            mapped_file,
            words: BTreeMap::new(),
            log: File::options().append(true).create_new(true).open(directory.join("log"))?,
            logged: String::new(),
            small: BTreeMap::new(),
            unlinked,
        })
    }

    fn change(&mut self, tick: u64) -> Result<()> {
        for _ in 0..self.writes.min(self.versions.len() as u64) {
            let number = self.chance.below(self.versions.len() as u64);
            let version = &mut self.versions[number as usize];
            *version += 1;
            self.large.write_all_at(&block(number, *version), number * BLOCK as u64)?;
        }
        let word = self.chance.below(WORDS as u64) as usize;
        self.mapped[word].store(tick, Ordering::Relaxed);
        self.words.insert(word, tick);
        let line = format!("tick {tick}\n");
        self.log.write_all(line.as_bytes())?;
        self.logged.push_str(&line);
        let (one, two) = (self.chance.below(SMALL), self.chance.below(SMALL));
        let (name, other) = (format!("n{one}"), format!("n{two}"));
        let path = |name: &str| self.directory.join("small").join(name);
        match (self.chance.below(5), self.small.get(&name).copied()) {
            (0, Some(_)) => {
                fs::remove_file(path(&name))?;
                self.small.remove(&name);
            }
            (1, Some(seed)) if one != two => {
                fs::rename(path(&name), path(&other))?;
                self.small.remove(&name);
                self.small.insert(other, seed);
            }
            (2, Some(_)) => {
                fs::remove_file(path(&name))?;
                symlink("../log", path(&name))?;
                fs::remove_file(path(&name))?;
                self.small.remove(&name);
            }
            _ => {
                let seed = self.chance.below(1 << 40);
                fs::write(path(&name), small(seed))?;
                self.small.insert(name, seed);
            }
        }
        Ok(())
    }

    /// Compares what is open, and some of everything else; with `all`, all of everything, by name.
    fn check(&mut self, all: bool) -> Result<()> {
        let by_name = File::open(self.directory.join("large"))?;
        ensure!(by_name.metadata()?.ino() == self.large.metadata()?.ino(), "the large file's name is another file's");
        let mut found = vec![0; BLOCK];
        let numbers: Vec<u64> = match all {
            true => (0..self.versions.len() as u64).collect(),
            false => (0..8).map(|_| self.chance.below(self.versions.len() as u64)).collect(),
        };
        for number in numbers {
            by_name.read_exact_at(&mut found, number * BLOCK as u64)?;
            let version = self.versions[number as usize];
            ensure!(found == block(number, version), "block {number} is not of version {version}");
        }
        for (word, value) in &self.words {
            let (here, mut there) = (self.mapped[*word].load(Ordering::Relaxed), [0; 8]);
            self.mapped_file.read_exact_at(&mut there, *word as u64 * 8)?;
            ensure!(here == *value && u64::from_le_bytes(there) == *value, "word {word} is {here}, not {value}");
        }
        let log = self.directory.join("log");
        ensure!(fs::metadata(&log)?.len() == self.logged.len() as u64, "the log is too short or too long");
        ensure!(!all || fs::read_to_string(&log)? == self.logged, "the log is not what was written");
        let mut names: Vec<String> = Vec::new();
        for entry in fs::read_dir(self.directory.join("small"))? {
            names.extend(entry?.file_name().into_string());
        }
        names.sort();
        ensure!(names.iter().eq(self.small.keys()), "there are {names:?}");
        for (name, seed) in self.small.iter().filter(|(_, seed)| all || **seed % 4 == 0) {
            ensure!(fs::read(self.directory.join("small").join(name))? == small(*seed), "{name} has other content");
        }
        ensure!(
            fs::read_link(self.directory.join("sym"))? == Path::new("small/nowhere"),
            "the symlink leads elsewhere"
        );
        let mut hidden = [0; 14];
        self.unlinked.read_exact_at(&mut hidden, 0)?;
        ensure!(&hidden == b"nobody sees me" && self.unlinked.metadata()?.nlink() == 0, "the unlinked file is lost");
        Ok(())
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, mib, rate, seed] = arguments.as_slice() else { bail!("disk-files DIRECTORY MIB RATE SEED") };
    let mut files = Files::make(Path::new(directory), mib.parse()?, rate.parse()?, seed.parse()?)?;
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    listener.set_nonblocking(true)?;
    let mut clients: Vec<TcpStream> = Vec::new();
    let mut complaint: Option<String> = None;
    // The whole of a gigabyte is not for every second.
    let often = 50 * (1 + files.versions.len() as u64 / 25_000);
    for tick in 0.. {
        match listener.accept() {
            Ok((client, _)) => clients.push(client),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        if complaint.is_none() {
            // Never taken back.
            complaint =
                files.change(tick).and_then(|()| files.check(tick % often == 0)).err().map(|e| format!("{e:#}"));
        }
        let line = match &complaint {
            None if tick % often == 0 => format!("ok {tick} all\n"),
            None => format!("ok {tick}\n"),
            Some(why) => format!("bad {tick}: {why}\n"),
        };
        clients.retain_mut(|client| client.write_all(line.as_bytes()).is_ok());
        std::thread::sleep(TICK);
    }
    Ok(())
}
