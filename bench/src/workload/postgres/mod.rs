//! PostgreSQL under pgbench, with a client of ours beside it that sees every gap.

mod client;

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tranship_lab::{CLIENT, Lab, RunOptions};

use self::client::Client;
use super::{ADDRESS, LIMIT, Workload};
use crate::run::Figures;

/// Between two questions of the watching client.
const INTERVAL: Duration = Duration::from_millis(1);
/// pgbench ends by itself after this, which is longer than any move.
const LONGEST: &str = "900";
/// Questions that are answered before and after the move.
const ANSWERS: u64 = 500;
const STALL_MS: f64 = 20.0;

/// A database with its load.
pub struct PostgresLoad {
    pgbench: Child,
    client: Client,
    gaps: Gaps,
    resident_bytes: u64,
}

impl PostgresLoad {
    /// Makes a database cluster in the container's own memory, fills it and the shared buffers, and begins the load.
    pub fn start(lab: &Lab, node: &str, name: &str, shared_mib: u32, scale: u32) -> Result<Self> {
        let programs = programs()?;
        let user = nix::unistd::User::from_name("postgres")?.context("there is no user postgres; run `make setup`")?;
        let bin = programs.display();
        let script = format!(
            "exec >/tmp/log 2>&1; {bin}/initdb --pgdata=/tmp/data --auth=trust --username=postgres --no-sync && \
             echo 'host all all 10.77.0.0/24 trust' >> /tmp/data/pg_hba.conf && \
             exec {bin}/postgres -D /tmp/data -c listen_addresses='*' -c unix_socket_directories=/tmp -c fsync=off \
             -c shared_buffers={shared_mib}MB -c max_wal_size=128MB -c min_wal_size=64MB -c wal_level=minimal \
             -c max_wal_senders=0"
        );
        let mut options = RunOptions::new(ADDRESS, ["sh", "-c", &script]);
        options.user = (user.uid.as_raw(), user.gid.as_raw());
        lab.run(node, name, &options)?;
        let mut client = Client::connect(lab, LIMIT)?;
        let pgbench = programs.join("pgbench").display().to_string();
        let run = |own: &[&str]| {
            let target = ["-h", &ADDRESS.to_string(), "-U", "postgres", "postgres"].map(str::to_owned);
            let own = own.iter().map(|word| (*word).to_owned());
            std::iter::once(pgbench.clone()).chain(own).chain(target).collect::<Vec<_>>()
        };
        let filled = lab.exec(CLIENT, &run(&["-i", "-q", "-s", &scale.to_string()]))?;
        if !filled.status.success() {
            bail!("pgbench -i failed: {}", String::from_utf8_lossy(&filled.stderr).trim());
        }
        client.query("CREATE EXTENSION pg_prewarm")?;
        client.query("SELECT pg_prewarm('pgbench_accounts')")?;
        client.query("CREATE TABLE watched (n bigint); INSERT INTO watched VALUES (0)")?;
        let resident_bytes = u64::from(shared_mib) << 20;

        let mut command = lab.command(CLIENT, &run(&["-n", "-c", "4", "-j", "2", "-T", LONGEST]))?;
        let pgbench = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start pgbench in the client node")?;
        let gaps = Gaps::watch(Client::connect(lab, LIMIT)?);
        Ok(Self { pgbench, client, gaps, resident_bytes })
    }

    fn end_load(&mut self) {
        // It may have ended by itself.
        let _ = self.pgbench.kill();
        let _ = self.pgbench.wait();
    }
}

impl Workload for PostgresLoad {
    fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    fn mark(&mut self) -> Result<()> {
        self.gaps.wait(ANSWERS)?;
        self.gaps.mark();
        Ok(())
    }

    fn check(&mut self) -> Result<Figures> {
        self.gaps.wait(ANSWERS)?;
        if let Some(status) = self.pgbench.try_wait()? {
            bail!("pgbench ended in the move: {status}");
        }
        let figures = self.gaps.stop()?;
        self.end_load();
        // What every transaction adds to an account it adds to a teller and a branch too, and writes down.
        for table in ["accounts WHERE abalance <> 0", "tellers", "branches"] {
            let column = &table[..1];
            let difference = self.client.query(&format!(
                "SELECT (SELECT coalesce(sum({column}balance), 0) FROM pgbench_{table}) - \
                 (SELECT coalesce(sum(delta), 0) FROM pgbench_history)"
            ))?;
            if difference.as_deref() != Some("0") {
                bail!("pgbench's sums differ by {difference:?} in pgbench_{table}");
            }
        }
        Ok(figures)
    }

    fn progress(&mut self) -> Result<u64> {
        let count = self.client.query("SELECT count(*) FROM pgbench_history")?;
        count.and_then(|text| text.parse().ok()).context("pgbench_history cannot be counted")
    }
}

impl Drop for PostgresLoad {
    fn drop(&mut self) {
        self.end_load();
    }
}

/// A thread that counts in a row of the database, over and over.
struct Gaps {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    answers: u64,
    longest_ms: f64,
    stalls_ms: f64,
}

impl Gaps {
    fn watch(client: Client) -> Self {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::default()));
        let (flag, shown) = (Arc::clone(&stop), Arc::clone(&seen));
        let thread = std::thread::spawn(move || count(client, &flag, &shown));
        Self { stop, seen, thread: Some(thread) }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self) {
        let mut seen = self.seen();
        (seen.longest_ms, seen.stalls_ms) = (0.0, 0.0);
    }

    /// Waits for so many further answers.
    fn wait(&mut self, more: u64) -> Result<()> {
        let (due, deadline) = (self.seen().answers + more, Instant::now() + LIMIT);
        while self.seen().answers < due {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return self.stop().map(drop);
            }
            if Instant::now() >= deadline {
                bail!("the database's client did not get {more} answers within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<Figures> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the database's client has ended already")?;
        thread.join().map_err(|_| anyhow!("the thread of the database's client panicked"))??;
        let seen = *self.seen();
        Ok(vec![("client_gap_ms", seen.longest_ms), ("client_stalls_ms", seen.stalls_ms)])
    }
}

fn count(mut client: Client, stop: &AtomicBool, seen: &Mutex<Seen>) -> Result<()> {
    let (mut expected, mut last) = (0u64, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        expected += 1;
        let answer = client.query("UPDATE watched SET n = n + 1 RETURNING n")?;
        if answer.as_deref() != Some(&expected.to_string()) {
            bail!("the database counted to {answer:?} instead of {expected}");
        }
        let gap = last.elapsed().as_secs_f64() * 1e3;
        last = Instant::now();
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.answers += 1;
        seen.longest_ms = seen.longest_ms.max(gap);
        seen.stalls_ms += if gap > STALL_MS { gap } else { 0.0 };
        drop(seen);
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// The directory of the newest PostgreSQL's programs.
fn programs() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed; run `make setup`")?;
    let mut found: Vec<_> =
        versions.flatten().map(|e| e.path().join("bin")).filter(|p| p.join("postgres").exists()).collect();
    found.sort();
    found.pop().context("there is no PostgreSQL below /usr/lib/postgresql; run `make setup`")
}
