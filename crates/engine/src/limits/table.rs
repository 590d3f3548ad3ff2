//! The files of a cgroup that hold its limits, and what each is called in a configuration (OCI `linux.resources`).

/// A limit that is one number.
pub(super) struct Limit {
    pub section: &'static str,
    pub key: &'static str,
    /// By no name that of version 2.
    pub controller: &'static str,
    pub file: &'static str,
    /// The value where nobody has set one; `None`: that of the parent.
    pub default: Option<i64>,
}

const fn limit(name: (&'static str, &'static str), place: (&'static str, &'static str), default: i64) -> Limit {
    Limit { section: name.0, key: name.1, controller: place.0, file: place.1, default: Some(default) }
}

/// Version 1.
pub(super) const V1: [Limit; 15] = [
    limit(("pids", "limit"), ("pids", "pids.max"), -1),
    limit(("cpu", "shares"), ("cpu", "cpu.shares"), 1024),
    limit(("cpu", "quota"), ("cpu", "cpu.cfs_quota_us"), -1),
    limit(("cpu", "period"), ("cpu", "cpu.cfs_period_us"), 100_000),
    limit(("cpu", "burst"), ("cpu", "cpu.cfs_burst_us"), 0),
    limit(("cpu", "realtimeRuntime"), ("cpu", "cpu.rt_runtime_us"), 0),
    limit(("cpu", "realtimePeriod"), ("cpu", "cpu.rt_period_us"), 1_000_000),
    limit(("memory", "limit"), ("memory", "memory.limit_in_bytes"), -1),
    limit(("memory", "swap"), ("memory", "memory.memsw.limit_in_bytes"), -1),
    limit(("memory", "reservation"), ("memory", "memory.soft_limit_in_bytes"), -1),
    Limit { section: "memory", key: "swappiness", controller: "memory", file: "memory.swappiness", default: None },
    limit(("blockIO", "weight"), ("blkio", "blkio.weight"), 500),
    limit(("blockIO", "weight"), ("blkio", "blkio.bfq.weight"), 100),
    limit(("blockIO", "leafWeight"), ("blkio", "blkio.leaf_weight"), 500),
    limit(("network", "classID"), ("net_cls", "net_cls.classid"), 0),
];

/// Version 2, whose controllers are all in one directory. `cpu.max`, `memory.swap.max` and `io.max` hold more than a number, or another one.
pub(super) const V2: [Limit; 3] = [
    limit(("pids", "limit"), ("", "pids.max"), -1),
    limit(("memory", "limit"), ("", "memory.max"), -1),
    limit(("memory", "reservation"), ("", "memory.low"), 0),
];

/// Files of version 2 that go into a configuration by their own names (`unified`): file, text where nobody has set it, and what else in a
/// configuration sets it.
pub(super) const UNIFIED: [(&str, &str, &str, &str); 10] = [
    ("cpu.weight", "100", "cpu", "shares"),
    ("cpu.idle", "0", "cpu", "idle"),
    ("cpu.max.burst", "0", "cpu", "burst"),
    ("cpu.uclamp.min", "0.00", "", ""),
    ("cpu.uclamp.max", "max", "", ""),
    ("memory.min", "0", "", ""),
    ("memory.high", "max", "", ""),
    ("memory.oom.group", "0", "", ""),
    ("io.weight", "default 100", "blockIO", "weight"),
    ("io.bfq.weight", "default 100", "blockIO", "weight"),
];

/// Limits for single devices: key in a configuration, file of version 1, name within `io.max` of version 2.
pub(super) const DEVICES: [(&str, &str, &str); 4] = [
    ("throttleReadBpsDevice", "blkio.throttle.read_bps_device", "rbps"),
    ("throttleWriteBpsDevice", "blkio.throttle.write_bps_device", "wbps"),
    ("throttleReadIOPSDevice", "blkio.throttle.read_iops_device", "riops"),
    ("throttleWriteIOPSDevice", "blkio.throttle.write_iops_device", "wiops"),
];
