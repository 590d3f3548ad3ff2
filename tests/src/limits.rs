//! The limits of a container's cgroups, of version 1 or 2.

use std::path::Path;

use anyhow::Result;
use tranship_lab::Lab;

/// Finds the cgroup of a process ($0) by controller.
const CGROUP: &str = r#"pid=$0
cgroup() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        echo "/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$pid/cgroup")"
    else
        echo "/sys/fs/cgroup/$1$(grep -E "^[0-9]+:([a-z_,]*,)?$1(,[a-z_,]*)?:" "/proc/$pid/cgroup" | cut -d: -f3)"
    fi
}
"#;
const READ: &str = r#"for directory in $(for controller in pids cpu memory cpuset blkio; do cgroup $controller; done | uniq); do
    cd "$directory"
    for file in pids.max cpu.shares cpu.cfs_* cpu.idle cpu.rt_* memory.*limit_in_bytes memory.swappiness memory.oom_control \
        cpuset.cpus cpuset.mems blkio*weight* blkio.throttle.*_device \
        cpu.max cpu.max.burst cpu.weight memory.max memory.high memory.low memory.min memory.swap.max io.max io.weight; do
        case $file in *kmem*) continue;; esac
        [ ! -e "$file" ] || echo "$file" $(cat "$file")
    done
done"#;

/// Whether containers have limits here: version 1 of cgroups is mounted, or version 2 with controllers.
#[must_use]
pub fn has_limits() -> bool {
    Path::new("/sys/fs/cgroup/pids").exists() || is_version_2()
}

/// Whether limits are those of version 2.
#[must_use]
pub fn is_version_2() -> bool {
    std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")
        .is_ok_and(|all| all.split_whitespace().any(|one| one == "pids"))
}

/// All limits that hold for a process of a node, a line each.
///
/// # Errors
/// If they cannot be read.
pub fn limits(lab: &Lab, node: &str, pid: &str) -> Result<String> {
    Ok(lab.check(node, &["sh", "-c", &format!("{CGROUP}{READ}"), pid])?)
}

/// Writes one of them: its controller and file, and the value. Of `files` the one that there is, of version 1 or 2.
///
/// # Errors
/// If it cannot be written.
pub fn set_limit(lab: &Lab, node: &str, pid: &str, (controller, files): (&str, &[&str]), value: &str) -> Result<()> {
    let script = format!(
        r#"{CGROUP}cd "$(cgroup "$1")" && value=$2 && shift 2 && for file; do if [ -e "$file" ]; then echo "$value" > "$file"; exit; fi; done; exit 1"#
    );
    lab.check(node, &[&["sh", "-c", &script, pid, controller, value], files].concat())?;
    Ok(())
}
