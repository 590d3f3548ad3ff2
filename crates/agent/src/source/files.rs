//! The content of tmpfs mounts and of directory trees, on the source's side.

use std::path::PathBuf;

use tranship_coordinator::Failure;
use tranship_engine::Container;
use tranship_storage::carried;
use tranship_types::Bandwidth;
use tranship_wire::message::Offer;

use super::{SourceRun, failed};
use crate::copying::Left;
use crate::{images, logs, trees};

impl SourceRun {
    /// Brings the container's image to the destination, where its engine makes the root from one.
    pub(super) fn send_image(&mut self) -> Result<(), Failure> {
        if !self.engine.makes_root() {
            return Ok(());
        }
        let pace = self.report.read().options.bandwidth.map(Bandwidth::bytes_per_second);
        let (own, offer) = (self.inspected()?.0.parameters.clone(), self.inspected()?.1.clone());
        let peer = (&self.peer, &self.id);
        if let Some((wire_bytes, way)) =
            images::send(&self.node, peer, (&*self.engine, &own, &offer), (&self.report, pace))?
        {
            self.wire_bytes += wire_bytes;
            self.report.change(|r| r.ways.push(way));
        }
        Ok(())
    }

    /// Copies what the destination does not have yet of the content of tmpfs mounts, while the container runs. Returns how many
    /// bytes that was.
    pub(super) fn send_files(&mut self) -> Result<u64, Failure> {
        self.interrupt.check()?;
        let mut pids = self.inspected()?.0.processes().map_err(failed)?;
        pids.extend(self.others_in_memory());
        let sent = self.files.as_mut().map_or(Ok(0), |files| files.pass(&pids))?;
        self.report.change(|r| r.progress.moved_bytes += sent);
        Ok(sent + self.send_trees()?)
    }

    /// Opens the directory trees that move with the container, and notes which directories of this node's own stay behind.
    pub(super) fn begin_trees(&mut self, container: &Container, offer: &Offer) -> Result<(), Failure> {
        let verify = self.report.read().options.verify_files;
        self.trees = trees::Leaving::begin(&self.node, &self.peer, &self.id, container, (offer, verify))?;
        if self.trees.is_some() {
            let note = serde_json::to_vec(&trees::own_directories(offer)).map_err(failed)?;
            std::fs::write(self.layout.left_directories(), note).map_err(failed)?;
        }
        Ok(())
    }

    /// Opens the container's log, if it moves along.
    pub(super) fn begin_log(&mut self, offer: &Offer) -> Result<(), Failure> {
        let Some(log) = &offer.log else { return Ok(()) };
        if !self.peer_keeps_log {
            let left = self.engine.log_left(&self.inspected()?.0);
            let way = format!("logs: the agent of node {} is too old to take {} KiB", self.peer, log.bytes >> 10);
            self.report.change(|r| r.ways.extend([Some(way), left].into_iter().flatten()));
            return Ok(());
        }
        self.log = Some(logs::Leaving::begin((&self.node, &self.peer), &self.id, &*self.engine, &offer.container)?);
        Ok(())
    }

    /// Sends what was logged after the freeze's last look, and ends the log: what the engine had not written by then, and a last line
    /// without an end.
    pub(super) fn end_log(&mut self) {
        let Some(log) = self.log.take() else { return };
        let (sent, way) = log.end(&self.peer, &*self.engine, &self.name);
        self.wire_bytes += sent;
        self.report.change(|r| r.ways.extend(way));
    }

    /// Copies what the destination does not have yet of directory trees and of the log, while the container runs.
    pub(super) fn send_trees(&mut self) -> Result<u64, Failure> {
        self.interrupt.check()?;
        let pids = self.inspected()?.0.processes().map_err(failed)?;
        let sent = self.trees.as_mut().map_or(Ok(0), |trees| trees.pass(&pids))?;
        let sent = sent + self.log.as_mut().map_or(Ok(0), logs::Leaving::pass)?;
        self.report.change(|r| r.progress.moved_bytes += sent);
        Ok(sent)
    }

    /// Marks the directories that stay behind, so that they may be replaced when the container comes back.
    pub(super) fn leave_directories(&mut self) {
        let note = std::fs::read(self.layout.left_directories()).unwrap_or_default();
        let left: Vec<PathBuf> = serde_json::from_slice(&note).unwrap_or_default();
        // Some went with the container.
        for path in left.into_iter().filter(|path| path.exists()) {
            let way = match carried::leave(&path, self.id.as_str()) {
                Ok(()) => {
                    format!("files: {} stays here as it was at the freeze; nobody needs it any more", path.display())
                }
                Err(error) => {
                    format!("files: {} must be removed before the container can come back: {error}", path.display())
                }
            };
            self.report.change(|r| r.ways.push(way));
        }
    }

    /// Takes note of how the last changes were sent.
    pub(super) fn files_left(&mut self, what: &str, left: Option<Left>) {
        if let Some(left) = left {
            self.wire_bytes += left.wire_bytes;
            self.timeline.note(format!("{what}: last changes"), left.start_ns, left.end_ns);
            self.report.change(|r| r.ways.push(left.way));
        }
    }
}
