//! `/etc/hosts`, `/etc/resolv.conf` and `/etc/hostname` where an engine makes them for a container and binds them into it: what programs have
//! written to them moves along. The engine at the destination makes files of its own; they get this content, and stay that engine's.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tranship_types::{Blocker, BlockerKind, PathEnd};

use crate::{Container, note};

/// Where names of hosts are.
const HOSTS: &str = "/etc/hosts";
/// Those that Docker and Podman make.
const FILES: [&str; 3] = [HOSTS, "/etc/resolv.conf", "/etc/hostname"];
/// Bytes of one that can be carried: it travels in a message.
const LIMIT: u64 = 64 << 10;
/// Bytes of one that is read. The lines of Tranship's own are not counted by [`LIMIT`].
const MOST: u64 = 16 << 20;
/// Bytes of such lines in one file.
const MOST_LINES: usize = 64 << 10;
/// Where they are noted in a bundle.
const NOTE: &str = "etc-files.json";
/// Where they are in a configuration that travels. No runtime sees it: engines that make these files make the configuration, too.
const KEY: &str = "etcFiles";

/// The annotation with which Podman tells its runtime whose namespaces, and whose files of these, a container of a pod has.
pub(crate) const SANDBOX: &str = "io.kubernetes.cri-o.SandboxID";

/// The content of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EtcFile {
    inside: PathBuf,
    /// In hexadecimal digits: it may be anything.
    content: String,
    /// When it was written, in ns since 1970.
    modified_ns: u64,
}

/// All that a container has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EtcFiles(Vec<EtcFile>);

/// The files that the engine has made for container `id` alone, or for its pod, by a configuration: path in the container, path on the node.
fn made_by_engine(config: &Value, id: &str) -> Vec<(PathBuf, PathBuf)> {
    let mounts = config["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let pod = config["annotations"][SANDBOX].as_str().unwrap_or_default();
    let ids: Vec<&str> = [id, pod].into_iter().filter(|id| !id.is_empty()).collect();
    let of_this_one = |mount: &Value| {
        let inside = mount["destination"].as_str().filter(|inside| FILES.contains(inside))?;
        let source = Path::new(mount["source"].as_str()?);
        let is_own = source.iter().any(|part| ids.iter().any(|id| part == *id)) && source.is_file();
        is_own.then(|| (inside.into(), source.to_owned()))
    };
    mounts.iter().filter_map(of_this_one).collect()
}

fn read(source: &Path) -> io::Result<(Vec<u8>, u64)> {
    let file = File::open(source)?;
    let modified = file.metadata()?.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut content = Vec::new();
    file.take(MOST + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {} MiB", MOST >> 20)));
    }
    Ok((content, u64::try_from(modified.as_nanos()).unwrap_or_default()))
}

/// The content of one without the names of those on the other node of a kept path, which are no program's, and others
/// elsewhere.
fn own_content(inside: &Path, source: &Path) -> io::Result<(Vec<u8>, u64)> {
    let (content, modified_ns) = read(source)?;
    Ok((if inside == Path::new(HOSTS) { without_beyond(&content) } else { content }, modified_ns))
}

pub(crate) fn to_digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_digits(digits: &str) -> Option<Vec<u8>> {
    // Not by `from_str_radix`, which takes a sign.
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some((digit(high)? * 16 + digit(low)?) as u8),
        _ => None,
    };
    digits.as_bytes().chunks(2).map(pair).collect()
}

impl EtcFiles {
    /// Those of a container that its engine has started, as they are now. One that is too large is left out.
    fn now(config: &Value, id: &str) -> Self {
        let file = |(inside, source): (PathBuf, PathBuf)| {
            let (content, modified_ns) = own_content(&inside, &source).ok()?;
            (content.len() as u64 <= LIMIT).then(|| EtcFile { inside, content: to_digits(&content), modified_ns })
        };
        Self(made_by_engine(config, id).into_iter().filter_map(file).collect())
    }

    /// Puts them into the configuration that travels to the destination.
    pub(crate) fn add_to(config: &mut Value, id: &str) {
        let now = Self::now(config, id);
        if !now.0.is_empty() {
            config[KEY] = serde_json::to_value(now).unwrap_or_default();
        }
    }

    /// Adds the names of containers on another node to `/etc/hosts` in a configuration that travels.
    pub fn add_beyond(config: &mut Value, beyond: &[PathEnd]) {
        let mut files = Self::of(config);
        let hosts = files.0.iter_mut().find(|file| file.inside == Path::new(HOSTS));
        let lines = lines(beyond);
        if let Some(file) = hosts.filter(|_| !lines.is_empty())
            && let Some(content) = from_digits(&file.content)
        {
            file.content = to_digits(&with_beyond(&content, &lines));
            config[KEY] = serde_json::to_value(files).unwrap_or_default();
        }
    }

    /// Those that travel with this configuration.
    pub fn of(config: &Value) -> Self {
        serde_json::from_value(config[KEY].clone()).unwrap_or_default()
    }

    /// Those that were written since the container was looked at: in the freeze, an empty list means that the destination has them as they are.
    pub fn changed(container: &Container) -> Vec<PathBuf> {
        let (then, now) = (Self::of(&container.config), Self::now(&container.config, &container.id));
        let is_new = |file: &&EtcFile| !then.0.contains(file);
        // Such as one that has become too large.
        let is_missing = |file: &&EtcFile| now.0.iter().all(|other| other.inside != file.inside);
        let changed = now.0.iter().filter(is_new).chain(then.0.iter().filter(is_missing));
        changed.map(|file| file.inside.clone()).collect()
    }

    /// Those that are too large to travel.
    pub fn obstacles(container: &Container) -> Vec<Blocker> {
        let large = |(inside, source): &(PathBuf, PathBuf)| {
            source.metadata().is_ok_and(|m| m.len() > LIMIT)
                && !own_content(inside, source).is_ok_and(|(content, _)| content.len() as u64 <= LIMIT)
        };
        let blocker = |(inside, _): (PathBuf, PathBuf)| {
            let (inside, name, kib) = (inside.display(), &container.name, LIMIT >> 10);
            let cause = format!("{inside} of container {name} has more than {kib} KiB, which do not move along");
            Blocker::new(BlockerKind::Mount, cause, "shorten the file")
        };
        made_by_engine(&container.config, &container.id).into_iter().filter(large).map(blocker).collect()
    }

    /// Notes them in a bundle.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn note(&self, bundle: &Path) -> io::Result<()> {
        note::write(bundle, NOTE, self)
    }

    /// Those that were noted in a bundle; none if there is no note.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn noted(bundle: &Path) -> io::Result<Self> {
        Ok(note::read(bundle, NOTE)?.unwrap_or_default())
    }

    /// Writes them to the files that the engine here has made for container `id`, in place.
    ///
    /// # Errors
    /// If one cannot be written.
    pub fn write(&self, config: &Value, id: &str) -> io::Result<()> {
        for (inside, source) in made_by_engine(config, id) {
            let Some(file) = self.0.iter().find(|file| file.inside == inside) else { continue };
            let content = from_digits(&file.content).ok_or(io::ErrorKind::InvalidData)?;
            let mut target = OpenOptions::new().write(true).truncate(true).open(source)?;
            target.write_all(&content)?;
            target.set_modified(SystemTime::UNIX_EPOCH + Duration::from_nanos(file.modified_ns))?;
        }
        Ok(())
    }
}

/// What ends the lines of `/etc/hosts` that name containers on the other node of a kept path.
const MARK: &str = "# tranship: on another node";

/// The lines for these containers. Names are the peer's, and nothing else gets into the file.
fn lines(beyond: &[PathEnd]) -> String {
    let is_name = |name: &&String| {
        !name.is_empty() && name.len() < 256 && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let of = |end: &PathEnd| {
        let names: Vec<&str> = end.names.iter().filter(is_name).map(String::as_str).collect();
        let line = |address| format!("{address}\t{} {MARK}\n", names.join(" "));
        if names.is_empty() { Vec::new() } else { end.addresses.iter().map(line).collect() }
    };
    let all: BTreeSet<String> = beyond.iter().flat_map(of).collect();
    let mut bytes = 0;
    let fits = |line: &String| {
        bytes += line.len();
        bytes <= MOST_LINES
    };
    all.into_iter().take_while(fits).collect()
}

fn without_beyond(content: &[u8]) -> Vec<u8> {
    let is_own = |line: &[u8]| line.trim_ascii_end().ends_with(MARK.as_bytes());
    content.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_own(line)).flatten().copied().collect()
}

/// The content with these lines, and no others of theirs, at its end.
fn with_beyond(content: &[u8], lines: &str) -> Vec<u8> {
    let mut content = without_beyond(content);
    if !lines.is_empty() && content.last().is_some_and(|last| *last != b'\n') {
        content.push(b'\n');
    }
    content.extend_from_slice(lines.as_bytes());
    content
}

/// Has `/etc/hosts` of a container that runs name those on another node, and no others, where its engine has made that
/// file. When the file was last written stays as it was.
///
/// # Errors
/// If it cannot be read or written.
pub fn name_beyond(container: &Container, beyond: &[PathEnd]) -> io::Result<()> {
    let lines = lines(beyond);
    for (inside, source) in made_by_engine(&container.config, &container.id) {
        if inside != Path::new(HOSTS) {
            continue;
        }
        let (before, modified_ns) = read(&source)?;
        let after = with_beyond(&before, &lines);
        if after == before {
            continue;
        }
        // In place, as it is mounted; what is the same before and after is never away for who reads it meanwhile.
        let same = before.iter().zip(&after).take_while(|(one, other)| one == other).count();
        let target = OpenOptions::new().write(true).open(source)?;
        target.write_all_at(&after[same..], same as u64)?;
        target.set_len(after.len() as u64)?;
        target.set_modified(SystemTime::UNIX_EPOCH + Duration::from_nanos(modified_ns))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A container of this id on a node, with a file that its engine has made and one of the user's.
    fn config(node: &Path, id: &str, hosts: &str) -> Value {
        let made = node.join(id);
        std::fs::create_dir(&made).unwrap();
        std::fs::write(made.join("hosts"), hosts).unwrap();
        std::fs::write(node.join("resolv.conf"), "the user's").unwrap();
        let mount = |inside: &str, source: PathBuf| json!({"destination": inside, "source": source});
        json!({"mounts": [
            mount("/etc/hosts", made.join("hosts")), mount("/etc/resolv.conf", node.join("resolv.conf")),
            mount("/srv", made.join("hosts")),
        ]})
    }

    #[test]
    fn digits_have_no_sign() {
        assert_eq!(from_digits("00fF"), Some(vec![0, 255]));
        assert_eq!(["+f", "f", "0g", " 1", "é"].map(from_digits), [None, None, None, None, None]);
    }

    #[test]
    fn what_was_written_to_them_is_in_the_destination_s_files() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut source = config(a.path(), "one", "10.0.0.1 db\n");
        EtcFiles::add_to(&mut source, "one");
        let files = EtcFiles::of(&source);
        assert_eq!(files.0.len(), 1, "the user's own file is not the engine's");
        files.note(b.path()).unwrap();
        let there = config(b.path(), "two", "127.0.0.1 localhost and more\n");
        EtcFiles::noted(b.path()).unwrap().write(&there, "two").unwrap();
        let (from, to) = (a.path().join("one/hosts"), b.path().join("two/hosts"));
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "10.0.0.1 db\n");
        assert_eq!(to.metadata().unwrap().modified().unwrap(), from.metadata().unwrap().modified().unwrap());
        assert_eq!(EtcFiles::noted(a.path()).unwrap(), EtcFiles::default());
    }

    #[test]
    fn what_is_written_later_is_noticed_and_what_is_too_large_is_an_obstacle() {
        let node = tempfile::tempdir().unwrap();
        let mut source = config(node.path(), "one", "\u{ff}\n");
        EtcFiles::add_to(&mut source, "one");
        let mut container = Container { id: "one".into(), ..Container::at_rest("web", crate::State::Running) };
        container.config = source;
        assert!(EtcFiles::changed(&container).is_empty() && EtcFiles::obstacles(&container).is_empty());
        std::fs::write(node.path().join("one/hosts"), "another").unwrap();
        assert_eq!(EtcFiles::changed(&container), [PathBuf::from("/etc/hosts")]);
        std::fs::write(node.path().join("one/hosts"), vec![b'x'; 65537]).unwrap();
        assert_eq!(EtcFiles::changed(&container), [PathBuf::from("/etc/hosts")], "one that has become too large");
        let found = EtcFiles::obstacles(&container);
        assert!(found.len() == 1 && found[0].to_string().contains("/etc/hosts of container web"), "{found:?}");
    }

    #[test]
    fn those_beyond_are_named_as_long_as_they_are_there() {
        let node = tempfile::tempdir().unwrap();
        let config = config(node.path(), "one", "127.0.0.1 localhost");
        let mut container = Container { id: "one".into(), ..Container::at_rest("web", crate::State::Running) };
        container.config = config.clone();
        let end = |address: &str, names: &[&str]| PathEnd {
            container: "db".to_owned(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: vec![address.parse().unwrap()],
        };
        let file = node.path().join("one/hosts");
        let (text, written) =
            (|| std::fs::read_to_string(&file).unwrap(), || file.metadata().unwrap().modified().unwrap());
        let before = written();
        let named = "127.0.0.1 localhost\n10.79.0.5\tdb sql # tranship: on another node\n";
        name_beyond(&container, &[end("10.79.0.5", &["db", "sql", "a b", "c\n"]), end("10.79.0.9", &[])]).unwrap();
        assert_eq!((text().as_str(), written()), (named, before));
        // They stay behind.
        let mut travels = config.clone();
        EtcFiles::add_to(&mut travels, "one");
        let content =
            |config: &Value| String::from_utf8(from_digits(&EtcFiles::of(config).0[0].content).unwrap()).unwrap();
        assert_eq!(content(&travels), "127.0.0.1 localhost\n");
        EtcFiles::add_beyond(&mut travels, &[end("10.79.0.6", &["app"])]);
        assert_eq!(content(&travels), "127.0.0.1 localhost\n10.79.0.6\tapp # tranship: on another node\n");
        name_beyond(&container, &[]).unwrap();
        assert_eq!((text().as_str(), written()), ("127.0.0.1 localhost\n", before));
    }

    #[test]
    fn names_of_those_beyond_do_not_count_as_content_and_do_not_depend_on_its_size() {
        let node = tempfile::tempdir().unwrap();
        let own = "x".repeat(LIMIT as usize - 1) + "\n";
        let config = config(node.path(), "one", &own);
        let mut container = Container { id: "one".into(), ..Container::at_rest("web", crate::State::Running) };
        container.config = config.clone();
        let end = |number: u8| PathEnd {
            container: "db".to_owned(),
            names: vec![format!("db{number}")],
            addresses: vec![std::net::Ipv4Addr::new(10, 79, 0, number).into()],
        };
        name_beyond(&container, &[end(5)]).unwrap();
        let text = || std::fs::read_to_string(node.path().join("one/hosts")).unwrap();
        assert!(text().len() > own.len());
        assert!(EtcFiles::obstacles(&container).is_empty(), "lines of Tranship's own keep the container from moving");
        let mut travels = config.clone();
        EtcFiles::add_to(&mut travels, "one");
        assert_eq!(from_digits(&EtcFiles::of(&travels).0[0].content).unwrap(), own.as_bytes());
        // A program has made it longer meanwhile.
        std::fs::write(node.path().join("one/hosts"), text() + &own).unwrap();
        assert_eq!(EtcFiles::obstacles(&container).len(), 1);
        name_beyond(&container, &[]).unwrap();
        assert_eq!(text(), own.repeat(2));
    }

    #[test]
    fn a_peer_s_names_are_limited() {
        let many: Vec<PathEnd> = (0..u16::MAX)
            .map(|number| PathEnd {
                container: String::new(),
                names: vec!["n".repeat(200)],
                addresses: vec![std::net::Ipv4Addr::from(u32::from(number)).into()],
            })
            .collect();
        assert!((MOST_LINES / 2..=MOST_LINES).contains(&lines(&many).len()));
    }

    #[test]
    fn digits_that_are_none_are_refused() {
        assert_eq!(from_digits("00ff"), Some(vec![0, 255]));
        assert!(from_digits("0").is_none() && from_digits("zz").is_none() && from_digits("é").is_none());
    }
}
