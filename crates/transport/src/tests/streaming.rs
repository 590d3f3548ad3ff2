//! What an open link does with bytes, time and accidents.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustls_pki_types::UnixTime;
use tranship_wire::{read_message, write_message};

use super::*;
use crate::identity::provider;

#[test]
fn reads_and_writes_of_all_sizes_arrive_unchanged_both_ways() {
    let (mut a, mut b) = pair();
    let sizes = [1, 24, 100, 16383, 16384, 16385, 40_000, 262_144, 262_145, 1 << 20, 3_000_001, 7];
    let content: Vec<u8> = (0..sizes.iter().sum()).map(|i: usize| (i * 31 % 251) as u8).collect();
    let write = |link: &mut Connection| {
        let mut at = 0;
        for size in sizes {
            link.write_all(&content[at..at + size]).unwrap();
            at += size;
        }
        link.flush().unwrap();
    };
    let read = |link: &mut Connection| {
        let (mut got, mut want) = (vec![0; content.len()], [3, 50_000, 1, 2_000_000, 999].iter().cycle());
        let mut at = 0;
        while at < got.len() {
            let end = got.len().min(at + want.next().unwrap());
            link.read_exact(&mut got[at..end]).unwrap();
            at = end;
        }
        assert!(got == content);
    };
    thread::scope(|s| {
        s.spawn(|| {
            write(&mut a);
            read(&mut a);
        });
        read(&mut b);
        write(&mut b);
    });
}

#[test]
fn a_write_while_unread_data_waits_keeps_that_data() {
    let (mut a, mut b) = pair();
    a.write_all(&[1; 100_000]).unwrap();
    a.flush().unwrap();
    let mut first = [0; 10];
    b.read_exact(&mut first).unwrap();
    b.write_all(&[2; 50_000]).unwrap();
    b.flush().unwrap();
    a.read_exact(&mut [0; 50_000]).unwrap();
    let mut rest = vec![0; 99_990];
    b.read_exact(&mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 1));
}

#[test]
fn keys_are_renewed_in_mid_stream_when_their_time_is_up() {
    let (mut a, mut b) = pair();
    // The real limit for AES-GCM is 2^24 records, 256 GiB.
    a.records_mut().limit(50);
    b.records_mut().limit(50);
    let content: Vec<u8> = (0..50_000_000).map(|i| (i % 247) as u8).collect();
    thread::scope(|s| {
        s.spawn(|| {
            a.write_all(&content).unwrap();
            a.flush().unwrap();
            let mut back = vec![0; 3_000_000];
            a.read_exact(&mut back).unwrap();
            assert!(back == content[..back.len()]);
            assert!(a.records_mut().next_to_send() <= 51);
        });
        let mut got = vec![0; content.len()];
        b.read_exact(&mut got).unwrap();
        assert!(got == content);
        b.write_all(&got[..3_000_000]).unwrap();
        b.flush().unwrap();
        assert!(b.records_mut().next_to_send() <= 51);
    });
}

#[test]
fn rustls_at_the_other_end_understands_every_record_and_renewed_keys_both_ways() {
    let pki = Pki::new(&["a", "b"]);
    for suite in 0..2 {
        let mut provider = provider();
        provider.cipher_suites.swap(0, suite);
        provider.cipher_suites.truncate(1);
        let rustls::SupportedCipherSuite::Tls13(tls13) = provider.cipher_suites[0] else { panic!() };
        let common = rustls::crypto::CipherSuiteCommon { confidentiality_limit: 50, ..tls13.common };
        let tls13 = rustls::Tls13CipherSuite { common, ..*tls13 };
        provider.cipher_suites = vec![rustls::SupportedCipherSuite::Tls13(Box::leak(Box::new(tls13)))];
        let (cert, key) = (pki.path("a/node.crt"), pki.path("a/node.key"));
        let client = Identity::load_at(&pki.path("ca.crt"), &cert, &key, UnixTime::now(), provider).unwrap();

        let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr()).unwrap();
        let content: Vec<u8> = (0..20_000_000).map(|i| (i % 247) as u8).collect();
        thread::scope(|s| {
            s.spawn(|| {
                let (mut link, _) = listener.accept().unwrap().handshake(TIMEOUT).unwrap();
                link.records_mut().limit(50);
                let mut got = vec![0; content.len()];
                link.read_exact(&mut got).unwrap();
                assert!(got == content);
                link.write_all(&got).unwrap();
                link.flush().unwrap();
                assert_eq!(link.read(&mut [0]).unwrap(), 0, "the client ends it in good order");
            });
            let name = rustls_pki_types::ServerName::try_from("b").unwrap();
            let tls = rustls::ClientConnection::new(client.client(), name).unwrap();
            let mut stream = rustls::StreamOwned::new(tls, tcp);
            // The first of the content may come in one piece with the greeting, behind the handshake.
            stream.write_all(&hello("a").encode()).unwrap();
            stream.write_all(&content).unwrap();
            tranship_wire::read_welcome(&mut stream).unwrap();
            let mut back = vec![0; content.len()];
            stream.read_exact(&mut back).unwrap();
            assert!(back == content);
            stream.conn.send_close_notify();
            stream.flush().unwrap();
            let _ = stream.read(&mut [0]);
        });
    }
}

#[test]
fn a_dead_peers_socket_ends_by_itself() {
    use nix::sys::socket::{getsockopt, sockopt};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = stream.try_clone().unwrap();
    crate::socket::Socket::new(stream.into()).unwrap();
    assert!(other.nodelay().unwrap());
    assert!(getsockopt(&other, sockopt::KeepAlive).unwrap());
    assert_eq!(getsockopt(&other, sockopt::TcpUserTimeout).unwrap(), 10_000);
    let keepalive = (
        getsockopt(&other, sockopt::TcpKeepIdle).unwrap(),
        getsockopt(&other, sockopt::TcpKeepInterval).unwrap(),
        getsockopt(&other, sockopt::TcpKeepCount).unwrap(),
    );
    assert_eq!(keepalive, (5, 2, 3));
}

#[test]
fn a_byte_changed_on_the_way_is_an_error() {
    let pki = Pki::new(&["a", "b"]);
    let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let (server, addr) = (listener.local_addr(), proxy.local_addr().unwrap().to_string());
    thread::spawn(move || {
        let (mut caller, _) = proxy.accept().unwrap();
        let mut callee = TcpStream::connect(server).unwrap();
        let (mut back_from, mut back_to) = (callee.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut back_from, &mut back_to));
        let mut unharmed = (&caller).take(20_000);
        io::copy(&mut unharmed, &mut callee).unwrap();
        let mut byte = [0];
        caller.read_exact(&mut byte).unwrap();
        callee.write_all(&[byte[0] ^ 1]).unwrap();
        let _ = io::copy(&mut caller, &mut callee);
    });
    thread::scope(|s| {
        let taken = s.spawn(|| {
            let (mut link, _) = listener.accept().unwrap().handshake(TIMEOUT).unwrap();
            io::copy(&mut link, &mut io::sink()).unwrap_err().kind()
        });
        let mut link = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT).unwrap();
        let _ = link.write_all(&[1; 100_000]).and_then(|()| link.flush());
        assert_eq!(taken.join().unwrap(), ErrorKind::InvalidData);
    });
}

#[test]
fn a_read_sends_what_was_written_before() {
    let (mut a, mut b) = pair();
    a.set_timeout(Some(TIMEOUT)).unwrap();
    let echo = thread::spawn(move || {
        let mut byte = [0];
        b.read_exact(&mut byte).unwrap();
        b.write_all(&byte).unwrap();
        assert_eq!(b.read(&mut byte).unwrap(), 0);
    });
    a.write_all(&[42]).unwrap();
    let mut byte = [0];
    a.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [42]);
    drop(a);
    echo.join().unwrap();
}

#[test]
fn a_read_that_times_out_can_be_repeated() {
    let (mut a, mut b) = pair();
    a.set_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(a.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
    b.write_all(&[7]).unwrap();
    b.flush().unwrap();
    let mut byte = [0];
    a.set_timeout(Some(TIMEOUT)).unwrap();
    a.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn a_link_that_gives_way_keeps_to_the_pace_that_was_set() {
    const BYTES: u64 = 8_000_000;
    let (mut a, mut b) = pair();
    a.set_pace(Some(BYTES)).unwrap();
    a.give_way().unwrap();
    let start = Instant::now();
    let reader = thread::spawn(move || io::copy(&mut (&mut b).take(BYTES), &mut io::sink()).unwrap());
    // Long enough that it looks several times how it fares, and rises.
    a.write_all(&vec![7; BYTES as usize]).unwrap();
    a.flush().unwrap();
    assert_eq!(reader.join().unwrap(), BYTES);
    // A second at that pace; the first bytes go at once.
    assert!(start.elapsed() > Duration::from_millis(500), "{:?}", start.elapsed());
    assert!(!a.is_narrow());
}

#[test]
fn a_closer_wakes_whoever_waits_and_both_ends_get_an_error() {
    let (mut a, mut b) = pair();
    let closer = a.closer();
    let waiting = thread::spawn(move || a.read(&mut [0]));
    closer.close();
    assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    b.set_timeout(Some(TIMEOUT)).unwrap();
    b.read(&mut [0]).unwrap_err();
    closer.close();
}

/// Passes bytes on from one caller to `to`, cut after `limit` bytes of the caller's.
fn cutting_proxy(to: String, limit: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (caller, _) = listener.accept().unwrap();
        let callee = TcpStream::connect(to).unwrap();
        let (mut back_from, mut back_to) = (callee.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut back_from, &mut back_to));
        let _ = io::copy(&mut (&caller).take(limit), &mut &callee);
        let _ = callee.shutdown(Shutdown::Both);
        let _ = caller.shutdown(Shutdown::Both);
    });
    addr
}

#[test]
fn a_link_cut_in_the_middle_is_an_error_never_an_end() {
    let pki = Pki::new(&["a", "b"]);
    for limit in [0, 1, 100, 500, 1000, 5_000, 50_000, 300_000] {
        let listener = Listener::bind(pki.load("b"), "127.0.0.1:0").unwrap();
        let addr = cutting_proxy(listener.local_addr().to_string(), limit);
        thread::scope(|s| {
            let server = s.spawn(|| {
                let (mut link, _) = listener.accept().unwrap().handshake(TIMEOUT).map_err(drop)?;
                io::copy(&mut link, &mut io::sink()).map_err(drop)
            });
            if let Ok(mut link) = Connector::new(pki.load("a")).connect(&node("b"), &addr, &hello("a"), TIMEOUT) {
                let _ = link.write_all(&vec![5; 1 << 20]).and_then(|()| link.flush());
                let _ = link.read(&mut [0]).unwrap_err();
                link.write_all(&vec![5; 1 << 20]).unwrap_err();
            }
            assert!(server.join().unwrap().is_err(), "{limit}");
        });
    }
}

#[test]
#[ignore = "measures: cargo test --release -p tranship-transport -- --ignored throughput --nocapture"]
fn throughput() {
    let total: usize = 6 << 30;
    for size in [4 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let (mut a, mut b) = pair();
        let start = Instant::now();
        thread::scope(|s| {
            s.spawn(|| {
                let pages: Vec<u8> = (0..size).map(|i| (i * 7 % 253) as u8).collect();
                let header = [9; 24];
                for _ in 0..total / size {
                    let n = a.write_vectored(&[io::IoSlice::new(&header), io::IoSlice::new(&pages)]).unwrap();
                    assert_eq!(n, size + 24);
                }
                a.flush().unwrap();
            });
            let (mut header, mut pages) = ([0; 24], vec![0; size]);
            for _ in 0..total / size {
                b.read_exact(&mut header).unwrap();
                b.read_exact(&mut pages).unwrap();
            }
        });
        let seconds = start.elapsed().as_secs_f64();
        println!("frames of {:4} KiB: {:.2} GB/s", size >> 10, total as f64 / seconds / 1e9);
    }
    let (mut a, mut b) = pair();
    let rounds = 20_000;
    let start = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            for i in 0..rounds {
                write_message(&mut a, &i).unwrap();
                assert_eq!(read_message::<_, u32>(&mut a).unwrap(), i);
            }
        });
        for _ in 0..rounds {
            let i: u32 = read_message(&mut b).unwrap();
            write_message(&mut b, &i).unwrap();
        }
    });
    println!("round trip of a message: {:.1} µs", start.elapsed().as_secs_f64() / f64::from(rounds) * 1e6);
}
