//! PostgreSQL from an image such as the official one, with its data in a volume, under load.

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use tranship_e2e::{Dialogue, make_pgbench_tables, pgbench, postgres_accepts, postgres_programs};
use tranship_lab::{CLIENT, Lab};

use crate::Site;
use crate::image::Image;

const POSTGRES: Image = Image {
    name: "docker.io/library/postgres:lab",
    packages: &["postgresql"],
    alone: &[],
    owner: ("postgres", 999),
    user: "postgres",
    port: 5432,
    volumes: &["/var/lib/postgresql/data"],
    stop_signal: "SIGINT",
    own: "",
    start: "set -e; set -- /usr/lib/postgresql/*/bin; data=/var/lib/postgresql/data/db; \
            if [ ! -e $data/PG_VERSION ]; then \
                $1/initdb --pgdata=$data --auth=trust --username=postgres --no-sync; \
                echo 'host all all 10.77.0.0/24 trust' >> $data/pg_hba.conf; \
            fi; \
            exec $1/postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/tmp",
};

/// What every transaction of pgbench adds to an account it adds to a teller and a branch too, and writes down.
const SUMS: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) - (SELECT sum(delta) FROM pgbench_history), \
                           (SELECT sum(tbalance) FROM pgbench_tellers) - (SELECT sum(delta) FROM pgbench_history), \
                           (SELECT sum(bbalance) FROM pgbench_branches) - (SELECT sum(delta) FROM pgbench_history)";

/// Nothing that was committed is lost, neither in memory nor on disk, and PostgreSQL is the same process all the time.
pub fn moves_at_work(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    let programs = postgres_programs()?;
    POSTGRES.make(lab, &site.engine)?;
    site.start_image(lab, number, &POSTGRES, &[])?;
    let accepts = || site.answers(lab, "a", || postgres_accepts(lab, &programs, ip));
    accepts()?;

    make_pgbench_tables(lab, &programs, ip)?;
    let mut session = Dialogue::with_psql(lab, &programs, ip)?;
    session.ask("CREATE TABLE kept (n int)")?;
    let identity = "SELECT pg_backend_pid(), pg_postmaster_start_time()";
    let before = session.ask(identity)?;

    // Longer than the moves take: it is ended when they are done.
    let limit = ["timeout", "60"].map(str::to_owned).to_vec();
    let load = pgbench(&programs, ip, &["-c", "4", "-j", "2", "-T", "50", "-P", "1"]);
    let mut busy = lab.spawn(CLIENT, &[limit, load].concat())?;
    let mut errors = BufReader::new(busy.stderr.take().context("pgbench has no stderr")?);
    // Its progress, a line a second, goes to stderr.
    let mut progress = String::new();
    while !progress.contains("progress: ") {
        ensure!(errors.read_line(&mut progress)? > 0, "pgbench ended at once: {progress}");
    }
    let progress = std::thread::spawn(move || errors.read_to_string(&mut progress).map(|_| progress));
    // Commits one row after the other, and knows of which it was told so.
    let mut committing = Dialogue::with_psql(lab, &programs, ip)?;
    let enough = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&enough);
    let committed = std::thread::spawn(move || -> Result<u64> {
        let mut n = 0;
        while !until.load(Ordering::Relaxed) {
            committing.ask(&format!("INSERT INTO kept VALUES ({})", n + 1))?;
            n += 1;
        }
        Ok(n)
    });

    let moved = [("a", "b"), ("b", "a")].iter().try_for_each(|(from, to)| {
        site.moves(lab, from, to)?;
        let now = session.ask(identity)?;
        ensure!(now == before, "on {to} it is {now} instead of {before}");
        Ok(())
    });
    let at_work = busy.try_wait()?.is_none();
    enough.store(true, Ordering::Relaxed);
    moved?;
    ensure!(at_work, "pgbench ended before the last move; it must run longer");
    let committed = committed.join().map_err(|_| anyhow!("the committing thread panicked"))??;
    // What was not committed then is undone.
    busy.kill()?;
    busy.wait()?;
    let progress =
        progress.join().map_err(|_| anyhow!("the reading thread panicked"))?.context("reading from pgbench")?;
    let well = progress.lines().filter(|line| !line.contains("vacuum")).all(|line| line.ends_with(", 0 failed"));
    ensure!(well, "pgbench says:\n{progress}");

    let counted = format!("SELECT count(*), max(n), {committed} FROM kept");
    let expected = format!("{committed}|{committed}|{committed}");
    let sums = session.ask(SUMS)?;
    ensure!(sums == "0|0|0", "pgbench's sums differ by {sums}");
    let done = session.ask("SELECT count(*) FROM pgbench_history")?;
    let seen = session.ask(&counted)?;
    ensure!(seen == expected, "{committed} rows were committed; there are (count, highest, committed): {seen}");
    drop(session);

    // What is on disk is as much: a new PostgreSQL begins with that.
    site.crashes_and_starts(lab, "a")?;
    accepts().context("after a crash")?;
    let mut session = Dialogue::with_psql(lab, &programs, ip)?;
    let seen = session.ask(&counted)?;
    ensure!(seen == expected, "{committed} rows were committed; after a crash there are: {seen}");
    let (sums, still) = (session.ask(SUMS)?, session.ask("SELECT count(*) FROM pgbench_history")?);
    ensure!(
        sums == "0|0|0" && still == done,
        "after a crash pgbench's sums differ by {sums}, and {still} of {done} rows are there"
    );
    eprintln!("{committed} rows and {done} transactions of pgbench, all there");
    drop(session);
    site.end(lab, "a")?;
    site.engine.remove_image(lab, POSTGRES.name)
}
