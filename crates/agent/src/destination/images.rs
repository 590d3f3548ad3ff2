//! The check of CRIU's images before they are restored: a peer has sent them.

use tranship_coordinator::Failure;
use tranship_criu::images::{self, Allowed, Finding, Images};
use tranship_criu::preflight::zombies;
use tranship_criu::{apparmor, hidden};
use tranship_sys::clock::monotonic_ns;
use tranship_sys::restart_blocks;
use tranship_types::{Blocker, BlockerKind};

use super::DestinationRun;
use crate::node::failed;
use crate::{tmpfs, uncarried};

/// What comes with CRIU's images: of engines and of agents, each with a reader of its own.
const OTHERS: [&str; 8] = [
    "descriptors.json",
    "conntrack",
    "conntrack-node",
    hidden::JOINED,
    uncarried::FILE,
    restart_blocks::RECORD,
    zombies::FILE,
    zombies::ENDS,
];

impl DestinationRun {
    /// What the container may have by the configuration from which the engine here makes it.
    pub(super) fn allowed(&self) -> Result<Allowed, Failure> {
        let path = self.bundle().join("config.json");
        let config =
            std::fs::read(&path).map_err(failed).and_then(|text| serde_json::from_slice(&text).map_err(failed));
        let config = config.map_err(|why| {
            Failure::new(format!("the container's configuration {} cannot be read: {why}", path.display()))
        })?;
        let mut allowed = Allowed::of(&config);
        allowed.privileged = self.node.peers().accept_of(&self.peer).is_some_and(|accept| accept.privileged);
        allowed.profile = allowed.profile.filter(images::Profile::is_enforced);
        allowed.in_network = self.offer.network_path().is_some();
        allowed.external = tmpfs::places(&self.offer)?;
        Ok(allowed)
    }

    /// Whether the profiles of AppArmor that confine the container's processes are there, and those of the container that the engine has made.
    ///
    /// # Errors
    /// The first that is not.
    pub(super) fn check_profiles(&self, allowed: &Allowed) -> Result<(), Failure> {
        let (name, here, profiles) = (&self.offer.container, &self.node.config.node, &self.offer.profiles);
        let other = allowed.profile.as_ref().and_then(|own| Some((own, profiles.iter().find(|name| !own.has(name))?)));
        let (cause, remedy) = match other {
            Some((own, theirs)) => {
                let cause =
                    format!("is confined by {theirs}, and would be by {own} as {} makes it", self.engine.name());
                (cause, "give it the same profile on both nodes: the same version of the engine, or a profile by name")
            }
            None => match apparmor::obstacle(profiles) {
                Some(obstacle) => obstacle,
                None => return Ok(()),
            },
        };
        let cause = format!("container {name} {cause} on node {here}");
        Failure::blocked(vec![Blocker::new(BlockerKind::Process, cause, remedy.to_owned())]).map_or(Ok(()), Err)
    }

    /// Compares the images with what the container may have. None come from now on.
    ///
    /// # Errors
    /// What they would do besides.
    pub(super) fn check_images(&mut self) -> Result<(), Failure> {
        let start = monotonic_ns();
        self.inbox.images.close()?;
        let allowed = self.allowed.take().map_or_else(|| self.allowed(), Ok)?;
        let read = Images::read(&self.layout.images(), &OTHERS).map_err(failed)?;
        let checked = images::check(&read, &allowed);
        self.timeline.note("skeleton: checked", start, monotonic_ns());
        let found = checked.err().unwrap_or_default();
        Failure::blocked(found.iter().map(|one| self.refusal(one)).collect()).map_or(Ok(()), Err)
    }

    fn refusal(&self, found: &Finding) -> Blocker {
        let (name, here, peer) = (&self.offer.container, &self.node.config.node, &self.peer);
        let cause = format!("cannot restore {name} on node {here}: the images that node {peer} sent {}", found.what);
        tracing::warn!(id = %self.id, cause, "refused");
        let otherwise = found.remedy.map(|remedy| format!("{remedy}; or ")).unwrap_or_default();
        let remedy = format!(
            "{otherwise}find out what has changed them on node {peer}; images of containers that may be privileged \
             (`privileged = true` in `accept` of [peers.{peer}]) are not compared"
        );
        Blocker::new(BlockerKind::Policy, cause, remedy)
    }
}
