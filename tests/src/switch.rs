use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A capture of what passes the lab's switch, by tcpdump. Ended when dropped.
#[derive(Debug)]
pub struct Capture {
    child: Child,
    lines: Receiver<String>,
}

impl Capture {
    /// Begins to note every packet that `filter` (as tcpdump reads it) lets through; packets are caught from here on.
    ///
    /// # Errors
    /// If no lab is up or tcpdump does not begin.
    pub fn begin(filter: &str) -> Result<Self> {
        let pid = switch_init().context("there is no process that holds the lab's switch")?;
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "nsenter"])
            .arg(format!("--net=/proc/{pid}/ns/net"))
            .args(["tcpdump", "--interface", "br0", "-nn", "-S", "-l", "--immediate-mode", filter])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run tcpdump")?;
        let mut said = BufReader::new(child.stderr.take().context("tcpdump has no stderr")?);
        let mut begun = String::new();
        while !begun.contains("listening on") {
            let length = said.read_line(&mut begun)?;
            ensure!(length > 0, "tcpdump ended: {}", begun.trim());
        }
        // What else it says must be read, or it would wait for a reader some day.
        std::thread::spawn(move || said.read_to_string(&mut String::new()));
        let output = BufReader::new(child.stdout.take().context("tcpdump has no stdout")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Ok(Self { child, lines })
    }

    /// Ends it; the packets seen, one line each.
    ///
    /// # Errors
    /// If tcpdump does not end within 10 s.
    pub fn end(mut self) -> Result<Vec<String>> {
        // On SIGINT tcpdump writes what it still has.
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)?;
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(Duration::from_secs(10)) {
                // At its end tcpdump prints an empty line.
                Ok(line) if line.is_empty() => {}
                Ok(line) => seen.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(error) => return Err(error).context("tcpdump does not end"),
            }
        }
        self.child.wait()?;
        Ok(seen)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Has the lab's switch listen to IGMP and MLD: it then sends a group's datagrams only where it has heard of a member. With `on` it
/// also asks for members; without it is as the lab has made it.
///
/// # Errors
/// If no lab is up, or the switch cannot be set.
pub fn snooping(on: bool) -> Result<()> {
    let pid = switch_init().context("there is no process that holds the lab's switch")?;
    let on = if on { "1" } else { "0" };
    // A switch that asks heeds what it hears when the answers to its first question must have come: here after 0.1 s.
    let words = ["link", "set", "br0", "type", "bridge", "mcast_query_response_interval", "10", "mcast_snooping", on];
    let words = [&words[..], &["mcast_igmp_version", "3", "mcast_mld_version", "2", "mcast_querier", on]].concat();
    let output = Command::new("nsenter").arg(format!("--net=/proc/{pid}/ns/net")).arg("ip").args(words).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Whether the switch sends the datagrams of a group to the port of this node.
///
/// # Errors
/// If no lab is up, or the switch does not answer.
pub fn is_member(group: &str, node: &str) -> Result<bool> {
    let pid = switch_init().context("there is no process that holds the lab's switch")?;
    let output = Command::new("nsenter").arg(format!("--net=/proc/{pid}/ns/net")).args(["bridge", "mdb"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let port = format!("port {node} ");
    Ok(listed.lines().any(|line| line.contains(&port) && line.split_whitespace().any(|word| word == group)))
}

/// The process that holds the switch's namespaces: `tranship-lab hold switch …`.
fn switch_init() -> Option<u32> {
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.into_iter().find(|pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = arguments.split(|b| *b == 0).collect();
        matches!(words.as_slice(), [program, b"hold", b"switch", ..] if program.ends_with(b"tranship-lab"))
    })
}
