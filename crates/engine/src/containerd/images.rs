//! Images on their way from one containerd to another: as archives of `ctr images export`, without the blobs that are there.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::Method;
use super::messages::{Content, ContentInfo, ContentPiece, OneContent};
use super::parameters::Parameters;
use super::{Containerd, is_identifier};
use tranship_sys::launch::{Started, Stream};

use crate::archive::{self, Known};
use crate::{EngineError, MissingImage};

const INFO: Method = ("/containerd.services.content.v1.Content/Info", "look for a part of the image");
const READ: Method = ("/containerd.services.content.v1.Content/Read", "read the image");

/// Longest list of what an image consists of.
const LIST_CAP: i64 = 4 << 20;
/// What `ctr` says when it fails, at most.
const WORDS_CAP: u64 = 16 << 10;

/// A layer of an image, as it is kept: most often compressed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layer {
    pub digest: String,
    pub size: u64,
}

/// An image's manifest, or an index of some for different platforms.
#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    layers: Vec<Layer>,
    #[serde(default)]
    manifests: Vec<OfPlatform>,
}

#[derive(Deserialize)]
struct OfPlatform {
    digest: String,
    platform: Option<Value>,
}

impl OfPlatform {
    fn is_for_this(&self) -> bool {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        self.platform.as_ref().is_none_or(|p| p["os"] == "linux" && p["architecture"] == architecture)
    }
}

/// A digest, and no path: it becomes a part of one.
fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Where an archive has a blob.
fn in_archive(digest: &str) -> PathBuf {
    format!("blobs/{}", digest.replace(':', "/")).into()
}

impl Containerd {
    fn content(&self, namespace: &str, digest: &str) -> Result<Option<ContentInfo>, EngineError> {
        let found: Option<OneContent> = self.call(namespace, INFO, digest, Content { digest: digest.to_owned() })?;
        Ok(found.and_then(|found| found.info))
    }

    /// What a manifest or an index says; `None` if it is not there, or says nothing that can be read.
    fn listed(&self, namespace: &str, digest: &str) -> Result<Option<Listed>, EngineError> {
        if self.content(namespace, digest)?.is_none_or(|info| info.size > LIST_CAP) {
            return Ok(None);
        }
        let pieces: Option<Vec<ContentPiece>> =
            self.call_all(namespace, READ, digest, Content { digest: digest.to_owned() })?;
        let text: Vec<u8> = pieces.unwrap_or_default().into_iter().flat_map(|piece| piece.data).collect();
        Ok(serde_json::from_slice(&text).ok())
    }

    /// The layers of an image for this node's platform, the lowest first; none where containerd does not have them all.
    pub(super) fn image_layers(&self, namespace: &str, digest: &str) -> Result<Vec<Layer>, EngineError> {
        let mut listed = self.listed(namespace, digest)?;
        if let Some(own) = listed.as_ref().and_then(|index| index.manifests.iter().find(|one| one.is_for_this())) {
            listed = self.listed(namespace, &own.digest)?;
        }
        let layers = listed.map(|manifest| manifest.layers).unwrap_or_default();
        for layer in &layers {
            if self.content(namespace, &layer.digest)?.is_none() {
                return Ok(Vec::new());
            }
        }
        Ok(layers)
    }

    /// What of an image is missing here; `None` if nothing is, or if it cannot come.
    pub(super) fn lacking(&self, parameters: &Parameters) -> Result<Option<MissingImage>, EngineError> {
        let Parameters { namespace, image, layers, .. } = parameters;
        let elsewhere = layers.is_empty() || !layers.iter().all(|layer| is_digest(&layer.digest));
        if elsewhere || self.has_image(parameters)? || self.is_another(parameters)? {
            return Ok(None);
        }
        let (mut known, mut bytes) = (Vec::new(), 0_u64);
        for layer in layers {
            match self.content(namespace, &layer.digest)? {
                Some(_) => known.push(layer.digest.clone()),
                None => bytes = bytes.saturating_add(layer.size),
            }
        }
        Ok(Some(MissingImage {
            name: image.clone(),
            may_be_named: true,
            bytes,
            layers: layers.len(),
            known_layers: known.len(),
            known_as_empty: false,
            known,
            directory: self.root(parameters)?,
        }))
    }

    /// Whether the image's name stands for another one here.
    pub(super) fn is_another(&self, parameters: &Parameters) -> Result<bool, EngineError> {
        let here = self.image_digest(&parameters.namespace, &parameters.image)?;
        Ok(!here.is_empty() && here != parameters.image_digest)
    }

    /// What `ctr` did not do to an image, in its own last words.
    fn image_trouble(what: &'static str, image: &str, why: impl Into<String>) -> EngineError {
        Self::refused(what, image, why)
    }

    fn run(
        &self,
        (what, image): (&'static str, &str),
        namespace: &str,
        arguments: &[&str],
    ) -> Result<Started, EngineError> {
        let plain = !image.is_empty() && !image.starts_with('-') && is_identifier(namespace);
        if !plain {
            return Err(Self::image_trouble(what, image, "that is no name for an image"));
        }
        let mut command = self.ctr(namespace, arguments);
        command.stdin(Stream::Piped).stdout(Stream::Piped).stderr(Stream::Piped);
        command
            .with_usual_umask()
            .spawn()
            .map_err(|source| EngineError::Run { program: self.ctr.clone().into(), source })
    }

    /// Writes an image as an archive, but for the layers that are known.
    pub(super) fn export(
        &self,
        parameters: &Parameters,
        missing: &MissingImage,
        sink: &mut dyn Write,
    ) -> Result<(), EngineError> {
        const WHAT: &str = "save the image";
        let image = parameters.image.as_str();
        let mut child = self.run((WHAT, image), &parameters.namespace, &["images", "export", "-", image])?;
        let words = child.stderr.take().and_then(last_words);
        let left_out: HashSet<PathBuf> =
            missing.known.iter().filter(|digest| is_digest(digest)).map(|d| in_archive(d)).collect();
        let copied = match child.stdout.take() {
            Some(mut archive) => archive::copy_without(&mut archive, (&left_out, Known::LeftOut), sink)
                // What pads an archive's end is read by nobody, and written nevertheless.
                .and_then(|()| io::copy(&mut archive, &mut io::sink()).map(drop)),
            None => Ok(()),
        };
        if copied.is_err() {
            // It would wait for somebody to read on.
            let _ = child.kill();
        }
        let status = child.wait().map_err(|e| Self::image_trouble(WHAT, image, e.to_string()))?;
        let words = words.and_then(|words| words.join().ok()).unwrap_or_default();
        match copied {
            Ok(()) if status.success() => Ok(()),
            // What it says is the cause of what was read of its archive.
            _ if !words.is_empty() => Err(Self::image_trouble(WHAT, image, words)),
            Err(error) => Err(Self::image_trouble(WHAT, image, error.to_string())),
            Ok(()) => Err(Self::image_trouble(WHAT, image, format!("ctr ended with {status}"))),
        }
    }

    /// Takes in such an archive. `ctr` removes what it has of one that breaks off.
    pub(super) fn import(&self, parameters: &Parameters, archive: &mut dyn Read) -> Result<(), EngineError> {
        const WHAT: &str = "load the image";
        let Parameters { namespace, image, snapshotter, .. } = parameters;
        if !is_identifier(snapshotter) {
            return Err(Self::image_trouble(WHAT, image, "that is no name for a snapshotter"));
        }
        let mut child = self.run((WHAT, image), namespace, &["images", "import", "--snapshotter", snapshotter, "-"])?;
        let words = child.stderr.take().and_then(last_words);
        let said = child.stdout.take().and_then(last_words);
        let copied = child.stdin.take().map_or(Ok(0), |mut stdin| io::copy(archive, &mut stdin));
        let status = child.wait().map_err(|e| Self::image_trouble(WHAT, image, e.to_string()))?;
        let words = words.and_then(|words| words.join().ok()).unwrap_or_default();
        drop(said.map(std::thread::JoinHandle::join));
        match copied {
            // Where it hangs up it says why.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe || status.success() => {
                Err(Self::image_trouble(WHAT, image, error.to_string()))
            }
            _ if !status.success() => Err(Self::image_trouble(WHAT, image, words)),
            _ if self.has_image(parameters)? => Ok(()),
            _ => Err(Self::image_trouble(WHAT, image, "it has another digest there")),
        }
    }
}

/// The last line of what a program says, from a thread that reads all of it. Where there is none, a program that says
/// anything fails.
fn last_words(mut pipe: impl Read + Send + 'static) -> Option<std::thread::JoinHandle<String>> {
    let read = move || {
        let mut text = Vec::new();
        // Whatever came before an error is what there is to tell.
        let _ = (&mut pipe).take(WORDS_CAP).read_to_end(&mut text);
        let _ = io::copy(&mut pipe, &mut io::sink());
        let text = String::from_utf8_lossy(&text);
        text.trim().lines().last().unwrap_or_default().trim_start_matches("ctr: ").to_owned()
    };
    tranship_sys::threads::start("last words", read).ok()
}

/// For the fuzz targets: a manifest or an index.
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(listed) = serde_json::from_slice::<Listed>(data) else { return };
    let _ = listed.manifests.iter().any(OfPlatform::is_for_this);
    for layer in listed.layers.iter().filter(|layer| is_digest(&layer.digest)) {
        assert!(in_archive(&layer.digest).starts_with("blobs/sha256") && !layer.digest.contains(".."));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_no_path() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        assert!(is_digest(&digest) && !is_digest("sha256:../../x") && !is_digest(""));
        assert_eq!(in_archive(&digest), PathBuf::from(format!("blobs/sha256/{}", "0f".repeat(32))));
    }

    #[test]
    fn an_index_leads_to_the_manifest_for_this_platform() {
        let index = r#"{"manifests": [
            {"digest": "sha256:1", "platform": {"os": "windows", "architecture": "amd64"}},
            {"digest": "sha256:2", "platform": {"os": "linux", "architecture": "amd64"}},
            {"digest": "sha256:3", "platform": {"os": "linux", "architecture": "arm64"}}
        ]}"#;
        let index: Listed = serde_json::from_str(index).unwrap();
        let own: Vec<&str> = index.manifests.iter().filter(|m| m.is_for_this()).map(|m| m.digest.as_str()).collect();
        assert!(own == ["sha256:2"] || own == ["sha256:3"], "{own:?}");
        let manifest: Listed = serde_json::from_str(r#"{"layers": [{"digest": "sha256:4", "size": 7}]}"#).unwrap();
        assert_eq!(manifest.layers, [Layer { digest: "sha256:4".into(), size: 7 }]);
    }
}
