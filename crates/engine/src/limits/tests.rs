use super::*;
use serde_json::json;

fn cgroups(files: &[(&str, &str, &str)]) -> (tempfile::TempDir, HashMap<String, PathBuf>) {
    let root = tempfile::tempdir().unwrap();
    let mut all = HashMap::new();
    for (controller, file, text) in files {
        let path = root.path().join(format!("c-{controller}")).join("own");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join(file), format!("{text}\n")).unwrap();
        all.insert((*controller).to_owned(), path);
    }
    (root, all)
}

#[test]
fn what_was_changed_since_the_start_is_in_the_configuration() {
    let (_root, cgroups) = cgroups(&[
        ("pids", "pids.max", "10"),
        ("cpu", "cpu.cfs_quota_us", "50000"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("cpu", "cpu.shares", "1024"),
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory", "memory.soft_limit_in_bytes", "1048576"),
    ]);
    let mut config = json!({"linux": {"resources": {"memory": {"limit": 4_194_304}, "pids": {"limit": 100}}}});
    update(&mut config, &cgroups);
    let expected = json!({"memory": {"limit": -1, "reservation": 1_048_576}, "pids": {"limit": 10},
                          "cpu": {"quota": 50000}});
    assert_eq!(config["linux"]["resources"], expected);
}

#[test]
fn what_is_as_configured_stays_as_it_is() {
    let (_root, cgroups) = cgroups(&[
        ("pids", "pids.max", "max"),
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("memory", "memory.limit_in_bytes", "4194304"),
    ]);
    let config = json!({"linux": {"resources": {"memory": {"limit": 4_194_999}, "pids": {"limit": 0}}}});
    let mut updated = config.clone();
    update(&mut updated, &cgroups);
    assert_eq!(updated, config);
    let mut bare = json!({"linux": {}});
    update(&mut bare, &HashMap::new());
    assert_eq!(bare, json!({"linux": {}}));
}

#[test]
fn version_2_has_both_numbers_of_the_processor_in_one_file() {
    let (_root, cgroups) = cgroups(&[("", "cpu.max", "20000 50000"), ("", "memory.max", "max"), ("", "pids.max", "7")]);
    let mut config = json!({"linux": {}});
    update(&mut config, &cgroups);
    let expected = json!({"cpu": {"quota": 20000, "period": 50000}, "pids": {"limit": 7}});
    assert_eq!(config["linux"]["resources"], expected);
}

#[test]
fn every_file_of_version_1_is_read() {
    let (_root, cgroups) = cgroups(&[
        ("cpu", "cpu.cfs_burst_us", "1000"),
        ("memory", "memory.limit_in_bytes", "8388608"),
        ("memory", "memory.memsw.limit_in_bytes", "16777216"),
        ("memory", "memory.oom_control", "oom_kill_disable 1\nunder_oom 0"),
        ("blkio", "blkio.bfq.weight", "300"),
        ("blkio", "blkio.throttle.read_bps_device", "8:0 1048576\n8:16 2097152"),
        ("blkio", "blkio.throttle.write_bps_device", ""),
        ("cpuset", "cpuset.cpus", "0"),
        ("hugetlb", "hugetlb.2MB.limit_in_bytes", "4194304"),
        ("hugetlb", "hugetlb.1GB.limit_in_bytes", "9223372036854771712"),
        ("hugetlb", "hugetlb.2MB.rsvd.limit_in_bytes", "1"),
    ]);
    let removed = json!([{"major": 8, "minor": 0, "rate": 7}]);
    let mut config = json!({"linux": {"resources": {
        "blockIO": {"throttleWriteBpsDevice": removed}, "cpu": {"cpus": "0-1"},
    }}});
    update(&mut config, &cgroups);
    let expected = json!({
        "cpu": {"burst": 1000, "cpus": "0"},
        "memory": {"limit": 8_388_608, "swap": 16_777_216, "disableOOMKiller": true},
        "blockIO": {
            "weight": 300,
            "throttleReadBpsDevice":
                [{"major": 8, "minor": 0, "rate": 1_048_576}, {"major": 8, "minor": 16, "rate": 2_097_152}],
            "throttleWriteBpsDevice": [],
        },
        "hugepageLimits": [{"pageSize": "2MB", "limit": 4_194_304}],
    });
    assert_eq!(config["linux"]["resources"], expected);
}

#[test]
fn every_file_of_version_2_is_read() {
    let (_root, cgroups) = cgroups(&[
        ("", "memory.max", "8388608"),
        ("", "memory.swap.max", "4194304"),
        ("", "memory.high", "6291456"),
        ("", "memory.min", "0"),
        ("", "cpu.weight", "100"),
        ("", "cpu.idle", "1"),
        ("", "io.weight", "default 50\n8:0 70"),
        ("", "io.max", "8:0 rbps=1048576 wbps=max riops=max wiops=20"),
        ("", "cpuset.cpus", "1"),
        ("", "hugetlb.2MB.max", "max"),
    ]);
    let mut config = json!({"linux": {"resources": {"cpu": {"shares": 2048}}}});
    update(&mut config, &cgroups);
    let device = |rate: u64| json!([{"major": 8, "minor": 0, "rate": rate}]);
    let expected = json!({
        "cpu": {"shares": 2048, "cpus": "1"},
        "memory": {"limit": 8_388_608, "swap": 12_582_912},
        "blockIO": {"throttleReadBpsDevice": device(1_048_576), "throttleWriteIOPSDevice": device(20)},
        "unified": {"cpu.weight": "100", "cpu.idle": "1", "memory.high": "6291456", "io.weight": "default 50"},
    });
    assert_eq!(config["linux"]["resources"], expected);
}

#[test]
fn an_engine_s_configuration_takes_the_limits_of_the_source_and_keeps_what_is_no_limit() {
    let bundle = tempfile::tempdir().unwrap();
    assert_eq!(Limits::noted(bundle.path()).unwrap(), None);
    let source =
        json!({"linux": {"resources": {"pids": {"limit": 10}, "devices": ["theirs"], "unified": {"cpu.idle": "1"}}}});
    Limits::of(&source).note(bundle.path()).unwrap();
    let noted = Limits::noted(bundle.path()).unwrap().unwrap();
    let mut here = json!({"linux": {"resources": {"pids": {"limit": 5}, "cpu": {"shares": 2}, "devices": ["own"]}}});
    noted.give_to(&mut here, false);
    let expected = json!({"pids": {"limit": 10}, "cpu": {"shares": 2}, "devices": ["own"]});
    assert_eq!(here["linux"]["resources"], expected);
    noted.give_to(&mut here, true);
    assert_eq!(here["linux"]["resources"]["unified"]["cpu.idle"], "1");
}
