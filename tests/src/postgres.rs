use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tranship_lab::{CLIENT, Lab};

/// The directory of the newest PostgreSQL's programs.
///
/// # Errors
/// If there is none.
pub fn postgres_programs() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed; run `make setup`")?;
    let mut found: Vec<_> =
        versions.flatten().map(|e| e.path().join("bin")).filter(|p| p.join("postgres").exists()).collect();
    found.sort();
    found.pop().context("there is no PostgreSQL below /usr/lib/postgresql")
}

/// Whether PostgreSQL at an address accepts connections from the client node: `Some` if it does.
///
/// # Errors
/// If it cannot be asked.
pub fn postgres_accepts(lab: &Lab, programs: &Path, ip: Ipv4Addr) -> Result<Option<()>> {
    let ready = programs.join("pg_isready").display().to_string();
    Ok(lab.exec(CLIENT, &[ready.as_str(), "-q", "-h", &ip.to_string()])?.status.success().then_some(()))
}

/// A command that runs pgbench with these options against PostgreSQL at an address.
pub fn pgbench(programs: &Path, ip: Ipv4Addr, options: &[&str]) -> Vec<String> {
    let (bench, ip) = (programs.join("pgbench").display().to_string(), ip.to_string());
    let target = ["-h", &ip, "-U", "postgres", "postgres"];
    [bench.as_str()].iter().chain(options).chain(&target).map(|&word| word.to_owned()).collect()
}

/// Makes pgbench's tables, from the client node, within a minute.
///
/// # Errors
/// If it fails.
pub fn make_pgbench_tables(lab: &Lab, programs: &Path, ip: Ipv4Addr) -> Result<()> {
    let limit = ["timeout", "60"].map(str::to_owned).to_vec();
    let made = lab.exec(CLIENT, &[limit, pgbench(programs, ip, &["-i", "-q", "-s", "2"])].concat())?;
    ensure!(made.status.success(), "pgbench -i: {}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}
