//! A program that has files of every kind in tmpfs mounts, goes on changing some of them, and checks all of them. Tells everybody who
//! connects, every 20 ms: `ok TICK`, or `bad TICK: WHAT`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use tranship_e2e::serve_status;

const PORT: u16 = 7002;
/// Words of the mapped file: 1 MiB.
const WORDS: usize = 1 << 17;
const KEPT: u64 = 5;

/// The whole of a file, mapped shared and never unmapped.
fn map(file: &File) -> Result<&'static [AtomicU64]> {
    let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, WORDS * 8);
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    // SAFETY: the mapping has this length, is aligned to pages, is never unmapped, and the file is never cut; others may write to it, as
    // atomics allow.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), WORDS) })
}

struct Files {
    still: BTreeMap<PathBuf, String>,
    mounts: Vec<String>,
    mapped: &'static [AtomicU64],
    mapped_by_name: File,
    /// What the mapping says at each of the places that are written.
    expected: BTreeMap<usize, u64>,
    log: File,
    logged: String,
    reader: File,
    unlinked: File,
    listener: UnixListener,
    lock: Flock<File>,
    directory: File,
}

impl Files {
    fn make() -> Result<Self> {
        fs::create_dir_all("/tmp/still/a/b/c")?;
        for n in 0..40 {
            fs::write(format!("/tmp/still/a/b/{n}"), vec![n as u8 + 1; n * 3001])?;
        }
        fs::hard_link("/tmp/still/a/b/7", "/tmp/still/linked")?;
        symlink("a/b/7", "/tmp/still/sym")?;
        fs::set_permissions("/tmp/still/a/b/9", fs::Permissions::from_mode(0o4751))?;
        std::os::unix::fs::chown("/tmp/still/a", Some(1234), Some(4321))?;
        let sparse = File::create("/tmp/still/sparse")?;
        sparse.write_all_at(b"end", 64 << 20)?;
        mknod("/tmp/still/fifo", SFlag::S_IFIFO, Mode::from_bits_truncate(0o640), 0)?;
        // In /dev devices work; the mount point of /dev/pts and others is there, too.
        mknod("/dev/nothing", SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))?;

        let mapped_by_name =
            File::options().read(true).write(true).create(true).truncate(true).open("/dev/shm/mapped")?;
        mapped_by_name.set_len(WORDS as u64 * 8)?;
        let mapped = map(&mapped_by_name)?;
        let mut reader = File::open("/tmp/still/a/b/39")?;
        reader.seek(SeekFrom::Start(5000))?;
        let unlinked = File::options().read(true).write(true).create(true).truncate(true).open("/tmp/unlinked")?;
        fs::remove_file("/tmp/unlinked")?;
        let lock = Flock::lock(File::create("/run/lock-file")?, FlockArg::LockExclusive).map_err(|(_, e)| e)?;
        fs::create_dir("/tmp/churn")?;
        Ok(Self {
            still: picture()?,
            mounts: mounts()?,
            mapped,
            mapped_by_name,
            expected: BTreeMap::new(),
            log: File::options().append(true).create(true).open("/tmp/log")?,
            logged: String::new(),
            reader,
            unlinked,
            listener: UnixListener::bind("/run/here.sock")?,
            lock,
            directory: File::open("/tmp/still/a/b")?,
        })
    }

    fn check(&mut self, tick: u64) -> Result<()> {
        // Written by the mapping, read by name and back.
        for (place, value) in &self.expected {
            ensure!(
                self.mapped[*place].load(Ordering::Relaxed) == *value,
                "word {place} of the mapping is not {value}"
            );
            let mut word = [0; 8];
            self.mapped_by_name.read_exact_at(&mut word, *place as u64 * 8)?;
            ensure!(u64::from_ne_bytes(word) == *value, "word {place} of the mapped file is not {value}");
        }
        let place = (tick as usize * 7919) % WORDS;
        self.mapped[place].store(tick, Ordering::Relaxed);
        self.expected.insert(place, tick);

        let line = format!("line {tick}\n");
        self.log.write_all(line.as_bytes())?;
        self.logged.push_str(&line);
        let mut first = [0];
        self.reader.read_exact(&mut first)?;
        ensure!(first == [40], "the open file says {first:?}");
        self.reader.seek(SeekFrom::Current(-1))?;
        ensure!(self.reader.stream_position()? == 5000, "the open file is elsewhere");
        if tick > 0 {
            let mut word = [0; 8];
            self.unlinked.read_exact_at(&mut word, 100)?;
            ensure!(u64::from_ne_bytes(word) == tick - 1, "the file without a name has lost something");
        }
        self.unlinked.write_all_at(&tick.to_ne_bytes(), 100)?;

        let mut caller = UnixStream::connect("/run/here.sock").context("the bound socket")?;
        caller.write_all(b"x")?;
        self.listener.accept()?.0.read_exact(&mut first)?;
        File::options().write(true).open("/dev/nothing")?.write_all(b"x").context("/dev/nothing")?;
        let other = File::open("/run/lock-file")?;
        ensure!(Flock::lock(other, FlockArg::LockExclusiveNonblock).is_err(), "the lock is gone");
        ensure!(self.lock.metadata()?.nlink() == 1, "the locked file has lost its name");
        ensure!(
            self.directory.metadata()?.ino() == fs::metadata("/tmp/still/a/b")?.ino(),
            "the open directory is another one"
        );

        // Made, renamed and removed all the time.
        fs::write(format!("/tmp/churn/new-{tick}"), tick.to_string())?;
        fs::rename(format!("/tmp/churn/new-{tick}"), format!("/tmp/churn/{tick}"))?;
        if let Some(old) = tick.checked_sub(KEPT) {
            fs::remove_file(format!("/tmp/churn/{old}")).with_context(|| format!("the churned file {old}"))?;
        }
        if tick.is_multiple_of(10) {
            ensure!(fs::read_to_string("/tmp/log")? == self.logged, "the log is not what was written");
            for n in (tick + 1).saturating_sub(KEPT)..=tick {
                ensure!(
                    fs::read_to_string(format!("/tmp/churn/{n}"))? == n.to_string(),
                    "the churned file {n} has changed"
                );
            }
            ensure!(
                fs::read_dir("/tmp/churn")?.count() as u64 == KEPT.min(tick + 1),
                "there are other files than those made"
            );
            let (now, mounts) = (picture()?, mounts()?);
            for (path, was) in &self.still {
                ensure!(now.get(path) == Some(was), "{} was {was} and is {:?}", path.display(), now.get(path));
            }
            ensure!(now.len() == self.still.len(), "there are new files: {:?}", now.keys().collect::<Vec<_>>());
            ensure!(mounts == self.mounts, "the mounts were {:?} and are {mounts:?}", self.mounts);
        }
        Ok(())
    }
}

/// The files that nobody changes.
fn picture() -> Result<BTreeMap<PathBuf, String>> {
    let mut seen = BTreeMap::new();
    look(Path::new("/tmp/still"), &mut seen)?;
    look(Path::new("/dev/nothing"), &mut seen)?;
    Ok(seen)
}

fn look(path: &Path, seen: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    let stat = path.symlink_metadata()?;
    let (mode, owner) = (stat.mode(), (stat.uid(), stat.gid()));
    let times = (stat.mtime(), stat.mtime_nsec());
    let content = match stat.file_type() {
        t if t.is_symlink() => fs::read_link(path)?.display().to_string(),
        t if t.is_file() && stat.len() < 1 << 20 => fs::read(path)?
            .iter()
            .fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
            .to_string(),
        t if t.is_file() => {
            let mut end = [0; 3];
            File::open(path)?.read_exact_at(&mut end, 64 << 20)?;
            ensure!(stat.blocks() < 1000, "the sparse file has {} blocks", stat.blocks());
            format!("{end:?}")
        }
        _ => String::new(),
    };
    let size = if stat.is_dir() { 0 } else { stat.len() };
    let text = format!("{mode:o} {owner:?} {size} {times:?} {} {} {content}", stat.nlink(), stat.rdev());
    seen.insert(path.to_owned(), text);
    if stat.is_dir() {
        for entry in fs::read_dir(path)? {
            look(&entry?.path(), seen)?;
        }
    }
    Ok(())
}

/// What the table of mounts says of tmpfs mounts but for the numbers, in order of the mount points.
fn mounts() -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mine = |line: &&str| line.contains(" - tmpfs ") && line.split(' ').nth(3) == Some("/");
    let mut mounts: Vec<String> =
        table.lines().filter(mine).map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned()).collect();
    if mounts.is_empty() {
        bail!("there is no tmpfs");
    }
    mounts.sort();
    Ok(mounts)
}

fn main() -> Result<()> {
    let guests = TcpListener::bind(("0.0.0.0", PORT))?;
    let mut files = Files::make()?;
    serve_status(&guests, 0, |tick| files.check(tick))
}
