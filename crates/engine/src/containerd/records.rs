//! What containerd has written down: in which namespace a container is, its record, its snapshot, its image.

use std::path::PathBuf;

use super::client::Method;
use super::messages::{
    Any, Mounts, Named, Namespaces, OneImage, OneRecord, OneSnapshot, OneTask, Record, Snapshot, Task,
};
use super::parameters::Parameters;
use super::{Containerd, is_identifier};
use crate::{EngineError, Mark};

const NAMESPACES: Method = ("/containerd.services.namespaces.v1.Namespaces/List", "list its namespaces");
const GET: Method = ("/containerd.services.containers.v1.Containers/Get", "show");
const STAT: Method = ("/containerd.services.snapshots.v1.Snapshots/Stat", "show the snapshot");
const MOUNTS: Method = ("/containerd.services.snapshots.v1.Snapshots/Mounts", "show the snapshot");
const IMAGE: Method = ("/containerd.services.images.v1.Images/Get", "show the image");
const TASK: Method = ("/containerd.services.tasks.v1.Tasks/Get", "show the task");

/// Namespaces of those who have containerd run their containers, and would lose them.
const OTHERS: [&str; 2] = ["moby", "k8s.io"];

impl Containerd {
    /// Whether containers of a namespace are looked at.
    pub(super) fn tends(&self, namespace: &str) -> bool {
        match self.namespaces.is_empty() {
            true => !OTHERS.contains(&namespace),
            false => self.namespaces.iter().any(|one| one == namespace),
        }
    }

    /// The namespaces that there are, and that are looked at.
    pub(super) fn tended(&self) -> Result<Vec<String>, EngineError> {
        let all: Namespaces = self.call("", NAMESPACES, "", Named::default())?.unwrap_or_default();
        Ok(all.namespaces.into_iter().map(|one| one.name).filter(|name| self.tends(name)).collect())
    }

    /// The record of a container in a namespace.
    pub(super) fn record(&self, namespace: &str, name: &str) -> Result<Option<Record>, EngineError> {
        let found: Option<OneRecord> = self.call(namespace, GET, name, Named { name: name.to_owned() })?;
        Ok(found.and_then(|found| found.record))
    }

    /// The container of this name, and its namespace.
    pub(super) fn find(&self, name: &str) -> Result<Option<(String, Record)>, EngineError> {
        let mut found = None;
        if !is_identifier(name) {
            return Ok(None);
        }
        for namespace in self.tended()? {
            let Some(record) = self.record(&namespace, name)? else { continue };
            if let Some((other, _)) = found.replace((namespace.clone(), record)) {
                let why = format!(
                    "the namespaces {other} and {namespace} both have one of that name; remove one, or set `namespaces` in \
                     `[containerd]` of the agent's configuration"
                );
                return Err(Self::refused("tell which is meant by", name, why));
            }
        }
        Ok(found)
    }

    pub(super) fn there(&self, name: &str) -> Result<(String, Record), EngineError> {
        self.find(name)?.ok_or_else(|| EngineError::NoSuchContainer { engine: Self::NAME, name: name.to_owned() })
    }

    /// The directory that a snapshot's changes go into, where it has one.
    pub(super) fn layer(&self, namespace: &str, record: &Record) -> Result<Option<PathBuf>, EngineError> {
        let (snapshotter, key) = (record.snapshotter.clone(), record.snapshot_key.clone());
        let asked = Snapshot { snapshotter, key, parent: String::new() };
        let mounts: Mounts = self.call(namespace, MOUNTS, &record.id, asked)?.unwrap_or_default();
        let mut options = mounts.mounts.iter().filter(|mount| mount.kind == "overlay").flat_map(|mount| &mount.options);
        Ok(options.find_map(|option| option.strip_prefix("upperdir=").map(PathBuf::from)))
    }

    pub(super) fn image_digest(&self, namespace: &str, image: &str) -> Result<String, EngineError> {
        let found: Option<OneImage> = self.call(namespace, IMAGE, image, Named { name: image.to_owned() })?;
        Ok(found.and_then(|found| found.image?.target).map(|target| target.digest).unwrap_or_default())
    }

    pub(super) fn snapshot(
        &self,
        namespace: &str,
        snapshotter: &str,
        key: &str,
    ) -> Result<Option<OneSnapshot>, EngineError> {
        let asked = Snapshot { snapshotter: snapshotter.to_owned(), key: key.to_owned(), parent: String::new() };
        self.call(namespace, STAT, key, asked)
    }

    /// Where what the container says is written. While it arrives nobody may ask its shim.
    fn log(&self, namespace: &str, name: &str) -> Result<String, EngineError> {
        if Mark::on(name).is_some() {
            return Ok(String::new());
        }
        let task = self.task(namespace, name)?;
        Ok(task.map(|task| task.stdout).filter(|to| to.contains("://") && to != super::NOWHERE).unwrap_or_default())
    }

    /// What runs of a container.
    pub(super) fn task(&self, namespace: &str, name: &str) -> Result<Option<Task>, EngineError> {
        let found: Option<OneTask> = self.call(namespace, TASK, name, Named { name: name.to_owned() })?;
        Ok(found.and_then(|found| found.task))
    }

    pub(super) fn parameters(&self, namespace: &str, record: &Record) -> Result<Parameters, EngineError> {
        let runtime = record.runtime.clone().unwrap_or_default();
        let spec = record.spec.clone().unwrap_or_default();
        let spec = serde_json::from_slice(&spec.value).map_err(|e| EngineError::Unreadable {
            path: "OCI configuration".into(),
            name: record.id.clone(),
            why: e.to_string(),
        })?;
        let snapshot = self.snapshot(namespace, &record.snapshotter, &record.snapshot_key)?;
        let image_digest = self.image_digest(namespace, &record.image)?;
        let layers = if image_digest.is_empty() { Vec::new() } else { self.image_layers(namespace, &image_digest)? };
        let extension = |(name, any): (&String, &Any)| (name.clone(), (any.type_url.clone(), any.value.clone()));
        Ok(Parameters {
            namespace: namespace.to_owned(),
            labels: record.labels.clone(),
            image: record.image.clone(),
            image_digest,
            layers,
            snapshotter: record.snapshotter.clone(),
            parent: snapshot.and_then(|snapshot| snapshot.info).map(|info| info.parent).unwrap_or_default(),
            runtime: runtime.name,
            options: runtime.options.unwrap_or_default().value,
            spec,
            log: self.log(namespace, &record.id)?,
            extensions: record.extensions.iter().map(extension).collect(),
        })
    }

    /// Whether the image's name stands for the same image, and its layers are unpacked.
    pub(super) fn has_image(&self, parameters: &Parameters) -> Result<bool, EngineError> {
        let Parameters { namespace, image, image_digest, snapshotter, parent, .. } = parameters;
        Ok(self.image_digest(namespace, image)? == *image_digest
            && self.snapshot(namespace, snapshotter, parent)?.is_some())
    }
}
