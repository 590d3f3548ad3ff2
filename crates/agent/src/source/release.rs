//! The end on this node: the original is removed.

use std::time::{Duration, Instant};

use tranship_coordinator::Failure;
use tranship_engine::{Container, EngineError};
use tranship_network::cni;

use super::streams::show_tally;
use super::{FREEZE, SourceRun, failed};
use crate::held::{self, PendingHolders};
use crate::layout::Front;
use crate::node;
use crate::paths;

impl SourceRun {
    /// Removes the original, and then asks whether the destination has every page. May be begun again after a restart of
    /// the agent at any point: the directory with the note of which container is the original goes last.
    pub(super) fn release(&mut self) -> Result<(), Failure> {
        let preparation = self.node.leaving_slots.prepare(&|| false);
        if let Some(push) = self.push.take() {
            self.wire_bytes += push.gauge().wire_bytes();
        }
        self.end_engine(Duration::from_secs(10));
        match (self.engine.inspect(&self.name), self.original()) {
            (Ok(container), Some(original)) if container.created == original => self.remove_original(&container)?,
            (Err(EngineError::NoSuchContainer { .. }), _) => {
                tranship_storage::remove_tree(&self.node.bundle(&self.name)).map_err(failed)?;
            }
            // Another container, which was given the name after the original had been removed.
            (Ok(_), _) => tracing::info!(id = %self.id, "the original is gone already"),
            (Err(error), _) => return Err(failed(error)),
        }
        let held = held::hold_left(&self.node, &self.id);
        self.leave_directories();
        self.layout.remove()?;
        drop(preparation);
        self.await_drained();
        if let Err(failure) = held.and_then(|pending| pending.map_or(Ok(()), PendingHolders::wait)) {
            self.report_not_held(&failure);
        }
        Ok(())
    }

    /// When the container was made that is being moved: no other of its name was made at the same moment.
    fn original(&self) -> Option<String> {
        match &self.inspection {
            Some((container, _)) => Some(container.created.clone()),
            None => std::fs::read_to_string(self.layout.original()).ok(),
        }
    }

    /// The container is killed while frozen and behind its closed gate, so that it never runs again and not one packet of
    /// its end gets out. The engine forgets it only when all is gone that is found through the engine.
    fn remove_original(&mut self, container: &Container) -> Result<(), Failure> {
        // Its owner removes a namespace that is shared.
        let own = container.network_namespace().filter(|_| !self.joins_network());
        let namespace = own.filter(|path| path.exists());
        self.engine.retire(&self.name).map_err(failed)?;
        if let Some(namespace) = &namespace {
            // Another node's containers shall find the new copy from now on.
            tranship_network::stand_aside(namespace).map_err(failed)?;
        }
        container.freezer.kill_frozen(FREEZE).map_err(failed)?;
        // Stragglers: what was sent here before its sender had heard of the move. That they are lost is no reason to stop.
        if let Err(failure) = self.forward_held() {
            tracing::info!(id = %self.id, %failure, "the last held packets were not delivered");
        }
        if let Some(hold) = self.hold.take() {
            self.report_dropped(&hold);
        }
        // Engines are asked for their networks, which takes Podman some time: nothing waits for that here.
        let to_engine = self.report.read().options.to_engine;
        let held = held::note(&self.node, (&self.id, &self.peer, to_engine), &*self.engine, container);
        // The engine's files go with the container.
        self.end_log();
        if let Err(failure) = paths::left(&self.node, &self.id, (self.engine.name(), &self.name), namespace.as_deref())
        {
            tracing::error!(id = %self.id, %failure, "whether its paths are needed is looked at later");
        }
        self.gate = None;
        if let Some(namespace) = namespace.filter(|_| !self.engine.attaches_network()) {
            // As long as its interfaces tell what is CNI's of it.
            if namespace.exists() {
                let attached = cni::attachments(&self.name, &namespace).map_err(failed)?;
                let own = (self.name.as_str(), self.engine.name());
                if let Err(failure) = held::leave(&self.node, &self.id, &self.peer, own, &attached) {
                    self.report_not_held(&failure);
                }
                cni::detach(&namespace, &attached).map_err(failed)?;
            }
            tranship_network::remove(&namespace).map_err(failed)?;
        }
        self.engine.remove(&self.name).map_err(failed)?;
        if let Err(failure) = held {
            self.report_not_held(&failure);
        }
        tranship_storage::remove_tree(&self.node.bundle(&self.name)).map_err(failed)
    }

    /// The container runs elsewhere: that its addresses are not held here is no reason not to end.
    fn report_not_held(&self, failure: &Failure) {
        tracing::error!(id = %self.id, %failure, "the addresses are not held");
        let way = format!("network: the container's addresses are not held on this node: {failure}");
        self.report.change(|r| r.ways.push(way));
    }

    /// Has the destination's word that every page is in place, which lets it forget the migration.
    pub fn confirm_drained(&mut self) -> Result<(), Failure> {
        if self.release_told {
            return Ok(());
        }
        // Where nothing is lacking from here, it takes as long as putting the pages in place does.
        while self.ask_drained(true)?.is_some() {}
        Ok(())
    }

    /// Only the report and what the destination remembers depend on it: if it does not answer now, it is asked later.
    fn await_drained(&mut self) {
        if let Err(failure) = self.confirm_drained() {
            tracing::info!(id = %self.id, %failure, "the destination did not say that it has drained");
        }
        if let Some(control) = &self.control {
            self.wire_bytes += control.bytes_sent();
        }
        let bytes = self.wire_bytes;
        self.report.change(|r| {
            r.progress.wire_bytes = bytes;
            show_tally(&self.tally, r);
        });
    }

    /// Waits for the engine's own process, so that no zombie of it stays.
    pub(super) fn end_engine(&mut self, patience: Duration) {
        let Some(Front { engine: Some(mut engine), criu, handle }) = self.front.take() else { return };
        drop(handle);
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            match engine.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                _ => return,
            }
        }
        node::kill(criu);
        node::kill(engine.id());
        let _ = engine.wait();
    }
}
