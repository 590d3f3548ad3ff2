//! nginx from an image such as the official one, into whose volume a file is being uploaded.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tranship_e2e::wait_until;
use tranship_lab::{CLIENT, Lab};

use crate::Site;
use crate::image::Image;

const NGINX: Image = Image {
    name: "docker.io/library/nginx:lab",
    packages: &["nginx-light"],
    alone: &[],
    owner: ("www-data", 33),
    user: "",
    port: 80,
    volumes: &["/data"],
    stop_signal: "SIGQUIT",
    own: "cat > etc/nginx/nginx.conf <<END
            user www-data;
            worker_processes 2;
            error_log /dev/stderr;
            events {
                worker_connections 64;
            }
            http {
                access_log /dev/stdout;
                client_body_temp_path /data/coming;
                client_max_body_size 0;
                server {
                    listen 80;
                    location / {
                        root /data;
                        dav_methods PUT;
                    }
                }
            }
END",
    start: "exec nginx -g 'daemon off;'",
};

/// Lines, of nine bytes each, that are sent at a time.
const PIECE: u64 = 2000;

/// The upload ends well, and what has arrived has the digest of what was sent.
pub fn arrives_whole(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    NGINX.make(lab, &site.engine)?;
    site.start_image(lab, number, &NGINX, &[])?;
    site.answers(lab, "a", || Ok(lab.connect(CLIENT, (ip, NGINX.port).into(), Duration::from_secs(1)).ok().map(drop)))?;
    let mut upload = Upload::begin(lab, &format!("http://{ip}/file"))?;
    for (n, (from, to)) in [("a", "b"), ("b", "a"), ("a", "b")].into_iter().enumerate() {
        // It is at work: a part of the file, more each time, lies where nginx collects it.
        let least = (n + 1) * 2_000_000;
        let arrived = "find /data/coming -type f -printf '%s\\n' | head -n 1";
        wait_until("the upload to go on", Duration::from_secs(20), || {
            let bytes = site.engine.execute(lab, from, arrived)?.trim().parse().unwrap_or(0);
            Ok((bytes >= least).then_some(()))
        })?;
        site.moves(lab, from, to)?;
        ensure!(!upload.is_over()?, "the upload was over before move {} was", n + 1);
    }
    let sent = upload.end(lab)?;
    let arrived = site.engine.execute(lab, "b", "sha256sum /data/file")?;
    ensure!(digest(&arrived) == sent, "the file's digest is {arrived} instead of {sent}");
    site.is_managed(lab, "b", "a line after the moves")?;
    site.end(lab, "b")?;
    site.engine.remove_image(lab, NGINX.name)
}

/// The digest that `sha256sum` has printed.
pub fn digest(printed: &str) -> &str {
    printed.split_whitespace().next().unwrap_or_default()
}

/// A client that uploads numbered lines until it is ended.
pub struct Upload {
    curl: Child,
    enough: Arc<AtomicBool>,
    sender: JoinHandle<std::io::Result<u64>>,
}

impl Upload {
    /// Begins one from the client node.
    pub fn begin(lab: &Lab, url: &str) -> Result<Self> {
        let curl = ["curl", "--silent", "--show-error", "--fail", "--max-time", "55", "--upload-file", "-", url];
        let mut curl = lab.spawn(CLIENT, &curl)?;
        let mut pipe = curl.stdin.take().context("curl has no stdin")?;
        let enough = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&enough);
        let sender = std::thread::spawn(move || -> std::io::Result<u64> {
            let mut lines = 0;
            while !until.load(Ordering::Relaxed) {
                let piece: String = (lines + 1..=lines + PIECE).map(|n| format!("{n:08}\n")).collect();
                pipe.write_all(piece.as_bytes())?;
                lines += PIECE;
                // An upload over a link of 6 MB/s.
                std::thread::sleep(Duration::from_millis(3));
            }
            Ok(lines)
        });
        Ok(Self { curl, enough, sender })
    }

    /// Whether it has ended by itself.
    pub fn is_over(&mut self) -> Result<bool> {
        Ok(self.curl.try_wait()?.is_some())
    }

    /// Ends it, which has to succeed; the SHA-256 of what was sent.
    pub fn end(self, lab: &Lab) -> Result<String> {
        self.enough.store(true, Ordering::Relaxed);
        let lines = self.sender.join().map_err(|_| anyhow!("the sending thread panicked"))?.context("sending")?;
        let mut curl = self.curl;
        let status = wait_until("the upload to end", Duration::from_secs(40), || Ok(curl.try_wait()?))?;
        let mut said = String::new();
        curl.stderr.take().context("curl has no stderr")?.read_to_string(&mut said)?;
        ensure!(status.success(), "curl ended with {status}: {said}");
        let sent = lab.check(CLIENT, &["sh", "-c", &format!("seq -f %08.0f 1 {lines} | sha256sum")])?;
        Ok(digest(&sent).to_owned())
    }
}
