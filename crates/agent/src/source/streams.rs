//! The streams of pages: how they are opened, whether their pages are compressed, and why they fail.

use std::sync::Arc;
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_engine::behind_links;
use tranship_memory::compress::{Compressor, LinkUse, Tally};
use tranship_memory::deduplicate::Deduplicator;
use tranship_memory::send::{SendError, Stream};
use tranship_transport::{Connection, Link};
use tranship_types::{Compress, NodeName, Report};
use tranship_wire::message::{Offer, Request, Response};
use tranship_wire::{Codec, Purpose, URGENT_STREAM, Versions, WriteError};

use super::{FROZEN_PATIENCE, PREPARE, SourceRun, failed};
use crate::node::sentence;

/// How long the destination may take to say why it gave a stream up: the container may be frozen meanwhile.
const REASON: Duration = Duration::from_secs(2);

/// Bytes that may still be on their way on each stream when what was sent counts as arrived: a slow link has them through in a few milliseconds,
/// and the last of them may be acknowledged 40 ms late.
const ON_THEIR_WAY: usize = 32 << 10;
/// Between two looks at that.
const LOOK: Duration = Duration::from_micros(500);

/// Waits until all that was given to the streams has come to the other host. Sockets take megabytes at once; what the container is frozen with
/// there keeps all that follows waiting, over 1 Gbit/s for more than a tenth of a second.
pub(super) fn await_arrival(streams: &mut [Stream<Connection>]) -> Result<(), SendError> {
    streams.iter_mut().try_for_each(|stream| {
        // An interruption breaks the link.
        while stream.link().in_flight().map_err(WriteError::from)? > ON_THEIR_WAY {
            std::thread::sleep(LOOK);
        }
        Ok(())
    })
}

impl SourceRun {
    /// Refuses what the destination does not understand, while nothing depends on it yet.
    pub(super) fn check_version(&mut self) -> Result<(), Failure> {
        let wanted = self.report.read().options.compress;
        let version = self.control()?.version();
        understands_network(version, &self.peer, &self.inspected()?.1)?;
        if version >= Versions::PACKED || matches!(wanted, Compress::Auto | Compress::Off) {
            return Ok(());
        }
        Err(Failure::new(format!(
            "node {} speaks version {version} of the protocol, in which pages cannot be compressed; update its agent, or leave \
             out --compress {wanted}",
            self.peer
        )))
    }

    /// Opens a stream. The pages of the one for what somebody waits for travel as they are.
    pub(super) fn page_stream(&self, stream: u8) -> Result<Stream<Connection>, Failure> {
        let mut link = self.node.dial(&self.peer, Purpose::Pages { stream }, Some(&self.id))?;
        link.set_timeout(Some(FROZEN_PATIENCE)).map_err(failed)?;
        let how = match stream != URGENT_STREAM && link.version() >= Versions::PACKED {
            true => self.report.read().options.compress,
            false => Compress::Off,
        };
        // Of what was named, each page is sent, on whatever stream.
        let deduplicate = stream != URGENT_STREAM && link.version() >= Versions::SAME;
        let counters = link.counters();
        let used = move || LinkUse { sent: counters.sent(), blocked: counters.blocked() };
        let compressor = Compressor::new(how, used, Arc::clone(&self.tally)).map_err(failed)?;
        let stream = Stream::new(link, compressor);
        Ok(if deduplicate { stream.deduplicate(Deduplicator::new(Arc::clone(&self.tally))) } else { stream })
    }

    /// Why memory could not be sent. Where the destination gave a stream up, this node saw it break, and that one knows why.
    pub(super) fn not_sent(&self, error: &SendError) -> Failure {
        match error {
            SendError::Send(_) => {
                let peer = &self.peer;
                self.reason(Failure::new(format!("{}; see that node {peer} and its agent run", sentence(error))))
            }
            _ => failed(sentence(error)),
        }
    }

    /// The destination's reason for giving a stream up, if it has one; else what was seen here.
    pub(super) fn reason(&self, seen: Failure) -> Failure {
        self.ask_reason().map_or(seen, Failure::new)
    }

    /// Waits until the destination has the memory for all pages that are to come, so that none is lacking when the container is frozen.
    pub(super) fn await_memory(&mut self) -> Result<(), Failure> {
        if self.control()?.version() < Versions::PACKED {
            return Ok(());
        }
        self.say(&Request::Streams)?;
        match self.hear(PREPARE)? {
            Response::Streams => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Over a link of its own: on the control link an answer may be due that takes longer.
    fn ask_reason(&self) -> Option<String> {
        self.control.as_ref()?;
        let mut link = self.node.dial_within(REASON, &self.peer, Purpose::Control, Some(&self.id)).ok()?;
        if link.version() < Versions::PACKED {
            return None;
        }
        link.set_timeout(Some(REASON)).ok()?;
        tranship_wire::write_message(&mut link, &Request::Streams).ok()?;
        match tranship_wire::read_message(&mut link).ok()? {
            Response::Failed { message, .. } => Some(message),
            _ => None,
        }
    }
}

/// What did not travel as it is so far, for those who look at the report.
pub(super) fn show_tally(tally: &Tally, report: &mut Report) {
    report.progress.deduplicated_bytes = tally.deduplicated();
    (report.progress.lz4, report.progress.zstd) = (tally.of(Codec::Lz4), tally.of(Codec::Zstd));
}

/// Refuses sockets with options that a destination which speaks this version cannot set.
pub(super) fn understands_options(version: u16, peer: &NodeName, options: &[String]) -> Result<(), Failure> {
    match options {
        [first, ..] if version < Versions::OPTIONS => Err(Failure::new(format!(
            "a socket of the container has {first} set, and node {peer} speaks version {version} of the protocol, in which that cannot \
             be moved; update its agent"
        ))),
        _ => Ok(()),
    }
}

/// Refuses files of sockets that have other names than those that the sockets were bound to, which older agents do not give them.
pub(super) fn understands_socket_files(version: u16, peer: &NodeName, are_renamed: bool) -> Result<(), Failure> {
    if !are_renamed || version >= Versions::SOCKET_FILES {
        return Ok(());
    }
    Err(Failure::new(format!(
        "the file of a Unix socket of the container was renamed, and node {peer} speaks version {version} of the protocol, in which \
         that cannot be moved; update its agent"
    )))
}

/// Refuses states of descriptors that older agents do not give them.
pub(super) fn understands_states(version: u16, peer: &NodeName, newer: Option<&str>) -> Result<(), Failure> {
    match newer.filter(|_| version < Versions::HUNG_UP) {
        Some(what) => Err(Failure::new(format!(
            "the container has {what}, and node {peer} speaks version {version} of the protocol, in which that cannot be \
             moved; update its agent"
        ))),
        None => Ok(()),
    }
}

/// Refuses an offer whose network, or sockets, a destination that speaks this version would take for others.
pub(super) fn understands_network(version: u16, peer: &NodeName, offer: &Offer) -> Result<(), Failure> {
    understands_options(version, peer, &offer.socket_options)?;
    understands_socket_files(version, peer, offer.renamed_sockets)?;
    if version < Versions::PATHS && !offer.paths.is_empty() {
        return Err(Failure::new(format!(
            "node {peer} speaks version {version} of the protocol, in which no path can be kept; update its agent, or leave out --keep-path"
        )));
    }
    if let Some(stream) = offer.streams_of_node.first().filter(|_| version < Versions::STDIO) {
        return Err(Failure::new(format!(
            "{stream} of the container is the {} {}, and node {peer} speaks version {version} of the protocol, in which that cannot be \
             moved; update its agent",
            stream.kind, stream.name
        )));
    }
    if version < Versions::LINKED_MOUNTS
        && let Some(place) = behind_links(&offer.config).next()
    {
        return Err(Failure::new(format!(
            "{place:?} of the container, on which something is mounted, leads through a symbolic link, and node {peer} speaks version \
             {version} of the protocol, in which that cannot be moved; update its agent"
        )));
    }
    if version < Versions::LOOPBACK
        && let Some(first) = offer.network.as_ref().and_then(|(_, identity)| identity.loopback.first())
    {
        let address = first.address;
        return Err(Failure::new(format!(
            "the container has the address {address} on its loopback interface, and node {peer} speaks version {version} of the protocol, \
             in which that cannot be moved; update its agent"
        )));
    }
    if version < Versions::RULESET && offer.network.as_ref().is_some_and(|(_, identity)| !identity.ruleset.is_empty()) {
        return Err(Failure::new(format!(
            "node {peer} speaks version {version} of the protocol, in which the rules of nftables inside the container cannot be moved; \
             update its agent"
        )));
    }
    if version < Versions::CNI && offer.network.as_ref().is_some_and(|(_, identity)| !identity.cni.is_empty()) {
        return Err(Failure::new(format!(
            "node {peer} speaks version {version} of the protocol, in which the addresses that CNI has reserved cannot be moved; update \
             its agent"
        )));
    }
    if version >= Versions::ROUTING || offer.network.as_ref().is_none_or(|(_, identity)| !identity.has_policy_routing())
    {
        return Ok(());
    }
    Err(Failure::new(format!(
        "node {peer} speaks version {version} of the protocol, in which policy rules and routes of other tables than main cannot be \
         moved; update its agent"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_that_an_older_node_does_not_find_is_named() {
        let mount = serde_json::json!({"destination": "/run/x", "configuredDestination": "/var/run/x"});
        let offer = |mounts: &[&serde_json::Value]| -> Offer {
            serde_json::from_value(serde_json::json!({
                "container": "web", "engine": "docker", "mode": "auto", "memory_bytes": 1, "shared_bytes": 0, "rootfs": null,
                "cpu": null, "binds": [], "streams": 1, "criu": "", "config": {"mounts": mounts}, "network": null,
            }))
            .unwrap()
        };
        let peer = "b".parse::<NodeName>().unwrap();
        understands_network(Versions::LINKED_MOUNTS, &peer, &offer(&[&mount])).unwrap();
        understands_network(Versions::LINKED_MOUNTS - 1, &peer, &offer(&[])).unwrap();
        let refused = understands_network(Versions::LINKED_MOUNTS - 1, &peer, &offer(&[&mount])).unwrap_err().message;
        for word in ["\"/var/run/x\"", "node b", "version 10", "update its agent"] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }

    #[test]
    fn a_path_that_an_older_node_would_not_keep_is_refused() {
        let offer = |paths: serde_json::Value| -> Offer {
            serde_json::from_value(serde_json::json!({
                "container": "web", "engine": "docker", "mode": "auto", "memory_bytes": 1, "shared_bytes": 0, "rootfs": null,
                "cpu": null, "binds": [], "streams": 1, "criu": "", "config": {}, "network": null, "paths": paths,
            }))
            .unwrap()
        };
        let kept = offer(serde_json::json!([{
            "id": 7, "port": 7077, "network": "shop", "interface": "eth0", "source": "10.0.0.1", "destination": "10.0.0.2",
            "guarded": [], "ends": [],
        }]));
        let peer = "b".parse::<NodeName>().unwrap();
        understands_network(Versions::PATHS, &peer, &kept).unwrap();
        understands_network(Versions::PATHS - 1, &peer, &offer(serde_json::json!([]))).unwrap();
        let refused = understands_network(Versions::PATHS - 1, &peer, &kept).unwrap_err().message;
        for word in ["node b", "version 15", "update its agent", "--keep-path"] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }

    #[test]
    fn options_that_an_older_node_cannot_set_are_named() {
        let (peer, options) = ("b".parse::<NodeName>().unwrap(), ["UDPLITE_SEND_CSCOV".to_owned()]);
        understands_options(Versions::OPTIONS, &peer, &options).unwrap();
        understands_options(Versions::OPTIONS - 1, &peer, &[]).unwrap();
        let refused = understands_options(Versions::OPTIONS - 1, &peer, &options).unwrap_err().message;
        for word in ["UDPLITE_SEND_CSCOV", "node b", "version 8", "update its agent"] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }
}
