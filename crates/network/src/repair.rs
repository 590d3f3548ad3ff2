//! Connections that a CRIU which was killed in the middle of a dump has left in repair mode: they would send nothing any more.

use std::os::fd::AsFd;

use nix::libc;
use tranship_sys::process::OpenFiles;
use tranship_sys::socket;

/// Of include/uapi/linux/tcp.h: the end of repair mode, without a window probe to a peer that may be shut out just then.
const TCP_REPAIR_OFF_NO_WP: i32 = -1;

/// Takes the connections of frozen processes out of repair mode. Returns how many were in it. What ends meanwhile, or cannot be looked
/// at, is left out.
pub fn end_repair(pids: &[u32]) -> usize {
    pids.iter().map(|pid| end_repair_of(*pid)).sum()
}

fn end_repair_of(pid: u32) -> usize {
    let (Ok(files), Ok(entries)) = (OpenFiles::of(pid), std::fs::read_dir(format!("/proc/{pid}/fd"))) else { return 0 };
    let mut ended = 0;
    for entry in entries.flatten() {
        let is_socket =
            std::fs::read_link(entry.path()).is_ok_and(|kind| kind.to_string_lossy().starts_with("socket:"));
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_socket);
        let Some(taken) = number.and_then(|number| files.take(number).ok()) else { continue };
        // Sockets that are none of TCP have no such option; what several processes share is in it once.
        if socket::int_option(taken.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR).is_ok_and(|state| state == 1) {
            let off = TCP_REPAIR_OFF_NO_WP.to_ne_bytes();
            match socket::set_option(taken.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, &off) {
                Ok(()) => ended += 1,
                Err(error) => tracing::warn!(pid, %error, "a connection stays in repair mode"),
            }
        }
    }
    ended
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_connection_that_was_left_in_repair_mode_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let is_in = |stream: &TcpStream| socket::int_option(stream.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR);
        if let Err(error) = socket::set_option(there.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, &1i32.to_ne_bytes())
        {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
            eprintln!("skipped: no CAP_NET_ADMIN");
            return;
        }
        // Another process has it.
        let holder = there.try_clone().unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(std::os::fd::OwnedFd::from(holder))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        assert_eq!(is_in(&there).unwrap(), 1);
        // What a program has open can be looked at when it has begun.
        let ended = (0..100).map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            end_repair(&[child.id()])
        });
        assert_eq!(ended.into_iter().find(|ended| *ended > 0), Some(1));
        assert_eq!(is_in(&there).unwrap(), 0);
        assert_eq!(end_repair(&[child.id()]), 0);
        child.kill().unwrap();
        child.wait().unwrap();
        let mut there = there;
        there.write_all(b"on").unwrap();
        let mut heard = [0; 2];
        here.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"on");
    }
}
