//! What was measured on.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// The machine and the programs, as far as they matter to the figures.
pub fn describe() -> Value {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let after = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|l| l.split_once(':')).map(|(_, value)| value.trim().to_owned())
    };
    let private = "/opt/tranship/criu/criu";
    let criu = if Path::new(private).is_file() { private } else { "criu" };
    json!({
        "cpu": after(&cpu, "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": after(&memory, "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "runc": first_line("runc", &["--version"]),
        "criu": first_line(criu, &["--version"]),
        "redis": first_line("redis-server", &["--version"]),
        "tranship": env!("CARGO_PKG_VERSION"),
        "commit": first_line("git", &["rev-parse", "--short=12", "HEAD"]),
    })
}

/// Bytes of memory that nobody needs now.
pub fn available_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    crate::watch::field(&text, "MemAvailable:").unwrap_or(0)
}

/// Has the machine touch so many bytes of free memory. The host of a virtual machine may give memory that was not touched for a while slowly (at 0.3 GB/s
/// where this was written), to whoever comes first.
pub fn touch_memory(bytes: u64) {
    let part = usize::try_from(bytes / 2).unwrap_or(0);
    let touch = || drop(std::hint::black_box(vec![1_u8; part]));
    std::thread::scope(|scope| {
        scope.spawn(touch);
        touch();
    });
}

fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(arguments).env("PATH", path).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned))?
}

/// An amount of bytes, as people read it.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
