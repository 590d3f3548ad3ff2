//! Programs that people run, in the middle of what they do.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{
    Computation, Dialogue, Guest, Progress, Stage, exactly_one_runs, make_pgbench_tables, move_container, move_with,
    nothing_left, pgbench, postgres_accepts, postgres_programs, remove, scenarios, wait_until,
};
use tranship_lab::{CLIENT, Lab, RunOptions, find_program, patience};

/// Moves a container from where it is to the other node, and checks that it is there and only there.
fn to_and_fro(lab: &Lab, name: &str) -> Result<String> {
    let from = exactly_one_runs(lab, name)?;
    let to = if from == "a" { "b" } else { "a" };
    move_container(lab, &from, name, to)?;
    ensure!(exactly_one_runs(lab, name)? == to, "{name} is still on {from}");
    nothing_left(lab, &from, name)?;
    Ok(to.to_owned())
}

fn a_transaction_stays_open_and_pgbench_goes_on(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "postgres";
    const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 40);
    let lab = &stage.lab;
    let programs = postgres_programs()?;
    let user = nix::unistd::User::from_name("postgres")?.context("there is no user postgres")?;
    let bin = programs.display();
    let script = format!(
        "exec >/tmp/log 2>&1; {bin}/initdb --pgdata=/tmp/data --auth=trust --username=postgres --no-sync && \
         echo 'host all all 10.77.0.0/24 trust' >> /tmp/data/pg_hba.conf && \
         exec {bin}/postgres -D /tmp/data -c listen_addresses='*' -c unix_socket_directories=/tmp"
    );
    let mut options = RunOptions::new(IP, ["sh", "-c", &script]);
    options.user = (user.uid.as_raw(), user.gid.as_raw());
    lab.run("a", NAME, &options)?;
    wait_until("PostgreSQL to accept connections", Duration::from_secs(60), || postgres_accepts(lab, &programs, IP))?;

    make_pgbench_tables(lab, &programs, IP)?;

    let mut inside = Dialogue::with_psql(lab, &programs, IP)?;
    let mut outside = Dialogue::with_psql(lab, &programs, IP)?;
    inside.ask("CREATE TABLE kept (n int)")?;
    inside.ask("BEGIN")?;
    inside.ask("INSERT INTO kept VALUES (1)")?;
    let identity = inside.ask("SELECT pg_backend_pid(), txid_current()")?;

    // On a busy machine a move of a database under load takes seconds.
    let seconds = patience(Duration::from_secs(20)).as_secs().to_string();
    let mut busy = lab.spawn(CLIENT, &pgbench(&programs, IP, &["-c", "4", "-j", "2", "-T", &seconds, "-P", "1"]))?;
    drop(busy.stdin.take());
    let mut output = busy.stdout.take().context("pgbench has no stdout")?;
    let (report, mut errors) = (
        std::thread::spawn(move || {
            let mut text = String::new();
            output.read_to_string(&mut text).map(|_| text)
        }),
        BufReader::new(busy.stderr.take().context("pgbench has no stderr")?),
    );
    // Its progress, a line a second, goes to stderr.
    let mut progress = String::new();
    while !progress.contains("progress: ") {
        ensure!(errors.read_line(&mut progress)? > 0, "pgbench ended at once: {progress}");
    }
    let progress = std::thread::spawn(move || errors.read_to_string(&mut progress).map(|_| progress));

    let (mut moves, mut under_load) = (0, 0);
    while moves < 4 && busy.try_wait()?.is_none() {
        moves += 1;
        let on = to_and_fro(lab, NAME).with_context(|| format!("move {moves}"))?;
        under_load += u32::from(busy.try_wait()?.is_none());
        let now = inside.ask("SELECT pg_backend_pid(), txid_current()")?;
        ensure!(now == identity, "on {on} the transaction is {now} instead of {identity}");
        inside.ask(&format!("INSERT INTO kept VALUES ({})", moves + 1))?;
        let seen = outside.ask("SELECT count(*) FROM kept")?;
        ensure!(seen == "0", "others see {seen} rows of a transaction that is not committed");
    }
    ensure!(under_load >= 2, "pgbench ended after {under_load} moves; it must run longer");
    inside.ask("COMMIT")?;
    let seen = outside.ask("SELECT string_agg(n::text, ',' ORDER BY n) FROM kept")?;
    let kept = (1..=moves + 1).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    ensure!(seen == kept, "after the commit others see {seen} instead of {kept}");

    let status = busy.wait()?;
    let joined = |thread: std::thread::JoinHandle<std::io::Result<String>>| -> Result<String> {
        thread.join().map_err(|_| anyhow::anyhow!("the reading thread panicked"))?.context("reading from pgbench")
    };
    let (report, progress) = (joined(report)?, joined(progress)?);
    ensure!(status.success(), "pgbench ended with {status}:\n{report}\n{progress}");
    ensure!(report.contains("number of failed transactions: 0 "), "pgbench: {report}");
    // What every transaction adds to an account it adds to a teller and a branch too, and writes down.
    let sums = outside.ask(
        "SELECT (SELECT sum(abalance) FROM pgbench_accounts) - (SELECT sum(delta) FROM pgbench_history), \
                (SELECT sum(tbalance) FROM pgbench_tellers) - (SELECT sum(delta) FROM pgbench_history), \
                (SELECT sum(bbalance) FROM pgbench_branches) - (SELECT sum(delta) FROM pgbench_history)",
    )?;
    ensure!(sums == "0|0|0", "pgbench's sums differ by {sums}");
    drop((inside, outside));
    remove(lab, NAME)
}

/// What `seq -w 1 5000000` prints: five million lines of eight bytes.
fn file_line(n: u64) -> String {
    format!("{n:07}\n")
}

fn a_long_download_arrives_intact(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "nginx";
    const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 41);
    const LINES: u64 = 5_000_000;
    const BYTES: u64 = 8 * LINES;
    // What is behind it is more than all buffers on the way hold, so that the download lasts for as long as nobody reads on.
    const MOVED_BEFORE: u64 = BYTES / 8 * 5;
    let lab = &stage.lab;
    let configuration = "daemon off; worker_processes 2; pid /tmp/nginx.pid; error_log /tmp/error.log; \
        events { worker_connections 64; } \
        http { access_log off; client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; \
               uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s; \
               server { listen 80; root /tmp/www; limit_rate 8m; } }";
    let script = format!(
        "mkdir /tmp/www && seq -w 1 {LINES} > /tmp/www/file && echo '{configuration}' > /tmp/nginx.conf && \
         exec nginx -e /tmp/error.log -c /tmp/nginx.conf"
    );
    lab.run("a", NAME, &RunOptions::new(IP, ["sh", "-c", &script]))?;
    wait_until("nginx to answer", Duration::from_secs(30), || {
        Ok(lab.connect(CLIENT, (IP, 80).into(), Duration::from_secs(1)).ok())
    })?;

    let url = format!("http://{IP}/file");
    let mut curl = lab.spawn(CLIENT, &["curl", "--silent", "--show-error", "--fail", "--no-buffer", &url])?;
    let mut stream = curl.stdout.take().context("curl has no stdout")?;
    let received = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&received);
    let (moved, all_moved) = mpsc::channel::<()>();
    let reader = std::thread::spawn(move || -> Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut at = 0u64;
        loop {
            if at >= MOVED_BEFORE {
                // It ends when the sender is dropped.
                let _ = all_moved.recv();
            }
            let length = stream.read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            for byte in &buffer[..length] {
                let right = file_line(at / 8 + 1).as_bytes()[(at % 8) as usize];
                ensure!(*byte == right, "byte {at} of the file is {byte} instead of {right}");
                at += 1;
            }
            counted.store(at, Ordering::Relaxed);
        }
    });
    for (n, part) in [(1, BYTES / 8), (2, BYTES / 4), (3, BYTES / 2)] {
        wait_until("the download to go on", Duration::from_secs(30), || {
            Ok((received.load(Ordering::Relaxed) >= part).then_some(()))
        })?;
        to_and_fro(lab, NAME).with_context(|| format!("move {n}"))?;
    }
    ensure!(received.load(Ordering::Relaxed) < BYTES, "the download was over before the last move was");
    drop(moved);
    let status = curl.wait()?;
    let mut said = String::new();
    curl.stderr.take().context("curl has no stderr")?.read_to_string(&mut said)?;
    ensure!(status.success(), "curl ended with {status}: {said}");
    reader.join().map_err(|_| anyhow::anyhow!("the reading thread panicked"))??;
    let total = received.load(Ordering::Relaxed);
    ensure!(total == BYTES, "{total} bytes arrived instead of {BYTES}");
    remove(lab, NAME)
}

fn a_moved_computation_has_the_result_of_the_unmoved_one(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "computation";
    const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 42);
    const PORT: u16 = 7001;
    const PATIENCE: Duration = Duration::from_secs(120);
    let lab = &stage.lab;
    let computation = Computation { threads: 4, cells: 1 << 18, rounds: 40_000 };
    let unmoved = computation.run(&Progress::default());

    let arguments = [
        "/opt/computation".to_owned(),
        format!("--threads={}", computation.threads),
        format!("--cells={}", computation.cells),
        format!("--rounds={}", computation.rounds),
        format!("--port={PORT}"),
    ];
    let mut options = RunOptions::new(IP, arguments);
    options.binds.push((find_program("computation")?, "/opt/computation".into()));
    lab.run("a", NAME, &options)?;
    let mut guest = Guest::connect(lab, IP, PORT)?;
    let round = move |guest: &mut Guest| -> Result<u64> {
        let line = guest.line(PATIENCE)?;
        let number = line.strip_prefix("round ").with_context(|| format!("too soon: {line}"))?;
        Ok(number.parse()?)
    };
    for n in 1..=4 {
        let due = computation.rounds * n / 8;
        while round(&mut guest)? < due {}
        to_and_fro(lab, NAME).with_context(|| format!("move {n}"))?;
    }
    let result = loop {
        let line = guest.line(PATIENCE)?;
        if let Some(result) = line.strip_prefix("result ") {
            break result.to_owned();
        }
        if !line.starts_with("round ") {
            bail!("the computation says {line:?}");
        }
    };
    ensure!(result == format!("{unmoved:016x}"), "the result is {result}, unmoved it is {unmoved:016x}");
    remove(lab, NAME)
}

/// A shell waits for each program that it starts until that has its own memory (vfork): CRIU cannot stop the two in between.
fn a_shell_that_starts_one_program_after_the_other_goes_on(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "shell";
    let lab = &stage.lab;
    let script = "n=0; while :; do /bin/true || exit; n=$((n + 1)); echo $n > /tmp/new; mv /tmp/new /tmp/count; done";
    lab.run("a", NAME, &RunOptions::new(Ipv4Addr::new(10, 77, 0, 46), ["dash", "-c", script]))?;
    let count = |node: &str| -> Result<u64> {
        let text = lab.check(node, &["runc", "exec", NAME, "sh", "-c", "cat /tmp/count 2>/dev/null || echo 0"])?;
        text.trim().parse().with_context(|| format!("the count is {text:?}"))
    };
    let goes_on = |node: &str, least: u64| {
        wait_until("the shell to go on", Duration::from_secs(10), || Ok(Some(count(node)?).filter(|n| *n >= least)))
    };
    let mut n = goes_on("a", 100)?;
    for move_number in 1..=16 {
        let on = to_and_fro(lab, NAME).with_context(|| format!("move {move_number}"))?;
        n = goes_on(&on, n + 100).with_context(|| format!("after move {move_number}"))?;
    }
    remove(lab, NAME)
}

/// A server that reads its data and then forks workers, each of which reads it, has something of its own, and serves one client.
const PREFORKED: &str = r#"
import hashlib, os, socket
data = [os.urandom(3000) for _ in range(10000)]
listener = socket.create_server(("0.0.0.0", 7003))
for worker in range(4):
    if os.fork() == 0:
        own = bytearray(os.urandom(1 << 20))
        client = listener.accept()[0].makefile("rw")
        for line in client:
            sum = hashlib.sha256(own)
            for piece in data:
                sum.update(piece)
            client.write(f"{os.getpid()} {sum.hexdigest()}\n")
            client.flush()
os.wait()
"#;

fn what_workers_have_in_common_travels_once(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "preforked";
    const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 43);
    const DATA: u64 = 30_000_000;
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", PREFORKED]))?;
    let connect = |_| {
        let connected = wait_until("a worker to listen", Duration::from_secs(30), || {
            Ok(lab.connect(CLIENT, (IP, 7003).into(), Duration::from_secs(1)).ok())
        })?;
        connected.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(connected)
    };
    let mut clients = (0..4).map(connect).collect::<Result<Vec<TcpStream>>>()?;
    let mut ask = || -> Result<Vec<String>> {
        let one = |client: &mut TcpStream| {
            writeln!(client)?;
            let mut line = String::new();
            BufReader::new(client).read_line(&mut line)?;
            Ok(line)
        };
        clients.iter_mut().map(one).collect()
    };
    let before = ask()?;
    ensure!((1..4).all(|n| !before[..n].contains(&before[n])), "these are not four workers: {before:?}");
    for (n, mode) in ["precopy", "hybrid", "auto", "cold", "postcopy"].into_iter().enumerate() {
        let (from, to) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let report = move_with(lab, from, NAME, to, &["--mode", mode, "--compress", "off"])
            .with_context(|| format!("{from} → {to}, mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
        nothing_left(lab, from, NAME)?;
        let (all, wire) = (report.progress.memory_bytes, report.progress.wire_bytes);
        let common = report.progress.deduplicated_bytes;
        eprintln!("mode {mode}: {all} bytes of memory, {common} deduplicated, {wire} on the wire");
        // Where memory goes while nothing has been named, four of the five copies do not.
        let expected = if ["cold", "postcopy"].contains(&mode) { 0 } else { DATA * 3 };
        let most = all - expected + all / 20;
        ensure!(common >= expected && wire < most, "{common} of {all} bytes deduplicated, {wire} sent");
        let now = ask()?;
        ensure!(now == before, "the workers say {now:?} instead of {before:?}");
    }
    remove(lab, NAME)
}

/// A server with 64 MiB that it has asked to have in huge pages: tells their hash, and how many KiB are in huge pages.
const HUGE: &str = r#"
import hashlib, mmap, os, re, socket
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, 64 << 20, 1 << 20):
    memory[at:at + (1 << 20)] = os.urandom(1 << 20)
client = socket.create_server(("0.0.0.0", 7004)).accept()[0].makefile("rw")
for line in client:
    huge = re.search(r"AnonHugePages: *(\d+)", open("/proc/self/smaps_rollup").read()).group(1)
    client.write(f"{hashlib.sha256(memory).hexdigest()} {huge}\n")
    client.flush()
"#;

fn what_was_in_huge_pages_is_again(stage: &mut Stage) -> Result<()> {
    const NAME: &str = "huge";
    const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 44);
    const LIMIT: Duration = Duration::from_secs(60);
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.is_empty() || setting.contains("[never]") {
        eprintln!("skipped: transparent huge pages are switched off here");
        return Ok(());
    }
    let lab = &stage.lab;
    lab.run("a", NAME, &RunOptions::new(IP, ["python3", "-c", HUGE]))?;
    let mut client = wait_until("the server to listen", LIMIT, || {
        Ok(lab.connect(CLIENT, (IP, 7004).into(), Duration::from_secs(1)).ok())
    })?;
    client.set_read_timeout(Some(LIMIT))?;
    let mut ask = || -> Result<(String, u64)> {
        writeln!(client)?;
        let mut line = String::new();
        BufReader::new(&mut client).read_line(&mut line)?;
        let (hash, kib) = line.trim().split_once(' ').with_context(|| format!("it says {line:?}"))?;
        Ok((hash.to_owned(), kib.parse()?))
    };
    let (before, huge) = ask()?;
    ensure!(huge > 32 << 10, "only {huge} KiB are in huge pages before the move");
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "hybrid")] {
        move_with(lab, from, NAME, to, &["--mode", mode]).with_context(|| format!("{from} → {to}, mode {mode}"))?;
        ensure!(exactly_one_runs(lab, NAME)? == to, "{NAME} is not on {to}");
        let now = wait_until("its memory to be in huge pages again", LIMIT, || {
            let (hash, now) = ask()?;
            ensure!(hash == before, "its memory is another one after the move to {to}");
            Ok((now >= huge / 10 * 9).then_some(now))
        })?;
        eprintln!("mode {mode}: {now} KiB in huge pages, {huge} before the first move");
        nothing_left(lab, from, NAME)?;
    }
    remove(lab, NAME)
}

fn main() -> ExitCode {
    scenarios(&[
        ("what_workers_have_in_common_travels_once", what_workers_have_in_common_travels_once),
        (
            "a_shell_that_starts_one_program_after_the_other_goes_on",
            a_shell_that_starts_one_program_after_the_other_goes_on,
        ),
        ("what_was_in_huge_pages_is_again", what_was_in_huge_pages_is_again),
        ("a_transaction_stays_open_and_pgbench_goes_on", a_transaction_stays_open_and_pgbench_goes_on),
        ("a_long_download_arrives_intact", a_long_download_arrives_intact),
        (
            "a_moved_computation_has_the_result_of_the_unmoved_one",
            a_moved_computation_has_the_result_of_the_unmoved_one,
        ),
    ])
}
