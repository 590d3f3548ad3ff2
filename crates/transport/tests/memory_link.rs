//! The in-memory link behaves as a network one.

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::Duration;

use tranship_transport::{Link, memory_pair};
use tranship_wire::{read_message, write_message};

#[test]
fn messages_pass_and_names_are_known() {
    let (mut a, mut b) = memory_pair();
    assert_eq!((a.peer().as_str(), b.peer().as_str()), ("b", "a"));
    write_message(&mut a, "hello").unwrap();
    assert_eq!(read_message::<_, String>(&mut b).unwrap(), "hello");
    assert_eq!(a.counters().sent(), b.counters().received());
    drop(a);
    assert_eq!(b.read(&mut [0]).unwrap(), 0);
    assert_eq!(b.write(&[0]).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn a_writer_waits_for_a_slow_reader() {
    let (mut a, mut b) = memory_pair();
    let content: Vec<u8> = (0..5_000_000).map(|i| (i % 251) as u8).collect();
    a.set_timeout(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(a.write_all(&content).unwrap_err().kind(), ErrorKind::TimedOut);

    let (mut a2, mut b2) = memory_pair();
    thread::scope(|s| {
        s.spawn(|| a2.write_all(&content).unwrap());
        let mut got = vec![0; content.len()];
        b2.read_exact(&mut got).unwrap();
        assert!(got == content);
    });
    b.set_timeout(Some(Duration::from_millis(20))).unwrap();
    while b.read(&mut [0; 65536]).is_ok() {}
}

#[test]
fn a_cut_wakes_both_ends() {
    let (mut a, mut b) = memory_pair();
    a.write_all(b"lost").unwrap();
    a.cut();
    assert_eq!(b.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(a.write(&[0]).unwrap_err().kind(), ErrorKind::ConnectionReset);

    let (mut a, b) = memory_pair();
    let closer = b.closer();
    let waiting = thread::spawn(move || a.read(&mut [0]).unwrap_err().kind());
    closer.close();
    assert_eq!(waiting.join().unwrap(), ErrorKind::ConnectionReset);
}

#[test]
fn a_cut_after_some_bytes_lets_these_arrive_and_nothing_more_either_way() {
    let (mut a, mut b) = memory_pair();
    a.cut_after(3);
    assert_eq!(a.write(b"abcde").unwrap(), 3);
    assert_eq!(a.write(b"de").unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(a.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(b.write(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset);
    let mut got = [0; 3];
    b.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"abc");
    assert_eq!(b.read(&mut got).unwrap_err().kind(), ErrorKind::ConnectionReset);
}
