//! Apache's httpd from an image such as the official one, with a slow download and an upload under way.

use std::io::{BufReader, Read};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tranship_e2e::wait_until;
use tranship_lab::{CLIENT, Lab};

use crate::Site;
use crate::image::Image;
use crate::upload::{Upload, digest};

const HTTPD: Image = Image {
    name: "docker.io/library/httpd:lab",
    packages: &["apache2-bin"],
    alone: &[],
    owner: ("www-data", 33),
    user: "",
    port: 80,
    volumes: &["/usr/local/apache2/htdocs"],
    stop_signal: "SIGWINCH",
    own: "mkdir -p usr/local/apache2/conf usr/local/apache2/logs; \
          chown www-data usr/local/apache2/logs; cat > usr/local/apache2/conf/httpd.conf <<END
            ServerRoot /usr/local/apache2
            ServerName httpd
            Listen 80
            User www-data
            Group www-data
            LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
            LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
            LoadModule dav_module /usr/lib/apache2/modules/mod_dav.so
            LoadModule dav_fs_module /usr/lib/apache2/modules/mod_dav_fs.so
            DavLockDB /usr/local/apache2/logs/locks
            ErrorLog /proc/self/fd/2
            TransferLog /proc/self/fd/1
            DocumentRoot /usr/local/apache2/htdocs
            <Location />
                Dav On
                Require all granted
            </Location>
END",
    start: "exec apache2 -d /usr/local/apache2 -f conf/httpd.conf -D FOREGROUND",
};
/// The file that is downloaded has so many lines, of eight bytes each.
const LINES: usize = 5_000_000;

/// Download and upload go on over two moves and end well, and another httpd finds what was uploaded.
pub fn ends_what_it_has_begun(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    HTTPD.make(lab, &site.engine)?;
    site.start_image(lab, number, &HTTPD, &[])?;
    let answers =
        || site.answers(lab, "a", || Ok(lab.connect(CLIENT, (ip, 80).into(), Duration::from_secs(1)).ok().map(drop)));
    answers()?;
    site.is_managed(lab, "a", "a line before the moves")?;
    let execute = |node: &str, script: &str| site.engine.execute(lab, node, script);
    execute("a", &format!("cd /usr/local/apache2/htdocs; chown www-data .; seq -w 1 {LINES} > down"))?;
    let (download, mut upload) = (Download::begin(lab, ip)?, Upload::begin(lab, &format!("http://{ip}/up"))?);

    let moved = [("a", "b"), ("b", "a")].iter().enumerate().try_for_each(|(done, (from, to))| {
        let least = (done + 1) * 2_000_000;
        // What comes of an upload is collected in a file of another name.
        let arrived = "find /usr/local/apache2/htdocs -type f ! -name down -printf '%s\\n' | head -n 1";
        wait_until("the upload to go on", Duration::from_secs(20), || {
            let bytes: usize = execute(from, arrived)?.trim().parse().unwrap_or(0);
            Ok((bytes >= least).then_some(()))
        })?;
        download.goes_on(1_000_000)?;
        site.moves(lab, from, to)
    });
    let both = (!upload.is_over()?, !download.is_over());
    moved?;
    ensure!(both == (true, true), "upload and download were under way after the last move: {both:?}");
    download.end()?;
    let sent = upload.end(lab)?;
    let look = "cd /usr/local/apache2/htdocs; sha256sum up; stat -c %U:%s down";
    let found = execute("a", look)?;
    ensure!(digest(&found) == sent, "the upload's digest is {found} instead of {sent}");
    ensure!(site.log(lab, "a")?.contains("\"PUT /up HTTP/1.1\" 201"), "the log has only {:?}", site.log(lab, "a"));
    site.is_managed(lab, "a", "a line after the moves")?;

    site.stops_and_starts(lab, "a")?;
    answers().context("after stop and start")?;
    let again = execute("a", look)?;
    ensure!(again == found, "after stop and start there is {again} instead of {found}");
    let url = format!("http://{ip}/up");
    let fetched = lab.check(CLIENT, &["sh", "-c", "curl --silent --fail --max-time 20 \"$0\" | sha256sum", &url])?;
    ensure!(digest(&fetched) == sent, "what is downloaded has the digest {fetched} instead of {sent}");
    site.end(lab, "a")?;
    site.engine.remove_image(lab, HTTPD.name)
}

/// A client that reads no more than 2 MB/s until it is told to go on.
struct Download {
    bytes: Arc<AtomicU64>,
    enough: Arc<AtomicBool>,
    reader: std::thread::JoinHandle<Result<usize>>,
}

impl Download {
    fn begin(lab: &Lab, ip: Ipv4Addr) -> Result<Self> {
        let url = format!("http://{ip}/down");
        let curl = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", "--max-time", "90", &url];
        let mut curl = lab.spawn(CLIENT, &curl)?;
        let mut stream = BufReader::with_capacity(20_000, curl.stdout.take().context("curl has no stdout")?);
        let (bytes, enough) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, until) = (Arc::clone(&bytes), Arc::clone(&enough));
        let reader = std::thread::spawn(move || {
            let (mut lines, mut line) = (0, [0; 8]);
            while stream.read_exact(&mut line).is_ok() {
                lines += 1;
                ensure!(
                    line == format!("{lines:07}\n").as_bytes(),
                    "line {lines} is {:?}",
                    String::from_utf8_lossy(&line)
                );
                counted.store(lines * 8, Ordering::Relaxed);
                if lines % 2500 == 0 && !until.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            let mut said = String::new();
            curl.stderr.take().context("curl has no stderr")?.read_to_string(&mut said)?;
            let status = curl.wait()?;
            ensure!(status.success(), "after {lines} lines curl ended with {status}: {said}");
            Ok(usize::try_from(lines)?)
        });
        Ok(Self { bytes, enough, reader })
    }

    fn is_over(&self) -> bool {
        self.reader.is_finished()
    }

    /// Waits until so many bytes more have come.
    fn goes_on(&self, more: u64) -> Result<()> {
        let least = self.bytes.load(Ordering::Relaxed) + more;
        wait_until("the download to go on", Duration::from_secs(20), || {
            Ok((self.bytes.load(Ordering::Relaxed) >= least).then_some(()))
        })
    }

    /// Reads the rest at once; all of it has to be right.
    fn end(self) -> Result<()> {
        self.enough.store(true, Ordering::Relaxed);
        let lines = self.reader.join().map_err(|_| anyhow!("the reading thread panicked"))??;
        ensure!(lines == LINES, "the download had {lines} lines instead of {LINES}");
        Ok(())
    }
}
