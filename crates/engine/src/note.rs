//! What is noted in a bundle for the runtime wrapper, which finds it there when the engine calls it: a file of JSON for each kind of note.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes a note.
///
/// # Errors
/// If that cannot be written.
pub(crate) fn write(bundle: &Path, name: &str, note: &impl Serialize) -> io::Result<()> {
    std::fs::write(bundle.join(name), serde_json::to_vec(note)?)
}

/// Removes a note, if there is one.
///
/// # Errors
/// If it cannot be removed.
pub(crate) fn remove(bundle: &Path, name: &str) -> io::Result<()> {
    match std::fs::remove_file(bundle.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads a note; `None` if there is none.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn read<T: DeserializeOwned>(bundle: &Path, name: &str) -> io::Result<Option<T>> {
    match std::fs::read(bundle.join(name)) {
        Ok(note) => Ok(Some(serde_json::from_slice(&note)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
