//! How much of the CPUs a container may use, cgroup versions 1 and 2: less for one that writes to memory faster than the
//! link carries, and whose owner would rather have it slower for a moment than dependent on two nodes; and as much as there
//! is while CRIU works in its cgroup, and the container waits for it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use tranship_sys::process;

use crate::FreezerError;

/// Where the hierarchies of cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Length of the period in which a limited container gets its share, in µs: short, so that it never stands still for long.
const PERIOD_US: u64 = 20_000;
/// Least share of a period that the kernel accepts, in µs.
const LEAST_US: u64 = 1_000;

/// What a container may have of the CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// As [`Cpu::limit`] tells it.
    limit: String,
    /// Its weight against other cgroups; `None` where it has none to set.
    weight: Option<String>,
    /// 1: it gets what nobody else wants. `None` where the kernel does not have that.
    idle: Option<String>,
}

/// The CPU cgroup of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cpu {
    /// `cpu.cfs_quota_us` and `cpu.cfs_period_us` in the first directory, `cpuacct.usage` in the second.
    V1(PathBuf, PathBuf),
    /// `cpu.max` and `cpu.stat` in this directory.
    V2(PathBuf),
}

impl Cpu {
    /// That of a process; `None` where it is in none, or in the same as one of `others`.
    pub fn of_process(pid: u32, others: &[u32]) -> Option<Self> {
        let path = |pid: u32| Some(of_cgroups(&process::text(format!("/proc/{pid}/cgroup")).ok()?, Path::new(ROOT)));
        let own = path(pid)??;
        let is_own = |other: &u32| path(*other).is_none_or(|other| other.as_ref() == Some(&own));
        (!others.iter().any(is_own)).then_some(own)
    }

    /// That of a container whose cgroup of version 2 this is. `None` where the CPU controller is not enabled for it, as in a subtree that was
    /// delegated without it: then nothing of the CPUs is limited there, or can be.
    pub(crate) fn of_version_2(directory: PathBuf) -> Option<Self> {
        directory.join("cpu.max").exists().then_some(Cpu::V2(directory))
    }

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

    /// What it may have now, to be given back by [`Self::give_back`].
    ///
    /// # Errors
    /// The limit cannot be read.
    pub fn share(&self) -> Result<Share, FreezerError> {
        let read = |file: &str| std::fs::read_to_string(self.directory().join(file)).ok();
        let [weight, idle] = [self.weight_file(), "cpu.idle"].map(|file| read(file).map(|text| text.trim().to_owned()));
        Ok(Share { limit: self.limit()?, weight, idle })
    }

    /// Lets it have all that there is, before other cgroups beside it.
    ///
    /// # Errors
    /// A file of the cgroup cannot be written.
    pub fn lift(&self) -> Result<(), FreezerError> {
        let all = self.all();
        self.restore(&all.limit)?;
        // The kernel takes no weight for a cgroup that is idle.
        for (file, value) in [("cpu.idle", all.idle), (self.weight_file(), all.weight)] {
            if let Some(value) = value.filter(|_| self.directory().join(file).exists()) {
                write(&self.directory().join(file), &value)?;
            }
        }
        Ok(())
    }

    /// Whether it has all that there is, as [`Self::lift`] gives it.
    ///
    /// # Errors
    /// The limit cannot be read.
    pub fn is_lifted(&self) -> Result<bool, FreezerError> {
        let (all, now) = (self.all(), self.share()?);
        let same = |now: &Option<String>, all: &Option<String>| now.is_none() || now == all;
        Ok(now.limit == all.limit && same(&now.weight, &all.weight) && same(&now.idle, &all.idle))
    }

    /// Takes [`Self::lift`] back: gives it the share that [`Self::share`] returned before, but for what somebody has changed since.
    ///
    /// # Errors
    /// A file of the cgroup cannot be read or written.
    pub fn give_back(&self, share: &Share) -> Result<(), FreezerError> {
        if !self.directory().exists() {
            return Ok(());
        }
        let (all, now) = (self.all(), self.share()?);
        if now.limit == all.limit {
            self.restore(&share.limit)?;
        }
        for (file, value, now, all) in
            [(self.weight_file(), &share.weight, now.weight, all.weight), ("cpu.idle", &share.idle, now.idle, all.idle)]
        {
            // An idle cgroup has its weight by that.
            let is_given = share.idle.as_deref() == Some("1") && file != "cpu.idle";
            if let Some(value) = value.as_ref().filter(|_| now == all && !is_given) {
                write(&self.directory().join(file), value)?;
            }
        }
        Ok(())
    }

    /// All that there is.
    fn all(&self) -> Share {
        let [limit, weight] = match self {
            Cpu::V1(..) => ["-1 100000", "262144"],
            Cpu::V2(_) => ["max 100000", "10000"],
        };
        Share { limit: limit.to_owned(), weight: Some(weight.to_owned()), idle: Some("0".to_owned()) }
    }

    fn directory(&self) -> &Path {
        match self {
            Cpu::V1(directory, _) | Cpu::V2(directory) => directory,
        }
    }

    fn weight_file(&self) -> &'static str {
        match self {
            Cpu::V1(..) => "cpu.shares",
            Cpu::V2(_) => "cpu.weight",
        }
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

/// By the `/proc/PID/cgroup` of a process, where the hierarchies are below this root.
fn of_cgroups(cgroups: &str, root: &Path) -> Option<Cpu> {
    let within = |path: &str, directories: &[&str]| {
        let path = path.trim_start_matches('/');
        directories.iter().map(|directory| root.join(directory).join(path)).find(|found| found.is_dir())
    };
    let of = |controller: &str| {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let has = controllers.split(',').any(|one| one == controller);
            has.then(|| within(path, &[controllers, controller]))?
        })
    };
    if let (Some(limits), Some(accounting)) = (of("cpu"), of("cpuacct")) {
        return Some(Cpu::V1(limits, accounting));
    }
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    within(path, &["", "unified"]).and_then(Cpu::of_version_2)
}

fn read(path: &Path) -> Result<String, FreezerError> {
    std::fs::read_to_string(path).map_err(|source| FreezerError::File { path: path.to_owned(), source })
}

fn write(path: &Path, text: &str) -> Result<(), FreezerError> {
    match std::fs::write(path, text) {
        // The cgroup is gone, or going.
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ENODEV as i32) => {
            Ok(())
        }
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
    #[test]
    fn a_share_is_lifted_and_given_back_on_both_versions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let put = |file: &str, text: &str| std::fs::write(path.join(file), text).unwrap();
        let get = |file: &str| std::fs::read_to_string(path.join(file)).unwrap();
        put("cpu.cfs_quota_us", "5000\n");
        put("cpu.cfs_period_us", "20000\n");
        put("cpu.shares", "2\n");
        put("cpu.idle", "0\n");
        put("cpu.max", "5000 20000\n");
        put("cpu.weight", "1\n");
        for cpu in [Cpu::V1(path.clone(), path.clone()), Cpu::V2(path.clone())] {
            let share = cpu.share().unwrap();
            cpu.lift().unwrap();
            assert!(["-1 100000", "max 100000"].contains(&cpu.limit().unwrap().as_str()));
            assert!(cpu.is_lifted().unwrap());
            cpu.give_back(&share).unwrap();
            assert_eq!(cpu.share().unwrap(), share);
            // What somebody has set meanwhile stays.
            cpu.lift().unwrap();
            cpu.restore("7000 20000").unwrap();
            assert!(!cpu.is_lifted().unwrap());
            cpu.give_back(&share).unwrap();
            assert_eq!(cpu.limit().unwrap(), "7000 20000");
            assert_eq!(cpu.share().unwrap().weight, share.weight);
            // An idle one gets its weight by being idle.
            put("cpu.idle", "1\n");
            let share = cpu.share().unwrap();
            cpu.lift().unwrap();
            assert_eq!(get("cpu.idle"), "0");
            cpu.give_back(&share).unwrap();
            assert_eq!(get("cpu.idle"), "1");
            put("cpu.idle", "0\n");
            put(cpu.weight_file(), "1\n");
        }
    }

    #[test]
    fn the_cgroup_of_a_process_is_found_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let own = |path: &str| root.path().join(path);
        for path in ["cpu,cpuacct/docker/a", "docker/b", "docker/unlimited"] {
            std::fs::create_dir_all(own(path)).unwrap();
        }
        std::fs::write(own("docker/b/cpu.max"), "max 100000\n").unwrap();
        let v1 = "9:cpuset:/\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/x\n0::/docker/b\n";
        let expected = own("cpu,cpuacct/docker/a");
        assert_eq!(of_cgroups(v1, root.path()), Some(Cpu::V1(expected.clone(), expected)));
        assert_eq!(of_cgroups("0::/docker/b\n", root.path()), Some(Cpu::V2(own("docker/b"))));
        assert_eq!(of_cgroups("0::/docker/c\n", root.path()), None);
        assert_eq!(of_cgroups("0::/docker/unlimited\n", root.path()), None);
        assert_eq!(Cpu::of_process(std::process::id(), &[std::process::id()]), None);
    }
}
