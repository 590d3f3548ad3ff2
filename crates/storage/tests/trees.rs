//! Digests and removal of real trees, with real mounts where that needs root.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use nix::mount::{MsFlags, mount};
use proptest::prelude::*;
use tempfile::TempDir;
use tranship_storage::{StorageError, TreeDigest, digest, ensure_tmpfs, remove_tree, unmount_below};

const THEN: Duration = Duration::from_secs(1_700_000_000);

fn settle(path: &Path) {
    let file = fs::File::open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + THEN).unwrap();
}

/// A tree of files; all times the same.
fn tree(files: &BTreeMap<String, String>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
    }
    settle_all(dir.path());
    dir
}

fn settle_all(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            settle_all(&entry.path());
        }
        if !entry.file_type().unwrap().is_symlink() {
            settle(&entry.path());
        }
    }
}

fn sample() -> TempDir {
    let files = ["etc/passwd", "etc/ssl/cert", "usr/lib/x/y/z", "usr/bin/sh", "init"];
    tree(&files.into_iter().map(|f| (f.to_owned(), f.to_owned())).collect())
}

fn of(dir: &TempDir) -> TreeDigest {
    digest(dir.path(), &[]).unwrap()
}

fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: mounting needs root");
    }
    root
}

/// Unmounts when dropped, so that a failing test leaves nothing.
struct Mounts(TempDir);

impl Drop for Mounts {
    fn drop(&mut self) {
        let _ = unmount_below(self.0.path());
    }
}

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

#[test]
fn equal_trees_have_equal_digests_and_survive_serialisation() {
    let (a, b) = (sample(), sample());
    let (a, b) = (of(&a), of(&b));
    assert_eq!(a, b);
    assert_eq!(a.difference(&b), None);
    assert_eq!(a.entries, 12);
    let again: TreeDigest = serde_json::from_str(&serde_json::to_string(&a).unwrap()).unwrap();
    assert_eq!(a, again);
}

#[test]
fn a_difference_is_named_by_its_path() {
    type Change = (&'static str, fn(&Path));
    let changes: [Change; 8] = [
        ("etc/passwd differs", |d| fs::write(d.join("etc/passwd"), "longer than before").unwrap()),
        ("usr/lib differs", |d| fs::remove_file(d.join("usr/lib/x/y/z")).unwrap()),
        ("etc/new is only on the destination", |d| symlink("x", d.join("etc/new")).unwrap()),
        ("init is only on the source", |d| fs::remove_file(d.join("init")).unwrap()),
        ("usr/bin differs", |d| fs::set_permissions(d.join("usr/bin/sh"), fs::Permissions::from_mode(0o4755)).unwrap()),
        ("init differs", |d| fs::File::open(d.join("init")).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap()),
        ("owner, mode or modification time of etc differs", |d| {
            fs::set_permissions(d.join("etc"), fs::Permissions::from_mode(0o711)).unwrap();
        }),
        ("owner or mode of the root directory differs", |d| {
            fs::set_permissions(d, fs::Permissions::from_mode(0o701)).unwrap();
        }),
    ];
    for (expected, change) in changes {
        let (a, b) = (sample(), sample());
        change(b.path());
        assert_eq!(of(&a).difference(&of(&b)).as_deref(), Some(expected));
    }
}

#[test]
fn what_is_ignored_and_the_time_of_its_directory_do_not_count() {
    let (a, b) = (sample(), sample());
    fs::write(b.path().join("etc/resolv.conf"), "made by the engine").unwrap();
    let ignore = [PathBuf::from("/etc/resolv.conf")];
    assert!(of(&a).difference(&of(&b)).is_some());
    assert_eq!(digest(a.path(), &ignore).unwrap(), digest(b.path(), &ignore).unwrap());
}

#[test]
fn hard_links_count_as_the_files_that_they_are() {
    let (a, b) = (sample(), sample());
    fs::copy(a.path().join("init"), a.path().join("init2")).unwrap();
    fs::hard_link(b.path().join("init"), b.path().join("init2")).unwrap();
    settle(&a.path().join("init2"));
    assert_eq!(of(&a), of(&b));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    #[test]
    fn trees_are_equal_exactly_if_their_digests_are(
        a in proptest::collection::btree_map("[ab](/[ab]x){0,3}/f[0-9]", "[01]{0,2}", 1..8),
        b in proptest::collection::btree_map("[ab](/[ab]x){0,3}/f[0-9]", "[01]{0,2}", 1..8),
    ) {
        let sizes = |t: &BTreeMap<String, String>| t.iter().map(|(k, v)| (k.clone(), v.len())).collect::<Vec<_>>();
        let (one, two) = (of(&tree(&a)), of(&tree(&b)));
        prop_assert_eq!(one == two, sizes(&a) == sizes(&b));
        prop_assert_eq!(one.difference(&two).is_some(), sizes(&a) != sizes(&b));
        prop_assert_eq!(of(&tree(&a)), one);
    }
}

#[test]
fn a_hundred_thousand_files_take_less_than_find_takes() {
    let dir = tempfile::tempdir().unwrap();
    for d in 0..100 {
        let sub = dir.path().join(format!("usr/{}/{d}", d % 3));
        fs::create_dir_all(&sub).unwrap();
        for f in 0..1000 {
            fs::File::create(sub.join(format!("file-{f}"))).unwrap();
        }
    }
    let first = of(&dir);
    let timed = |work: &dyn Fn()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    let find = || {
        let listed = Command::new("find").arg(dir.path()).args(["-printf", "%s %m %u %g %T@ %p\n"]).output().unwrap();
        assert!(listed.status.success());
    };
    let (digest, find) = (0..5)
        .map(|_| (timed(&|| assert_eq!(of(&dir), first)), timed(&find)))
        .reduce(|best, now| (best.0.min(now.0), best.1.min(now.1)))
        .unwrap();
    println!("digest of 100,000 files: {digest:?}, find: {find:?}");
    assert!(first.entries > 100_000 && digest < find, "{digest:?}, and find takes {find:?}");
    let start = Instant::now();
    remove_tree(&dir.path().join("usr")).unwrap();
    println!("removal: {:?}", start.elapsed());
}

#[test]
fn removal_refuses_before_it_touches_anything_if_a_mount_is_below() {
    if !root() {
        return;
    }
    let treasure = sample();
    let dir = Mounts(tempfile::tempdir().unwrap());
    let state = dir.0.path().join("state");
    fs::create_dir_all(state.join("criu root/deep")).unwrap();
    fs::write(state.join("aaa"), "deleted first, if it were").unwrap();
    bind(treasure.path(), &state.join("criu root/deep"));
    match remove_tree(&state) {
        Err(StorageError::Mounted { mount_point, .. }) => assert!(mount_point.ends_with("criu root/deep")),
        other => panic!("{other:?}"),
    }
    assert!(state.join("aaa").exists() && treasure.path().join("etc/passwd").exists());
    assert!(matches!(remove_tree(&state.join("criu root/deep")), Err(StorageError::Mounted { .. })));

    // Two on top of each other, and one below.
    bind(treasure.path(), &state.join("criu root/deep"));
    bind(treasure.path(), &state.join("criu root/deep/etc"));
    assert_eq!(unmount_below(&state).unwrap(), 3);
    assert_eq!(unmount_below(&state).unwrap(), 0);
    remove_tree(&state).unwrap();
    remove_tree(&state).unwrap();
    assert!(!state.exists() && treasure.path().join("usr/lib/x/y/z").exists());
}

#[test]
fn a_mount_in_use_is_detached() {
    if !root() {
        return;
    }
    let treasure = sample();
    let dir = Mounts(tempfile::tempdir().unwrap());
    let point = dir.0.path().join("busy");
    fs::create_dir(&point).unwrap();
    bind(treasure.path(), &point);
    let open = fs::File::open(point.join("init")).unwrap();
    assert_eq!(unmount_below(dir.0.path()).unwrap(), 1);
    drop(open);
    remove_tree(&point).unwrap();
    assert!(treasure.path().join("init").exists());
}

#[test]
fn symlinks_are_deleted_and_not_followed() {
    let treasure = sample();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    fs::create_dir(&state).unwrap();
    symlink(treasure.path(), state.join("link")).unwrap();
    symlink(treasure.path(), dir.path().join("alias")).unwrap();
    remove_tree(&dir.path().join("alias")).unwrap();
    remove_tree(&state).unwrap();
    remove_tree(&dir.path().join("never/was")).unwrap();
    assert_eq!(of(&treasure).entries, 12);
}

#[test]
fn trees_of_absurd_depth_are_refused_without_harm_to_the_stack() {
    let dir = tempfile::tempdir().unwrap();
    let nest = |name: &str, levels| {
        let path: PathBuf = std::iter::once(name).chain(std::iter::repeat_n("d", levels)).collect();
        fs::create_dir_all(dir.path().join(path)).unwrap();
    };
    nest("deep", 350);
    assert_eq!(of(&dir).entries, 351);
    remove_tree(&dir.path().join("deep")).unwrap();
    nest("deeper", 450);
    assert!(matches!(digest(dir.path(), &[]), Err(StorageError::TooDeep { .. })));
    assert!(matches!(remove_tree(&dir.path().join("deeper")), Err(StorageError::TooDeep { .. })));
}

#[test]
fn a_digest_does_not_enter_mounts() {
    if !root() {
        return;
    }
    let treasure = sample();
    let dir = Mounts(sample());
    fs::create_dir(dir.0.path().join("mnt")).unwrap();
    bind(treasure.path(), &dir.0.path().join("mnt"));
    let with = of(&dir.0);
    fs::write(treasure.path().join("more"), "x").unwrap();
    assert_eq!(of(&dir.0), with);
    assert_eq!(with.entries, 13);
}

#[test]
fn a_directory_that_is_not_in_memory_gets_a_tmpfs_once() {
    if !root() {
        return;
    }
    // The build directory is on a disk where the temporary directory may not be.
    let dir = Mounts(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let point = dir.0.path().join("run");
    let fresh = ensure_tmpfs(&point, Some(1 << 20)).unwrap();
    assert!(!ensure_tmpfs(&point, None).unwrap());
    assert!(!ensure_tmpfs(&point.join("below"), None).unwrap());
    assert_eq!(unmount_below(dir.0.path()).unwrap(), usize::from(fresh));
    assert_eq!(fs::metadata(&point).unwrap().permissions().mode() & 0o7777, 0o700);
}
