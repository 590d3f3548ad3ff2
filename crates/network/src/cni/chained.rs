//! The plugins behind the one that makes the interface. Those that only make rules on the node for the container's addresses
//! are called as libcni would call them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tranship_types::CniAttachment;

use super::files;
use crate::NetworkError;

/// Those that are called.
const PLUGINS: [&str; 2] = ["portmap", "firewall"];
/// Where plugins are: as their authors, Debian and Fedora have it.
const DIRECTORIES: [&str; 3] = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"];
/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(10);

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
    let mut child = Command::new(program)
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", container), ("CNI_IFNAME", interface)])
        .env("CNI_NETNS", netns)
        .env("CNI_PATH", DIRECTORIES.join(":"))
        .env("CNI_ARGS", arguments.join(";"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| refused(e.to_string()))?;
    // Both ways a plugin's text is shorter than a pipe is long.
    let written = child.stdin.take().map(|mut stdin| stdin.write_all(input.to_string().as_bytes()));
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().map_err(|e| refused(e.to_string()))?.is_none() {
        if Instant::now() >= deadline {
            // It may have ended this moment.
            let _ = child.kill();
            let _ = child.wait();
            return Err(refused(format!("it did not end within {PATIENCE:?}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let output = child.wait_with_output().map_err(|e| refused(e.to_string()))?;
    if output.status.success() {
        return written.map_or(Ok(()), |done| done.map_err(|e| refused(e.to_string())));
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
