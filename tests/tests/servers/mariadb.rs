//! MariaDB from an image such as the official one, with its data in a volume.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use tranship_e2e::{Dialogue, refused_move_with};
use tranship_lab::{CLIENT, Lab};
use tranship_types::BlockerKind;

use crate::Site;
use crate::image::Image;

const MARIADB: Image = Image {
    name: "docker.io/library/mariadb:lab",
    packages: &["mariadb-server-core", "mariadb-client-core"],
    alone: &[],
    owner: ("mysql", 999),
    user: "mysql",
    port: 3306,
    volumes: &["/var/lib/mysql"],
    stop_signal: "SIGTERM",
    own: "mkdir -p etc/mysql; printf '%s\\n' 'CREATE USER IF NOT EXISTS lab;' 'GRANT ALL ON *.* TO lab;' > etc/mysql/first.sql",
    start: "[ -d /var/lib/mysql/mysql ] || mariadb-install-db --no-defaults --datadir=/var/lib/mysql --skip-test-db --force || exit; \
            exec mariadbd --no-defaults --datadir=/var/lib/mysql --socket=/tmp/mariadb.sock --bind-address=0.0.0.0 \
                          --skip-name-resolve --init-file=/etc/mysql/first.sql $ARGUMENTS",
};

/// What one account gives the other gets.
const TABLES: &str = "CREATE DATABASE shop; USE shop; CREATE TABLE kept (n int) ENGINE=InnoDB; \
                      CREATE TABLE ordered (n int) ENGINE=InnoDB; CREATE TABLE account (id int, amount int) ENGINE=InnoDB; \
                      INSERT INTO account VALUES (1, 0), (2, 0)";

/// A transaction that is open, its locks and a temporary table are there after each move; nothing that another session has committed is lost.
pub fn moves_at_work(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    MARIADB.make(lab, &site.engine)?;
    site.start_image(lab, number, &MARIADB, &[])?;
    accepts(lab, site, ip)?;
    if is_refused_with_a_ring(lab, site)? {
        site.engine.remove(lab, "a")?;
        // The next one may have another MAC address.
        lab.check(CLIENT, &["ip", "neighbour", "flush", "dev", "eth0"])?;
        site.start_image(lab, number, &MARIADB, &["--env", "ARGUMENTS=--innodb-use-native-aio=0"])?;
        accepts(lab, site, ip)?;
    }
    site.is_managed(lab, "a", "a line before the moves")?;
    let mut inside = Dialogue::with_mariadb(lab, ip)?;
    let mut outside = Dialogue::with_mariadb(lab, ip)?;
    inside.ask(TABLES)?;
    outside.ask("USE shop")?;
    inside.ask("SET @mine = 7; CREATE TEMPORARY TABLE basket (n int); BEGIN; INSERT INTO ordered VALUES (0)")?;
    let identity = "SELECT CONNECTION_ID(), trx_id, @mine FROM information_schema.innodb_trx \
                    WHERE trx_mysql_thread_id = CONNECTION_ID()";
    let before = inside.ask(identity)?;

    let mut committing = Dialogue::with_mariadb(lab, ip)?;
    committing.ask("USE shop")?;
    let enough = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&enough);
    let committed = std::thread::spawn(move || -> Result<u64> {
        let mut n = 0;
        while !until.load(Ordering::Relaxed) {
            n += 1;
            committing.ask(&format!(
                "BEGIN; UPDATE account SET amount = amount - 1 WHERE id = 1; INSERT INTO kept VALUES ({n}); \
                 UPDATE account SET amount = amount + 1 WHERE id = 2; COMMIT"
            ))?;
        }
        Ok(n)
    });
    let moved = [("a", "b"), ("b", "a")].iter().enumerate().try_for_each(|(done, (from, to))| {
        site.moves(lab, from, to)?;
        let now = inside.ask(identity)?;
        ensure!(now == before, "on {to} the session's transaction is {now} instead of {before}");
        let n = done + 1;
        inside.ask(&format!("INSERT INTO ordered VALUES ({n}); INSERT INTO basket VALUES ({n})"))?;
        let seen = outside.ask("SELECT count(*) FROM ordered")?;
        ensure!(seen == "0", "others see {seen} rows of a transaction that is not committed");
        Ok(())
    });
    let at_work = !committed.is_finished();
    enough.store(true, Ordering::Relaxed);
    let committed = committed.join().map_err(|_| anyhow!("the committing thread panicked"));
    moved?;
    let committed = committed??;
    ensure!(at_work, "the transactions ended before the last move");
    let basket =
        inside.ask("INSERT INTO ordered SELECT n + 10 FROM basket; COMMIT; SELECT count(*), sum(n) FROM basket")?;
    ensure!(basket == "2\t3", "the temporary table has {basket}");

    let look = "SELECT (SELECT group_concat(n ORDER BY n) FROM ordered), (SELECT count(*) FROM kept), \
                       (SELECT max(n) FROM kept), (SELECT group_concat(amount ORDER BY id) FROM account)";
    let expected = format!("0,1,2,11,12\t{committed}\t{committed}\t-{committed},{committed}");
    let seen = outside.ask(look)?;
    ensure!(seen == expected, "there is {seen} instead of {expected}");
    drop((inside, outside));
    site.is_managed(lab, "a", "a line after the moves")?;

    site.stops_and_starts(lab, "a")?;
    accepts(lab, site, ip).context("after stop and start")?;
    let seen = Dialogue::with_mariadb(lab, ip)?.ask(&format!("USE shop; {look}"))?;
    ensure!(seen == expected, "after stop and start there is {seen} instead of {expected}");
    eprintln!("{committed} transactions, all there");
    site.end(lab, "a")?;
    site.engine.remove_image(lab, MARIADB.name)
}

fn accepts(lab: &Lab, site: &Site, ip: Ipv4Addr) -> Result<()> {
    let (ip, ask) = (ip.to_string(), "SELECT 1");
    let ask = ["mariadb", "--no-defaults", "--host", &ip, "--user", "lab", "--connect-timeout", "2", "--execute", ask];
    site.answers(lab, "a", || Ok(lab.exec(CLIENT, &ask)?.status.success().then_some(())))
}

/// Where it may, MariaDB uses an io_uring, which CRIU cannot carry: that is said before the freeze, with what is to be done. Whether it does.
fn is_refused_with_a_ring(lab: &Lab, site: &Site) -> Result<bool> {
    let pid = site.engine.pid(lab, "a")?.context("it does not run")?;
    if !lab.check("a", &["cat", &format!("/proc/{pid}/maps")])?.contains("[io_uring]") {
        eprintln!("{} lets MariaDB have no io_uring", site.engine.engine);
        return Ok(false);
    }
    let refusal = refused_move_with(lab, "a", site.engine.name, "b", site.moving)?;
    refusal.names(BlockerKind::Descriptor, "io_uring")?;
    ensure!(refusal.text.contains("innodb_use_native_aio=0"), "the remedy is not named: {refusal:?}");
    Ok(true)
}
