//! An overlay is kept away while its upper directory is filled, and comes back with what is in it then.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, mknod};
use tranship_storage::overlay::{Overlay, PointKind};

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

#[test]
fn what_came_meanwhile_is_seen_wherever_the_overlay_was_wanted() {
    let dir = tempfile::tempdir().unwrap();
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("this test needs root");
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["lower", "upper", "work", "home", "home/id", "home/id/merged", "root"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("lower/kept"), "image").unwrap();
    fs::write(at("lower/gone"), "image").unwrap();
    let merged = at("home/id/merged");
    assert_eq!(Overlay::set_aside(&merged, Vec::new()).unwrap(), None, "nothing is mounted there");
    // Relative to the engine's own directory, as engines write them.
    let options = format!("lowerdir=../lower,upperdir={},workdir={}", at("upper").display(), at("work").display());
    let here = std::env::current_dir().unwrap();
    std::env::set_current_dir(at("home")).unwrap();
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
    std::env::set_current_dir(here).unwrap();
    // The overlay has seen both, and would remember.
    assert!(merged.join("gone").exists() && !merged.join("new").exists());

    let wanted = vec![("/etc/hosts".into(), PointKind::File), ("/dev".into(), PointKind::Directory)];
    let overlay = Overlay::set_aside(&merged, wanted).unwrap().expect("an overlay is mounted there");
    assert_eq!(fs::read_dir(&merged).unwrap().count(), 0);
    bind(&merged, &at("root"));
    fs::create_dir(at("root/mountpoint")).unwrap();
    fs::write(at("upper/new"), "came").unwrap();
    mknod(&at("upper/gone"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    for _ in 0..2 {
        assert!(overlay.put_back().unwrap());
        for root in [&merged, &at("root")] {
            let read = |name: &str| fs::read_to_string(root.join(name)).ok();
            assert_eq!((read("kept"), read("new")), (Some("image".to_owned()), Some("came".to_owned())));
            assert!(!root.join("gone").exists() && !root.join("mountpoint").exists(), "{}", root.display());
            assert!(root.join("etc/hosts").is_file() && root.join("dev").is_dir(), "{}", root.display());
        }
    }
    fs::write(at("root/written"), "").unwrap();
    assert!(at("upper/written").exists() && !at("upper/mountpoint").exists());
    assert_eq!(merged.metadata().unwrap().dev(), at("root").metadata().unwrap().dev());
    umount2(&at("root"), MntFlags::empty()).unwrap();
    umount2(&merged, MntFlags::empty()).unwrap();
    assert!(!overlay.put_back().unwrap(), "the engine has taken it away");
    assert_eq!(fs::read_dir(&merged).unwrap().count(), 0, "something is left beneath");

    // Nor is an overlay that the whole place is on taken for it.
    fs::create_dir(at("upper/merged")).unwrap();
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        at("lower").display(),
        at("upper").display(),
        at("work").display()
    );
    mount(Some("overlay"), &at("home/id"), Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
    assert!(!overlay.put_back().unwrap() && fs::read_dir(&merged).unwrap().count() == 0);
    umount2(&at("home/id"), MntFlags::empty()).unwrap();
    fs::remove_dir(&merged).unwrap();
    assert!(!overlay.put_back().unwrap(), "the engine has removed even its directory");
}
