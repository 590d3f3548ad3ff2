//! Records in the state directory that outlast the host: a file of JSON for each, replaced as a whole.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tranship_coordinator::Failure;

/// Writes a record, or replaces it. Makes the directory where it is missing.
pub fn write(directory: &Path, file: &Path, record: &impl Serialize) -> Result<(), Failure> {
    let written = || -> std::io::Result<()> {
        fs::create_dir_all(directory)?;
        let new = file.with_extension("new");
        let mut to = File::create(&new)?;
        to.write_all(&serde_json::to_vec(record)?)?;
        to.sync_all()?;
        fs::rename(new, file)?;
        File::open(directory)?.sync_all()
    };
    written().map_err(|e| Failure::new(format!("the record {} cannot be written: {e}", file.display())))
}

/// Reads a record, if there is one.
pub fn read<T: DeserializeOwned>(file: &Path) -> Result<Option<T>, Failure> {
    let unreadable =
        |e: &dyn std::fmt::Display| Failure::new(format!("the record {} cannot be read: {e}", file.display()));
    match fs::read(file) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(unreadable(&e)),
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| unreadable(&e)),
    }
}

/// Names of the records of a directory, without `.json`; none where there is no directory.
pub fn names(directory: &Path) -> Result<Vec<String>, Failure> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Failure::new(format!("{} cannot be read: {e}", directory.display()))),
        Ok(entries) => entries,
    };
    Ok(entries.flatten().filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(".json")?.to_owned())).collect())
}

/// Removes a record. Success if it is not there.
pub fn remove(file: &Path) -> Result<(), Failure> {
    match fs::remove_file(file) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(Failure::new(format!("the record {} cannot be removed: {e}", file.display())))
        }
        _ => Ok(()),
    }
}
