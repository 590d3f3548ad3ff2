//! How much of the CPUs a container may use, cgroup versions 1 and 2: for a container that writes to memory faster than the
//! link carries, and whose owner would rather have it slower for a moment than dependent on two nodes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::FreezerError;

/// Length of the period in which a limited container gets its share, in µs: short, so that it never stands still for long.
const PERIOD_US: u64 = 20_000;
/// Least share of a period that the kernel accepts, in µs.
const LEAST_US: u64 = 1_000;

/// The CPU cgroup of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cpu {
    /// `cpu.cfs_quota_us` and `cpu.cfs_period_us` in the first directory, `cpuacct.usage` in the second.
    V1(PathBuf, PathBuf),
    /// `cpu.max` and `cpu.stat` in this directory.
    V2(PathBuf),
}

impl Cpu {
    /// CPU time that its tasks have had so far.
    pub fn used(&self) -> Result<Duration, FreezerError> {
        match self {
            Cpu::V1(_, accounting) => {
                let text = read(&accounting.join("cpuacct.usage"))?;
                Ok(Duration::from_nanos(text.trim().parse().unwrap_or(0)))
            }
            Cpu::V2(directory) => {
                let text = read(&directory.join("cpu.stat"))?;
                let us = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
                Ok(Duration::from_micros(us.unwrap_or(0)))
            }
        }
    }

    /// The limit that it has now, to be given to [`Self::restore`].
    pub fn limit(&self) -> Result<String, FreezerError> {
        match self {
            Cpu::V1(directory, _) => {
                let [quota, period] = ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|file| read(&directory.join(file)));
                Ok(format!("{} {}", quota?.trim(), period?.trim()))
            }
            Cpu::V2(directory) => Ok(read(&directory.join("cpu.max"))?.trim().to_owned()),
        }
    }

    /// Lets it use so many CPUs from now on, e.g. 0.5.
    pub fn restrict(&self, cpus: f64) -> Result<(), FreezerError> {
        let quota = ((cpus * PERIOD_US as f64) as u64).max(LEAST_US);
        self.restore(&format!("{quota} {PERIOD_US}"))
    }

    /// Gives it a limit as [`Self::limit`] returned it.
    pub fn restore(&self, limit: &str) -> Result<(), FreezerError> {
        match self {
            Cpu::V1(directory, _) => {
                let (quota, period) = limit.split_once(' ').unwrap_or((limit, "100000"));
                // No quota fits every period; with one, the new quota might be refused for the old period.
                write(&directory.join("cpu.cfs_quota_us"), "-1")?;
                write(&directory.join("cpu.cfs_period_us"), period)?;
                write(&directory.join("cpu.cfs_quota_us"), quota)
            }
            Cpu::V2(directory) => write(&directory.join("cpu.max"), limit),
        }
    }
}

fn read(path: &Path) -> Result<String, FreezerError> {
    std::fs::read_to_string(path).map_err(|source| FreezerError::File { path: path.to_owned(), source })
}

fn write(path: &Path, text: &str) -> Result<(), FreezerError> {
    match std::fs::write(path, text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|source| FreezerError::File { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_set_and_given_back_on_both_versions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let put = |file: &str, text: &str| std::fs::write(path.join(file), text).unwrap();
        put("cpu.cfs_quota_us", "-1\n");
        put("cpu.cfs_period_us", "100000\n");
        put("cpuacct.usage", "1500000000\n");
        put("cpu.max", "max 100000\n");
        put("cpu.stat", "usage_usec 1500000\nuser_usec 1\n");
        let get = |file: &str| std::fs::read_to_string(path.join(file)).unwrap();
        for cpu in [Cpu::V1(path.clone(), path.clone()), Cpu::V2(path.clone())] {
            assert_eq!(cpu.used().unwrap(), Duration::from_millis(1500));
            let before = cpu.limit().unwrap();
            cpu.restrict(0.5).unwrap();
            assert_eq!(cpu.limit().unwrap(), "10000 20000");
            cpu.restrict(0.0).unwrap();
            assert_eq!(cpu.limit().unwrap(), "1000 20000");
            cpu.restore(&before).unwrap();
            assert_eq!(cpu.limit().unwrap(), before);
        }
        assert_eq!((get("cpu.cfs_quota_us").as_str(), get("cpu.max").as_str()), ("-1", "max 100000"));
    }
}
