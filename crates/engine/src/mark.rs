//! The mark on a container that an engine is about to start, and that is to be restored instead: how an agent tells the
//! runtime wrapper, which the engine executes in place of runc.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Images;

/// Where marks are, each under its container's id.
const DIRECTORY: &str = "/run/tranship/restores";

/// What the runtime wrapper has to know of a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    images: PathBuf,
    work: PathBuf,
    front: PathBuf,
    plan: PathBuf,
    /// The network namespace that was made for the container, and that the engine's network goes into.
    pub network: Option<PathBuf>,
    /// The directory that takes a copy of the configuration with which the container was restored.
    pub bundle: PathBuf,
}

impl Mark {
    /// The mark for a restore from these images.
    pub fn new(images: Images<'_>, network: Option<&Path>, bundle: &Path) -> Self {
        let [front, plan, work, images] = [images.front, images.plan, images.work, images.images].map(Path::to_owned);
        Self { images, work, front, plan, network: network.map(Path::to_owned), bundle: bundle.to_owned() }
    }

    fn path(id: &str) -> Option<PathBuf> {
        let plain = id.starts_with(|c: char| c.is_ascii_alphanumeric())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        plain.then(|| Path::new(DIRECTORY).join(id))
    }

    /// The mark on the container of this id, if it has one.
    pub fn on(id: &str) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(id)?).ok()?).ok()
    }

    /// All marks that there are, each with the id of its container.
    pub fn all() -> Vec<(String, Self)> {
        let entries = std::fs::read_dir(DIRECTORY).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().into_string().ok());
        ids.filter_map(|id| Some((id.clone(), Self::on(&id)?))).collect()
    }

    /// Marks the container of this id.
    pub fn put(&self, id: &str) -> io::Result<()> {
        let path = Self::path(id).ok_or_else(|| io::Error::other(format!("{id:?} is no id")))?;
        std::fs::create_dir_all(DIRECTORY)?;
        // No id begins like this.
        let nascent = Path::new(DIRECTORY).join(format!(".{id}"));
        std::fs::write(&nascent, serde_json::to_vec(self)?)?;
        std::fs::rename(nascent, path)
    }

    /// Takes the mark off, if there is one.
    pub fn take_off(id: &str) {
        if let Some(path) = Self::path(id) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Where images and front are.
    pub fn images(&self) -> Images<'_> {
        Images { images: &self.images, work: &self.work, front: &self.front, plan: &self.plan }
    }
}
