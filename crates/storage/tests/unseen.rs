//! Who watches files, or holds a lease on one, is told nothing of our reading.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tranship_storage::carried::{self, Source};
use tranship_storage::copy::{CopyError, Op, Sink};
use tranship_types::{CarriedTree, TreeKind};

/// A process that is started has, until it executes its program, every file open that is open here: one that is just being written would be
/// closed a second time, later. So none is started while a file is written.
static WRITING: Mutex<()> = Mutex::new(());

/// Takes everything.
#[derive(Default)]
struct Taken(u64);

impl Sink for Taken {
    fn op(&mut self, _: &Op) -> std::io::Result<()> {
        Ok(())
    }

    fn data(&mut self, _: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.0 += bytes.len() as u64;
        Ok(())
    }
}

fn watch(paths: &[&Path]) -> Inotify {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    for path in paths {
        inotify.add_watch(*path, AddWatchFlags::IN_ALL_EVENTS).unwrap();
    }
    inotify
}

fn events(inotify: &Inotify) -> Vec<String> {
    let events = inotify.read_events().unwrap_or_default();
    events.into_iter().map(|event| format!("{:?} {:?}", event.mask, event.name)).collect()
}

/// A directory, a directory in it, and a file in that.
fn tree() -> (tempfile::TempDir, CarriedTree) {
    let _nobody_forks = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("d")).unwrap();
    std::fs::write(directory.path().join("d/f"), b"content").unwrap();
    std::os::unix::fs::symlink("f", directory.path().join("d/l")).unwrap();
    let tree =
        CarriedTree { kind: TreeKind::Bind, inside: "/data".into(), path: directory.path().to_owned(), bytes: 0 };
    (directory, tree)
}

#[test]
fn a_watch_has_no_event_of_a_survey() {
    let (directory, tree) = tree();
    let (inner, file) = (directory.path().join("d"), directory.path().join("d/f"));
    let inotify = watch(&[directory.path(), &inner, &file]);
    let mut source = Source::open(std::process::id(), &[tree]).unwrap();
    let mut taken = Taken::default();
    source.pass(&[], &mut taken).unwrap();
    source.finish(&[], &mut taken).unwrap();
    assert_eq!(taken.0, 7);
    source.digests(&|| false).unwrap();
    carried::disk_usage(directory.path()).unwrap();
    tranship_storage::digest(directory.path(), &[]).unwrap();
    drop(source);
    assert_eq!(events(&inotify), Vec::<String>::new());
    drop(File::open(&file).unwrap());
    assert_ne!(events(&inotify), Vec::<String>::new(), "the watch itself works");
}

#[test]
fn a_write_lease_is_not_broken_but_named() {
    let (directory, tree) = tree();
    let file = directory.path().join("d/f");
    let script = "import fcntl, os, sys\n\
                  fd = os.open(sys.argv[1], os.O_WRONLY)\n\
                  fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
                  print('leased', flush=True)\n\
                  sys.stdin.read()";
    let mut holder = Command::new("python3");
    let holder = holder.args(["-c", script]).arg(&file).stdin(Stdio::piped()).stdout(Stdio::piped());
    // It returns when the program is executed.
    let nobody_writes = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut holder = holder.spawn().unwrap();
    drop(nobody_writes);
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "leased\n");
    let mut source = Source::open(std::process::id(), &[tree]).unwrap();
    let error = source.pass(&[], &mut Taken::default()).unwrap_err();
    let pid = holder.id();
    assert!(matches!(&error, CopyError::Leased { holder, .. } if *holder == pid), "{error}");
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success(), "SIGIO ends who has no handler for it");
}
