use std::path::PathBuf;

use anyhow::{Context, Result};

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
