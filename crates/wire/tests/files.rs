//! Files arrive whole, under their name, in their directory, or leave nothing.

use std::fs;
use std::io::{Cursor, Write};
use std::os::unix::fs::{PermissionsExt, symlink};

use tranship_wire::*;

fn announce(begin: &FileBegin) -> Vec<u8> {
    let json = serde_json::to_vec(begin).unwrap();
    let mut wire = FrameHeader::file_begin(json.len()).unwrap().encode().to_vec();
    wire.extend(json);
    wire
}

fn begin(name: &str, size: u64) -> FileBegin {
    FileBegin { name: name.into(), size, mode: 0o644 }
}

#[test]
fn files_of_all_sizes_arrive_private() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (name, size) in [("empty.img", 0usize), ("core-1.img", 1), ("exact.img", 1 << 20), ("big.img", (2 << 20) + 5)] {
        let content: Vec<u8> = (0..size).map(|i| (i * 7 % 256) as u8).collect();
        fs::write(from.path().join(name), &content).unwrap();
        let mut wire = Vec::new();
        assert_eq!(send_file(&mut wire, &from.path().join(name), MAX_FILE).unwrap(), size as u64);
        let got = receive_file(&mut Cursor::new(wire), to.path(), MAX_FILE).unwrap();
        assert_eq!((got.name.as_str(), got.size), (name, size as u64));
        assert_eq!(fs::read(to.path().join(name)).unwrap(), content);
        assert_eq!(fs::metadata(to.path().join(name)).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let to = tempfile::tempdir().unwrap();
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "a b", "ü", &long] {
        let error = receive_file(&mut Cursor::new(announce(&begin(name, 0))), to.path(), MAX_FILE).unwrap_err();
        assert!(matches!(error, FileError::Read(ReadError::Wire(WireError::Name { .. }))), "{name:?}: {error}");
    }
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

#[test]
fn what_is_there_already_is_neither_replaced_nor_followed() {
    let to = tempfile::tempdir().unwrap();
    let outside = to.path().join("outside");
    fs::write(&outside, "kept").unwrap();
    symlink(&outside, to.path().join("link")).unwrap();
    symlink(to.path().join("nowhere"), to.path().join("dangling")).unwrap();
    for name in ["outside", "link", "dangling"] {
        let error = receive_file(&mut Cursor::new(announce(&begin(name, 0))), to.path(), MAX_FILE).unwrap_err();
        assert!(matches!(error, FileError::Local { action: "create", .. }), "{name}: {error}");
    }
    assert_eq!(fs::read(&outside).unwrap(), b"kept");
    assert!(!to.path().join("nowhere").exists());
}

#[test]
fn a_file_that_breaks_off_or_lies_about_its_size_leaves_nothing() {
    let to = tempfile::tempdir().unwrap();
    let mut cut = announce(&begin("a", 10));
    cut.write_all(&FrameHeader::file_data(0, 10).unwrap().encode()).unwrap();
    cut.extend(b"12345");
    let mut more = announce(&begin("a", 2));
    more.write_all(&FrameHeader::file_data(0, 3).unwrap().encode()).unwrap();
    more.extend(b"123");
    let mut displaced = announce(&begin("a", 10));
    displaced.write_all(&FrameHeader::file_data(5, 5).unwrap().encode()).unwrap();
    displaced.extend(b"12345");
    for wire in [cut, more, displaced] {
        receive_file(&mut Cursor::new(wire), to.path(), MAX_FILE).unwrap_err();
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
    }
    let error = receive_file(&mut Cursor::new(announce(&begin("a", 101))), to.path(), 100).unwrap_err();
    assert!(matches!(error, FileError::Read(ReadError::Wire(WireError::TooLong { .. }))), "{error}");
}

#[test]
fn only_regular_files_are_sent() {
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join("real"), "x").unwrap();
    symlink(from.path().join("real"), from.path().join("link")).unwrap();
    fs::create_dir(from.path().join("dir")).unwrap();
    nix::unistd::mkfifo(&from.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for name in ["link", "dir", "fifo", "missing"] {
        let mut wire = Vec::new();
        assert!(send_file(&mut wire, &from.path().join(name), MAX_FILE).is_err(), "{name}");
        assert!(wire.is_empty(), "{name}");
    }
}
