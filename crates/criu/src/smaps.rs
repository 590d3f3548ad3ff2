//! What criu needs of `/proc/PID/smaps` (each mapping's line and its flags), made without the look at every page that the kernel
//! takes to answer the rest of that file: so that a dump does not last longer the more memory there is.
//!
//! The flags' letters belong to bits that differ from kernel to kernel. They are learned from the real file while the container
//! runs; a process with flags that were not met then is left to the real file.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use tranship_sys::mapping_flags::FlagsReader;

/// The letters of flags, learned from processes that run.
#[derive(Debug, Default)]
pub struct Smaps {
    /// By the kernel's word of flags.
    letters: HashMap<u64, String>,
    /// By their line in `maps`: mappings that are none of the task's own, such as `[vsyscall]`.
    unlisted: HashMap<String, String>,
}

/// A line that begins a mapping, not one that tells of it.
fn is_mapping(line: &str) -> bool {
    line.starts_with(|c: char| c.is_ascii_digit() || c.is_ascii_lowercase())
}

fn start_of(line: &str) -> Option<u64> {
    u64::from_str_radix(line.split_once('-')?.0, 16).ok()
}

/// The kernel's flags of each mapping, by its start.
fn flags(reader: &FlagsReader, pid: u32) -> io::Result<HashMap<u64, u64>> {
    Ok(reader.read(pid)?.into_iter().map(|mapping| (mapping.start, mapping.flags)).collect())
}

impl Smaps {
    /// Learns from a process, which may run meanwhile. This is the slow look.
    pub fn learn(&mut self, reader: &FlagsReader, pid: u32) -> io::Result<()> {
        let before = flags(reader, pid)?;
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        let after = flags(reader, pid)?;
        let mut mapping = None;
        for line in text.lines() {
            if is_mapping(line) {
                mapping = Some(line);
            } else if let (Some(letters), Some(of)) = (line.strip_prefix("VmFlags: "), mapping)
                && let Some(start) = start_of(of)
            {
                match (before.get(&start), after.get(&start)) {
                    (Some(one), Some(other)) if one == other => {
                        self.letters.entry(*one).or_insert_with(|| letters.to_owned());
                    }
                    (None, None) => drop(self.unlisted.insert(of.to_owned(), letters.to_owned())),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The lines of a stopped process's `smaps` that matter to criu. `None`: it has flags that are not known.
    pub fn text(&self, reader: &FlagsReader, pid: u32) -> Option<String> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let flags = flags(reader, pid).ok()?;
        let mut text = String::with_capacity(maps.len() * 2);
        for line in maps.lines() {
            let letters = match flags.get(&start_of(line)?) {
                Some(word) => self.letters.get(word)?,
                None => self.unlisted.get(line)?,
            };
            text.extend([line, "\nVmFlags: ", letters, "\n"]);
        }
        Some(text)
    }
}

/// Where the preloaded library looks for the text of a process, beside the table of hidden pages at `table`.
fn beside(table: &Path, pid: u32) -> PathBuf {
    let mut path = table.as_os_str().to_owned();
    path.push(format!(".smaps-{pid}"));
    path.into()
}

/// Hands the text to the preloaded library; must be done before criu is let go.
pub fn write(table: &Path, pid: u32, text: &str) -> io::Result<()> {
    std::fs::write(beside(table, pid), text)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn reader() -> Option<FlagsReader> {
        FlagsReader::load()
            .map_err(|error| println!("skipped: mappings' flags cannot be read by BPF here: {error}"))
            .ok()
    }

    /// A stopped process has the lines of the real file, in the same order.
    #[test]
    fn the_text_is_what_the_kernel_says_without_the_counts() {
        let Some(reader) = reader() else { return };
        let mut child = Command::new("sh").args(["-c", "kill -STOP $$"]).spawn().unwrap();
        let pid = child.id();
        let stopped = nix::sys::wait::WaitPidFlag::WUNTRACED;
        nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid as i32), Some(stopped)).unwrap();
        let mut smaps = Smaps::default();
        assert_eq!(smaps.text(&reader, pid), None, "nothing was learned");
        smaps.learn(&reader, pid).unwrap();
        let real = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let kept: String = real
            .lines()
            .filter(|line| is_mapping(line) || line.starts_with("VmFlags: "))
            .flat_map(|line| [line, "\n"])
            .collect();
        let text = smaps.text(&reader, pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(text.unwrap(), kept);
    }

    #[test]
    fn details_are_no_mappings() {
        assert!(is_mapping("7fff0000-7fff1000 rw-p 00000000 00:00 0 [stack]"));
        assert!(is_mapping("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]"));
        assert!(!is_mapping("VmFlags: rd wr") && !is_mapping("Size:   4 kB"));
    }
}
