//! An image as an archive (`docker save`, `podman save`), and the same without the layers that the other node has.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tar::{Archive, Builder};

use crate::MissingImage;

/// The archive's file that says which of its files are layers.
const MANIFEST: &str = "manifest.json";
const MANIFEST_CAP: u64 = 4 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    layers: Vec<PathBuf>,
}

/// What becomes of the layers that are not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// Docker does not miss them.
    LeftOut,
    /// Podman takes an archive for broken in which a layer's file is not there, but does not read that of a layer that it has.
    Empty,
}

impl Known {
    /// As the engine wants it that lacks the image.
    pub fn in_archive(missing: &MissingImage) -> Self {
        if missing.known_as_empty { Self::Empty } else { Self::LeftOut }
    }
}

/// The files of an archive of one image in which its first `known` layers are, and nothing else.
///
/// # Errors
/// If the archive cannot be read.
pub(crate) fn first_layers(archive: impl Read, known: usize) -> io::Result<HashSet<PathBuf>> {
    let (mut images, mut links) = (Vec::new(), HashSet::new());
    for entry in Archive::new(archive).entries()? {
        let entry = entry?;
        if entry.link_name()?.is_some() {
            links.insert(entry.path()?.into_owned());
        }
        if *entry.path()? == *Path::new(MANIFEST) {
            images = serde_json::from_reader::<_, Vec<Image>>(entry.take(MANIFEST_CAP))?;
        }
    }
    // A layer that is equal to another one may be a link to it.
    let is_plain = |image: &Image| !image.layers.iter().any(|layer| links.contains(layer));
    let Some(image) = images.pop().filter(is_plain) else { return Ok(HashSet::new()) };
    let (first, rest) = image.layers.split_at(known.min(image.layers.len()));
    Ok(first.iter().filter(|layer| !rest.contains(layer)).cloned().collect())
}

/// Copies an archive, but for the content of these files.
///
/// # Errors
/// Those of reading and writing.
pub(crate) fn copy_without(
    archive: impl Read,
    (layers, known): (&HashSet<PathBuf>, Known),
    sink: &mut dyn Write,
) -> io::Result<()> {
    let mut copy = Builder::new(sink);
    for entry in Archive::new(archive).entries()? {
        let entry = entry?;
        let path = entry.path()?.into_owned();
        let mut header = entry.header().clone();
        if layers.contains(&path) {
            if known == Known::Empty {
                header.set_size(0);
                copy.append_data(&mut header, path, io::empty())?;
            }
            continue;
        }
        header.set_size(entry.size());
        match entry.link_name()?.map(std::borrow::Cow::into_owned) {
            Some(target) => copy.append_link(&mut header, path, target)?,
            None => copy.append_data(&mut header, path, entry)?,
        }
    }
    copy.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(link: Option<&str>) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        let mut add = |path: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, path, content).unwrap();
        };
        add("b1/layer.tar", &[1; 2000]);
        add("a2/layer.tar", &[2; 3000]);
        add("c.json", b"{}");
        let linked = if link.is_some() { r#","d3/layer.tar""# } else { "" };
        let layers = format!(r#"[{{"Config":"c.json","Layers":["b1/layer.tar","a2/layer.tar"{linked}]}}]"#);
        add(MANIFEST, layers.as_bytes());
        if let Some(target) = link {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            builder.append_link(&mut header, "d3/layer.tar", target).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn names(archive: &[u8]) -> Vec<String> {
        let mut archive = Archive::new(archive);
        archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect()
    }

    #[test]
    fn layers_that_are_there_are_left_out() {
        let whole = archive(None);
        let known = first_layers(whole.as_slice(), 1).unwrap();
        let (mut rest, mut emptied) = (Vec::new(), Vec::new());
        copy_without(whole.as_slice(), (&known, Known::LeftOut), &mut rest).unwrap();
        assert_eq!(names(&rest), ["a2/layer.tar", "c.json", "manifest.json"]);
        copy_without(whole.as_slice(), (&known, Known::Empty), &mut emptied).unwrap();
        assert_eq!(names(&emptied), names(&whole));
        assert!(emptied.len() < whole.len());
        assert!(first_layers(whole.as_slice(), 0).unwrap().is_empty());
        assert_eq!(first_layers(whole.as_slice(), 9).unwrap().len(), 2);
    }

    #[test]
    fn what_another_layer_is_a_link_to_is_not_left_out() {
        let whole = archive(Some("../b1/layer.tar"));
        assert!(first_layers(whole.as_slice(), 1).unwrap().is_empty());
        let (mut same, nothing) = (Vec::new(), HashSet::new());
        copy_without(whole.as_slice(), (&nothing, Known::LeftOut), &mut same).unwrap();
        assert_eq!(names(&same), names(&whole));
    }

    #[test]
    fn what_is_no_archive_is_an_error() {
        assert!(first_layers(&[7_u8; 600][..], 1).is_err());
    }
}
