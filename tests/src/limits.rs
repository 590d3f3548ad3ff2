//! The limits of a container's cgroups of version 1.

use anyhow::Result;
use tranship_lab::Lab;

/// Finds the cgroup of a process ($0) by controller.
const CGROUP: &str = r#"cgroup() {
    echo "/sys/fs/cgroup/$1$(grep -E "^[0-9]+:([a-z_,]*,)?$1(,[a-z_,]*)?:" "/proc/$pid/cgroup" | cut -d: -f3)"
}
pid=$0
"#;
const READ: &str = r#"for controller in pids cpu memory cpuset blkio; do
    cd "$(cgroup $controller)"
    for file in pids.max cpu.shares cpu.cfs_* cpu.idle cpu.rt_* memory.*limit_in_bytes memory.swappiness memory.oom_control \
        cpuset.cpus cpuset.mems blkio*weight* blkio.throttle.*_device; do
        case $file in *kmem*) continue;; esac
        [ ! -e "$file" ] || echo "$file" $(cat "$file")
    done
done"#;

/// All limits that hold for a process of a node, a line each.
///
/// # Errors
/// If they cannot be read.
pub fn limits(lab: &Lab, node: &str, pid: &str) -> Result<String> {
    Ok(lab.check(node, &["sh", "-c", &format!("{CGROUP}{READ}"), pid])?)
}

/// Writes one of them: its controller and file, and the value.
///
/// # Errors
/// If it cannot be written.
pub fn set_limit(lab: &Lab, node: &str, pid: &str, (controller, file): (&str, &str), value: &str) -> Result<()> {
    let script = format!("{CGROUP}echo \"$3\" > \"$(cgroup \"$1\")/$2\"");
    lab.check(node, &["sh", "-c", &script, pid, controller, file, value])?;
    Ok(())
}
