//! nginx, into whose volume a file is being uploaded.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tranship_e2e::wait_until;
use tranship_lab::{CLIENT, Lab};

use crate::Site;

/// Lines, of nine bytes each, that are sent at a time.
const PIECE: u64 = 2000;

/// The upload ends well, and what has arrived has the digest of what was sent.
pub fn arrives_whole(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    let configuration = "daemon off; user www-data; worker_processes 2; pid /tmp/nginx.pid; error_log /tmp/error.log; \
        events { worker_connections 64; } \
        http { access_log off; client_body_temp_path /data/coming; client_max_body_size 0; proxy_temp_path /tmp/p; \
               fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s; \
               server { listen 80; location / { root /data/files; dav_methods PUT; } } }";
    let script = format!(
        "mkdir /data/files && chown www-data /data/files && echo '{configuration}' > /tmp/nginx.conf && \
         exec nginx -e /tmp/error.log -c /tmp/nginx.conf"
    );
    site.start(lab, number, &script)?;
    wait_until("nginx to answer", Duration::from_secs(20), || {
        Ok(lab.connect(CLIENT, (ip, 80).into(), Duration::from_secs(1)).ok().map(drop))
    })?;
    let url = format!("http://{ip}/file");
    let mut curl = lab.spawn(
        CLIENT,
        &["curl", "--silent", "--show-error", "--fail", "--max-time", "55", "--upload-file", "-", &url],
    )?;
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
    for (n, (from, to)) in [("a", "b"), ("b", "a"), ("a", "b")].into_iter().enumerate() {
        // It is at work: a part of the file, more each time, lies where nginx collects it.
        let least = (n + 1) * 2_000_000;
        let arrived = "find /data/coming -type f -printf '%s\\n' | head -n 1";
        wait_until("the upload to go on", Duration::from_secs(20), || {
            let bytes = site.engine.execute(lab, from, arrived)?.trim().parse().unwrap_or(0);
            Ok((bytes >= least).then_some(()))
        })?;
        site.moves(lab, from, to)?;
        ensure!(curl.try_wait()?.is_none(), "the upload was over before move {} was", n + 1);
    }
    enough.store(true, Ordering::Relaxed);
    let lines = sender.join().map_err(|_| anyhow!("the sending thread panicked"))?.context("sending")?;
    let status = wait_until("the upload to end", Duration::from_secs(40), || Ok(curl.try_wait()?))?;
    let mut said = String::new();
    curl.stderr.take().context("curl has no stderr")?.read_to_string(&mut said)?;
    ensure!(status.success(), "curl ended with {status}: {said}");

    let digest = |text: String| text.split_whitespace().next().unwrap_or_default().to_owned();
    let sent = digest(lab.check(CLIENT, &["sh", "-c", &format!("seq -f %08.0f 1 {lines} | sha256sum")])?);
    let arrived = digest(site.engine.execute(lab, "b", "sha256sum /data/files/file")?);
    ensure!(arrived == sent && sent.len() == 64, "the file's digest is {arrived} instead of {sent}");
    site.end(lab, "b")
}
