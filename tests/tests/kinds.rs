//! Every kind of state that a process may have (`tests/src/kinds.py`) is carried by a move, or refused by name before it, or is known to be changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_api::Plan;
use tranship_e2e::{Moving, Stage, is_gone, move_with, remove, restart_agent, scenarios, wait_until};
use tranship_lab::{Lab, RunOptions};
use tranship_types::Mode;

const NAME: &str = "kinds";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 58);
const PROGRAM: &str = include_str!("../src/kinds.py");
const PATIENCE: Duration = Duration::from_secs(60);
const CAPABILITIES: [&str; 7] = [
    "CAP_SYS_ADMIN",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_SYS_NICE",
    "CAP_LINUX_IMMUTABLE",
    "CAP_AUDIT_CONTROL",
];

/// No kind reads what comes to its packet sockets.
const ALLOWED: [&str; 2] = ["--allow", "unread-packets"];

/// Kinds that are refused, and words of what is said. The other kinds are carried, but for those of [`CHANGED`].
const REFUSED: &[(&str, &str)] = &[
    ("cpuid_fault", "has forbidden itself the instruction CPUID"),
    ("empty_datagram_of_unix", "has a datagram without data to read"),
    ("fanotify_of_a_filesystem", "watches a whole filesystem by fanotify"),
    ("fanotify_of_a_removed_file", "watches a file by fanotify whose path is not found"),
    ("fanotify_unread", "has fanotify events that wait unread"),
    ("flow_label", "has leased IPv6 flow labels"),
    ("group_that_its_leader_has_left", "is in the process group of"),
    ("memory_merge", "has equal pages of all its memory merged"),
    ("memory_policy_of_a_mapping", "has a NUMA policy for a part of its memory"),
    ("message_queue_of_posix_that_is_closed", "the mount at /dev/mqueue holds POSIX message queues"),
    ("mount_nosymfollow", "has the option nosymfollow"),
    ("mount_of_a_namespace", "(nsfs) that is not mounted in the container"),
    ("mount_of_a_removed_file", "which was removed, and CRIU drops what is in it"),
    ("mount_of_a_socket", "shows the Unix socket"),
    ("mount_of_hugetlbfs", "is a hugetlbfs filesystem that was mounted inside the container"),
    ("mount_of_ramfs", "is a ramfs filesystem that was mounted inside the container"),
    ("mount_tree", "is the host directory"),
    ("netfilter_log", "receives packets of the firewall (NFLOG 3)"),
    ("netfilter_queue", "receives packets of the firewall (NFQUEUE 3)"),
    ("netlink_group_40", "is a netlink socket of a protocol whose multicast groups are more than CRIU carries"),
    ("orphan_of_a_subreaper", "is in the session of process"),
    ("overmounted_directory", "which another mount hides"),
    ("overmounted_fifo", "which another mount hides"),
    ("overmounted_file", "which another mount hides"),
    ("packet_membership_twice", "is a packet socket that has asked twice for the same"),
    ("packet_pipe", "is a pipe in packet mode"),
    ("personality", "has a personality of its own (00040000"),
    ("personality_read_implies_exec", "has a personality of its own (00400000"),
    ("protection_keys", "has protection keys for parts of its memory"),
    ("raw_socket_that_is_connected_without_a_port", "is a raw socket that was connected without a port"),
    ("reuseport_program", "is in a group whose program shares out what comes"),
    ("segment_of_which_a_part_was_unmapped", "of which a part was unmapped or moved"),
    ("segment_that_is_executable_and_removed", "that it may write to and execute (SHM_EXEC)"),
    ("semaphore_with_undo", "has semaphore operations that are undone when it ends"),
    ("sent_more_than_252", "has 253 descriptors to receive"),
    ("sent_terminal", "has the descriptor of the terminal"),
    ("sent_timer", "has the descriptor of timerfd"),
    ("sent_watch", "has the descriptor of inotify"),
    ("socket_file_hidden", "whose file /tmp/sockets/hidden/s is hidden by a mount"),
    ("socket_file_linked_elsewhere", "other names (hard links) that are not found beside it"),
    ("socket_file_renamed_and_replaced", "while something else is at /tmp/sockets/replaced/s"),
    ("socket_files_of_one_name", "as another one was whose file was renamed"),
    ("socket_filter_of_ebpf", "is a socket with a filter of eBPF"),
    ("socket_name_without_an_end", "which is too long for CRIU by a byte"),
    ("speculation_indirect_branch", "has limits of its own for what its processor may speculate on"),
    ("speculation_store_bypass", "has limits of its own for what its processor may speculate on"),
    ("stopped_terminal", "whose output is stopped"),
    ("stopped_terminal_with_output", "whose output is stopped"),
    ("syscall_user_dispatch", "has its system calls raise signals"),
    ("tcp_md5_key", "keys"),
    ("tcp_md5_key_of_a_closed_socket", "has keys to sign segments of TCP with"),
    ("terminal_by_dev_tty_and_master", "was opened as /dev/tty, and"),
    ("terminal_of_a_session_with_an_orphan_before_its_leader", "leads a session with a terminal of which"),
    ("terminal_of_another_devpts", "of another instance of devpts"),
    ("terminal_whose_job_has_ended", "in the foreground that has ended"),
    ("terminal_whose_slave_is_closed_with_output", "whose other side all processes have closed"),
    ("timer_that_signals_the_first_thread", "has a timer that signals its first thread"),
    ("unread_state_of_terminal", "has a change of its terminal's state to read"),
    ("unread_stream_with_credentials", "has something to read with what its program has asked for"),
    ("unread_with_credentials", "has something to read with what its program has asked for"),
    ("unread_with_time", "has something to read with what its program has asked for"),
    ("vsock", "is a socket to a virtual machine or its host"),
    ("watch_of_a_directory_with_a_renamed_socket", "would be told of a move"),
    ("watch_of_a_removed_directory", "watches a file by inotify whose path is not found"),
    ("watch_of_a_removed_file", "watches a file by inotify whose path is not found"),
    ("watch_of_a_socket", "watches the file /tmp/watched-socket of a Unix socket"),
    ("watch_of_a_symbolic_link", "watches the symbolic link /tmp/watched-link"),
    ("watch_of_cgroup", "watches files of /sys"),
    ("watch_of_proc", "watches files of /proc"),
    ("watch_of_sys", "watches files of /sys"),
    ("xdp", "is an express data path socket"),
    ("zombie_with_a_core_file", "has ended with a core file"),
];

/// Kinds that a move changes, as programs cannot be given them; docs/zoo.md says why.
const CHANGED: &[&str] = &["children_cpu_time", "cpu_time", "posix_timer_overrun", "start_time"];

/// Runs these kinds in node a; what each of them says when all are ready.
fn start(lab: &Lab, names: &[&str]) -> Result<BTreeMap<String, String>> {
    let command = [&["python3", "-c", PROGRAM, "/tmp/kinds"], names].concat();
    let capabilities = CAPABILITIES.map(str::to_owned).to_vec();
    lab.run("a", NAME, &RunOptions { capabilities, ..RunOptions::new(IP, command) })?;
    wait_until("all kinds to be ready", PATIENCE, || {
        Ok(said(lab, "a").ok().filter(|said| names.iter().all(|name| said.contains_key(*name))))
    })
}

/// What each kind says last.
fn said(lab: &Lab, node: &str) -> Result<BTreeMap<String, String>> {
    let text = lab.check(node, &["runc", "exec", NAME, "sh", "-c", "cd /tmp/kinds && grep -H '' *"])?;
    let line = |line: &str| line.split_once(':').map(|(name, said)| (name.to_owned(), said.to_owned()));
    Ok(text.lines().filter_map(line).filter(|(name, _)| !name.ends_with(".new")).collect())
}

fn every_kind_is_carried_or_refused_or_known_to_be_changed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let list = lab.check("a", &["python3", "-c", PROGRAM, "--list"])?;
    let all: Vec<&str> = list.lines().collect();
    let numbers: BTreeMap<&str, usize> = all.iter().enumerate().map(|(number, name)| (*name, number)).collect();
    for name in REFUSED.iter().map(|(name, _)| name).chain(CHANGED) {
        ensure!(numbers.contains_key(name), "there is no kind {name}");
    }
    let ready = start(lab, &all)?;
    let missing: BTreeSet<&str> = all.iter().copied().filter(|name| !ready[*name].starts_with("ready")).collect();
    if !missing.is_empty() {
        println!("skipped: this machine does not have the kinds {missing:?}");
    }
    let text = lab
        .exec("a", &[&["tranship", "move", NAME, "--to", "b", "--dry-run", "--json"][..], &ALLOWED].concat())?
        .stdout;
    let plan: Plan = serde_json::from_slice(&text).with_context(|| String::from_utf8_lossy(&text).into_owned())?;
    let mut causes: Vec<String> = plan.blockers.into_iter().map(|blocker| blocker.cause).collect();
    for (name, words) in REFUSED.iter().filter(|(name, _)| !missing.contains(name)) {
        let process = format!("k{}-", numbers[name]);
        let mount = format!("the mount at /tmp/mounted/{name} ");
        let is_its = |cause: &String| cause.contains(&process) || cause.contains(&mount) || cause.starts_with(words);
        let own = |cause: &String| is_its(cause) && cause.contains(words);
        ensure!(causes.iter().filter(|cause| own(cause)).count() == 1, "{name} is not refused once: {causes:#?}");
        causes.retain(|cause| !own(cause));
    }
    ensure!(causes.is_empty(), "refused besides: {causes:#?}");
    remove(lab, NAME)?;

    let refused: BTreeSet<&str> = REFUSED.iter().map(|(name, _)| *name).collect();
    let carried: Vec<&str> =
        all.iter().copied().filter(|name| !missing.contains(name) && !refused.contains(name)).collect();
    start(lab, &carried)?;
    // So many processes take long on a busy machine.
    move_with(lab, "a", NAME, "b", &[&["--freeze-timeout", "120s"][..], &ALLOWED].concat())?;
    lab.check("b", &["runc", "exec", NAME, "touch", "/tmp/kinds/look"])?;
    let looked = wait_until("all kinds to have looked", PATIENCE, || {
        let is_done = |said: &String| !said.starts_with("ready");
        Ok(said(lab, "b").ok().filter(|said| carried.iter().all(|name| said.get(*name).is_some_and(is_done))))
    })?;
    let changed: BTreeMap<_, _> = looked.iter().filter(|(_, said)| *said != "same").collect();
    let unexpected: Vec<_> = changed.iter().filter(|(name, _)| !CHANGED.contains(&name.as_str())).collect();
    ensure!(unexpected.is_empty(), "a move changes {unexpected:#?}");
    let carried_after_all: Vec<_> =
        CHANGED.iter().filter(|name| carried.contains(name) && !changed.contains_key(&(**name).to_owned())).collect();
    ensure!(carried_after_all.is_empty(), "a move carries what is said to be changed: {carried_after_all:?}");
    println!(
        "{} kinds carried, {} refused, {} changed, {} not on this machine",
        carried.len() - changed.len(),
        REFUSED.len(),
        changed.len(),
        missing.len()
    );
    remove(lab, NAME)
}

/// Has all kinds look on a node, and checks that none has changed.
fn all_are_the_same(lab: &Lab, node: &str) -> Result<()> {
    lab.check(node, &["runc", "exec", NAME, "touch", "/tmp/kinds/look"])?;
    let looked = wait_until("all to have looked", PATIENCE, || {
        Ok(said(lab, node).ok().filter(|said| said.values().all(|said| !said.starts_with("ready"))))
    })?;
    ensure!(looked.values().all(|said| said == "same"), "{looked:#?}");
    Ok(())
}

/// A move that fails on either side of the dump leaves a job that a signal has stopped as it was, also where the source's agent dies.
fn a_stopped_job_stays_stopped_when_a_move_fails(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    let names =
        ["stopped_by_sigstop", "stopped_by_sigttin", "stopped_with_threads", "background_job_that_reads_its_terminal"];
    start(lab, &names)?;
    for fault in ["destination.restore.before.error", "destination.restore.after.error"] {
        restart_agent(lab, "b", fault)?;
        ensure!(
            !Moving::begin(lab, NAME, "a", "b", Mode::Auto)?.end()?.success,
            "a move with the fault {fault} succeeded"
        );
    }
    restart_agent(lab, "b", "")?;
    restart_agent(lab, "a", "source.transfer.after.die")?;
    let agent = lab.agent_pid("a")?.context("the agent has just been started")?;
    let moving = Moving::begin(lab, NAME, "a", "b", Mode::Auto)?;
    wait_until("the agent to die", PATIENCE, || Ok(is_gone(agent).then_some(())))?;
    lab.start_agent("a", &[])?;
    drop(moving);
    wait_until("the move to be undone", PATIENCE, || {
        Ok((lab.check("a", &["tranship", "status", "--json"])?.trim() == "[]").then_some(()))
    })?;
    move_with(lab, "a", NAME, "b", &[])?;
    all_are_the_same(lab, "b")?;
    remove(lab, NAME)
}

/// Those that criu does not see. Some of the second kind it must see.
fn zombies_are_as_they_were(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    for (kind, hidden) in [("many_zombies", 100), ("zombies_that_descriptors_refer_to", 18)] {
        start(lab, &[kind])?;
        for (from, to, mode) in [("a", "b", "auto"), ("b", "a", "postcopy")] {
            let report = move_with(lab, from, NAME, to, &["--mode", mode])?;
            let expected = format!("tasks: {hidden} zombies are made without criu");
            ensure!(report.ways.contains(&expected), "{:?}", report.ways);
        }
        all_are_the_same(lab, "a")?;
        remove(lab, NAME)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        (
            "every_kind_is_carried_or_refused_or_known_to_be_changed",
            every_kind_is_carried_or_refused_or_known_to_be_changed,
        ),
        ("zombies_are_as_they_were", zombies_are_as_they_were),
        ("a_stopped_job_stays_stopped_when_a_move_fails", a_stopped_job_stays_stopped_when_a_move_fails),
    ])
}
