//! The plugins behind the one that makes the interface. Those that only make rules on the node for the container's addresses
//! are called as libcni would call them.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tranship_sys::launch::{Program, Stream};
use tranship_sys::threads;
use tranship_types::CniAttachment;

use super::files;
use crate::NetworkError;

/// Those that are called.
const PLUGINS: [&str; 2] = ["portmap", "firewall"];
/// Where plugins are: as their authors, Debian and Fedora have it.
const DIRECTORIES: [&str; 3] = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"];
/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of what it says that are read.
const MOST_SAID: u64 = 1 << 20;

/// The cached result of an attachment, if there is one.
pub(super) fn parsed(attachment: &CniAttachment) -> Option<Value> {
    serde_json::from_str(attachment.cached.as_ref()?).ok()
}

/// The network's configuration, in which the plugins are listed.
fn configuration(cached: &Value) -> Option<Value> {
    serde_json::from_slice(&STANDARD.decode(cached["config"].as_str()?).ok()?).ok()
}

/// The configurations of the plugins in a network, but the first one's.
fn chain(configuration: &Value) -> impl Iterator<Item = &Value> {
    configuration["plugins"].as_array().into_iter().flatten().skip(1)
}

fn kind(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

/// Whether a program is a CNI plugin, by the directory that it is in.
pub fn is_plugin(program: &Path) -> bool {
    program.parent().is_some_and(|parent| DIRECTORIES.iter().any(|directory| parent == Path::new(directory)))
}

fn find(plugin: &str) -> Option<PathBuf> {
    DIRECTORIES.iter().map(|directory| Path::new(directory).join(plugin)).find(|path| path.exists())
}

/// Protocol and number of the node's ports that are published.
fn ports(cached: &Value) -> Vec<(String, u64)> {
    let mappings = cached["capabilityArgs"]["portMappings"].as_array().into_iter().flatten();
    let port = |m: &Value| Some((m["protocol"].as_str().unwrap_or("tcp").to_lowercase(), m["hostPort"].as_u64()?));
    mappings.filter_map(port).collect()
}

/// What stands in the way of calling them on this node.
pub(super) fn obstacles(attachment: &CniAttachment) -> Vec<(String, String)> {
    let Some(cached) = parsed(attachment) else { return Vec::new() };
    let Some(configuration) = configuration(&cached) else { return Vec::new() };
    let mut all = Vec::new();
    for plugin in chain(&configuration).map(kind).filter(|kind| PLUGINS.contains(kind) && find(kind).is_none()) {
        all.push((
            format!(
                "there is no CNI plugin {plugin} in {}, which the network {} needs",
                DIRECTORIES.join(", "),
                attachment.network
            ),
            "install the CNI plugins there".into(),
        ));
    }
    let own = ports(&cached);
    for (_, other) in files::results().unwrap_or_default() {
        if other["containerId"] == attachment.container.as_str() {
            continue;
        }
        if let Some((protocol, port)) = ports(&other).into_iter().find(|port| own.contains(port)) {
            all.push((
                format!(
                    "port {port}/{protocol}, which the container publishes, is published there for {}",
                    other["containerId"]
                ),
                "publish one of them at another port".into(),
            ));
        }
    }
    all
}

/// What a user should know about them.
pub(super) fn remarks(attachment: &CniAttachment) -> Vec<String> {
    let Some(cached) = parsed(attachment) else { return Vec::new() };
    let configuration = configuration(&cached).unwrap_or_default();
    let network = &attachment.network;
    let mut all = Vec::new();
    let published: Vec<_> = ports(&cached).iter().map(|(protocol, port)| format!("{port}/{protocol}")).collect();
    if !published.is_empty() {
        all.push(format!(
            "CNI publishes port {} of its node: the destination will, at its own address; connections that came in by this node go on \
             only while it stays the container's gateway, and new ones to this node are refused",
            published.join(", ")
        ));
    }
    if configuration["plugins"][0]["ipMasq"] == true {
        all.push(format!(
            "CNI's network {network} masquerades what the container sends to other networks: connections that it has opened to there end, \
             and the destination does not masquerade it (`ipMasq`)"
        ));
    }
    if let Some(directory) = configuration["plugins"][0]["ipam"]["dataDir"].as_str() {
        all.push(format!("the reservations of CNI's network {network} in {directory} (`dataDir`) are not moved"));
    }
    for plugin in chain(&configuration).map(kind).filter(|kind| !PLUGINS.contains(kind) && *kind != "tuning") {
        all.push(format!("what the CNI plugin {plugin} of network {network} has set up is not made again"));
    }
    all
}

/// Calls them with a verb, in the order of the verb.
pub(super) fn call(verb: &str, netns: &Path, attachment: &CniAttachment, cached: &Value) -> Result<(), NetworkError> {
    let Some(configuration) = configuration(cached) else { return Ok(()) };
    let mut plugins: Vec<_> = chain(&configuration).filter(|plugin| PLUGINS.contains(&kind(plugin))).collect();
    if verb == "DEL" {
        plugins.reverse();
    }
    for plugin in plugins {
        let mut input = plugin.clone();
        input["cniVersion"] = configuration["cniVersion"].clone();
        input["name"] = configuration["name"].clone();
        input["prevResult"] = cached["result"].clone();
        let granted: Vec<_> = plugin["capabilities"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(_, wanted)| **wanted == true)
            .filter_map(|(name, _)| Some((name.clone(), cached["capabilityArgs"].get(name)?.clone())))
            .collect();
        if !granted.is_empty() {
            input["runtimeConfig"] = Value::Object(granted.into_iter().collect());
        }
        execute(verb, kind(plugin), netns, attachment, cached, &input)?;
    }
    Ok(())
}

fn execute(
    verb: &str,
    plugin: &str,
    netns: &Path,
    attachment: &CniAttachment,
    cached: &Value,
    input: &Value,
) -> Result<(), NetworkError> {
    let CniAttachment { network, container, interface, .. } = attachment;
    let refused = |why: String| {
        NetworkError::refused(format!("have the CNI plugin {plugin} {verb} container {container} in {network}"), why)
    };
    let program = find(plugin).ok_or_else(|| refused(format!("it is not in {}", DIRECTORIES.join(", "))))?;
    let arguments = cached["cniArgs"].as_array().into_iter().flatten();
    let arguments: Vec<_> = arguments.filter_map(|a| Some(format!("{}={}", a[0].as_str()?, a[1].as_str()?))).collect();
    let mut command = Program::new(program);
    command
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", container), ("CNI_IFNAME", interface)])
        .env("CNI_NETNS", netns)
        .env("CNI_PATH", DIRECTORIES.join(":"))
        .env("CNI_ARGS", arguments.join(";"));
    let output = converse(&mut command, input.to_string().into_bytes(), PATIENCE).map_err(refused)?;
    if output.status.success() {
        return Ok(());
    }
    // A plugin says on its standard output what went wrong.
    let said = serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| json!({}));
    let [message, details] = ["msg", "details"].map(|key| said[key].as_str().unwrap_or_default().to_owned());
    Err(refused(
        [output.status.to_string(), message, details]
            .into_iter()
            .filter(|s| !s.is_empty())
            .collect::<Vec<_>>()
            .join(": "),
    ))
}

/// Runs a program that is given `input` and says something; an error in words if it cannot be run, or has not ended within `patience`. Pipes
/// hold little: whether the program reads or not, and whoever has inherited its end of a pipe, nobody waits for it longer.
fn converse(command: &mut Program, input: Vec<u8>, patience: Duration) -> Result<Output, String> {
    let deadline = Instant::now() + patience;
    let mut child = command
        .with_usual_umask()
        .stdin(Stream::Piped)
        .stdout(Stream::Piped)
        .stderr(Stream::Null)
        .spawn()
        .map_err(|e| e.to_string())?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (tell, told) = mpsc::channel();
    // They end with the pipes. That a program has not read all is for it to judge.
    let hear = move || {
        let mut said = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MOST_SAID).read_to_end(&mut said));
        tell.send(read.map_or(Ok(0), |read| read).map(|_| said))
    };
    let started = threads::start("cni said", hear)
        .and_then(|_| threads::start("cni input", move || stdin.map(|mut stdin| stdin.write_all(&input))));
    if let Err(error) = started {
        let _ = child.kill().and_then(|()| child.wait());
        return Err(error.to_string());
    }
    let ended = loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            Ok(None) => break Err(format!("it did not end within {patience:?}")),
            Ok(Some(status)) => break Ok(status),
            Err(e) => break Err(e.to_string()),
        }
    };
    if ended.is_err() {
        // It may have ended this moment.
        let _ = child.kill();
        let _ = child.wait();
    }
    let status = ended?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
    match told.recv_timeout(left) {
        Ok(said) => Ok(Output { status, stdout: said.map_err(|e| e.to_string())?, stderr: Vec::new() }),
        Err(_) => Err(format!("what it has started kept its output open for {patience:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(300);
    /// More than any pipe holds.
    const LONG: usize = 4 << 20;

    fn shell(script: &str) -> Program {
        let mut command = Program::new("sh");
        command.args(["-c", script]);
        command
    }

    fn takes_at_most(limit: Duration, script: &str) -> Result<Output, String> {
        let begun = Instant::now();
        let result = converse(&mut shell(script), vec![b'x'; LONG], SOON);
        assert!(begun.elapsed() < limit, "{script} took {:?}", begun.elapsed());
        result
    }

    #[test]
    fn a_plugin_that_never_reads_what_it_is_told_is_not_waited_for() {
        let error = takes_at_most(Duration::from_secs(5), "exec sleep 9").unwrap_err();
        assert!(error.contains("did not end within 300ms"), "{error}");
        // It has ended, but not what it has started.
        let error = takes_at_most(Duration::from_secs(5), "sleep 9 & exit 0").unwrap_err();
        assert!(error.contains("kept its output open"), "{error}");
    }

    #[test]
    fn a_plugin_that_says_what_it_wants_to_before_it_reads_is_heard() {
        let output =
            converse(&mut shell("head -c 300000 /dev/zero; cat > /dev/null"), vec![b'x'; LONG], PATIENCE).unwrap();
        assert!(output.status.success());
        assert_eq!(output.stdout.len(), 300_000);
        let output = converse(&mut shell("echo no; exit 3"), vec![b'x'; LONG], PATIENCE).unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(3), &b"no\n"[..]));
    }
}
