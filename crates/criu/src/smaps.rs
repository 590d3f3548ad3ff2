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
    unlisted: HashMap<Vec<u8>, String>,
}

/// A line that begins a mapping, not one that tells of it.
fn is_mapping(line: &[u8]) -> bool {
    line.first().is_some_and(|c| c.is_ascii_digit() || c.is_ascii_lowercase())
}

fn start_of(line: &[u8]) -> Option<u64> {
    u64::from_str_radix(str::from_utf8(line.split(|byte| *byte == b'-').next()?).ok()?, 16).ok()
}

/// The lines of a file. Paths in it may be any bytes, but for a line feed, which the kernel escapes.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
}

/// The kernel's flags of each mapping, by its start.
fn flags(reader: &FlagsReader, pid: u32) -> io::Result<HashMap<u64, u64>> {
    Ok(reader.read(pid)?.into_iter().map(|mapping| (mapping.start, mapping.flags)).collect())
}

impl Smaps {
    /// Learns from a process, which may run meanwhile. This is the slow look.
    pub fn learn(&mut self, reader: &FlagsReader, pid: u32) -> io::Result<()> {
        let before = flags(reader, pid)?;
        let text = std::fs::read(format!("/proc/{pid}/smaps"))?;
        let after = flags(reader, pid)?;
        let mut mapping = None;
        for line in lines(&text) {
            if is_mapping(line) {
                mapping = Some(line);
            } else if let (Some(letters), Some(of)) = (line.strip_prefix(b"VmFlags: "), mapping)
                && let Some(start) = start_of(of)
            {
                let letters = String::from_utf8_lossy(letters).into_owned();
                match (before.get(&start), after.get(&start)) {
                    (Some(one), Some(other)) if one == other => {
                        self.letters.entry(*one).or_insert(letters);
                    }
                    (None, None) => drop(self.unlisted.insert(of.to_owned(), letters)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The lines of a stopped process's `smaps` that matter to criu. `None`: it has flags that are not known.
    pub fn text(&self, reader: &FlagsReader, pid: u32) -> Option<Vec<u8>> {
        let maps = std::fs::read(format!("/proc/{pid}/maps")).ok()?;
        let flags = flags(reader, pid).ok()?;
        let mut text = Vec::with_capacity(maps.len() * 2);
        for line in lines(&maps) {
            let letters = match flags.get(&start_of(line)?) {
                Some(word) => self.letters.get(word)?,
                None => self.unlisted.get(line)?,
            };
            [line, b"\nVmFlags: ", letters.as_bytes(), b"\n"].iter().for_each(|part| text.extend_from_slice(part));
        }
        Some(text)
    }
}

/// Whether a process has a private mapping that it cannot write to, but once could, beside another one: a part of a mapping
/// that may be one again. (The kernel takes `ac` from those that were never written to.)
pub fn has_protected_part(text: &[u8]) -> bool {
    let mut previous: Option<(u64, bool)> = None;
    let mut all = lines(text).peekable();
    while let Some(line) = all.next() {
        let flags = all.next_if(|next| next.starts_with(b"VmFlags: ")).unwrap_or_default();
        let found = String::from_utf8_lossy(line).into_owned();
        let Some(mapping) = Anonymous::of(&found) else { continue };
        let accounted = flags.split(|byte| *byte == b' ').any(|flag| flag == b"ac");
        let protected = !mapping.writable && accounted;
        if let Some((end, before)) = previous
            && end == mapping.start
            && (before || protected)
        {
            return true;
        }
        previous = Some((mapping.end, protected));
    }
    false
}

/// The same of one mapping, by the kernel's word of its flags.
pub fn is_protected(flags: u64) -> bool {
    // linux/mm.h.
    const VM_WRITE: u64 = 2;
    const VM_ACCOUNT: u64 = 0x10_0000;
    flags & (VM_WRITE | VM_ACCOUNT) == VM_ACCOUNT
}

/// A private mapping without a file.
struct Anonymous {
    start: u64,
    end: u64,
    writable: bool,
}

impl Anonymous {
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (permissions, inode) = (words.next()?.as_bytes(), words.nth(2)?);
        let is_own = permissions.get(3) == Some(&b'p') && inode == "0" && !words.next().unwrap_or("").starts_with("[v");
        let number = |text| u64::from_str_radix(text, 16).ok();
        is_own.then_some(())?;
        Some(Self { start: number(start)?, end: number(end)?, writable: permissions.get(1) == Some(&b'w') })
    }
}

/// Where the preloaded library looks for the text of a process, beside the table of hidden pages at `table`.
fn beside(table: &Path, pid: u32) -> PathBuf {
    let mut path = table.as_os_str().to_owned();
    path.push(format!(".smaps-{pid}"));
    path.into()
}

/// Hands the text to the preloaded library; must be done before criu is let go.
pub fn write(table: &Path, pid: u32, text: &[u8]) -> io::Result<()> {
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
        let real = std::fs::read(format!("/proc/{pid}/smaps")).unwrap();
        let kept: Vec<&[u8]> = lines(&real).filter(|line| is_mapping(line) || line.starts_with(b"VmFlags: ")).collect();
        let kept = [&kept.join(&b'\n')[..], b"\n"].concat();
        let text = smaps.text(&reader, pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(text.unwrap(), kept);
    }

    #[test]
    fn a_part_that_was_written_to_and_is_protected_is_found_beside_another_one() {
        let text = |second: &str, flags: &str, third: &str| {
            format!(
                "1000-2000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac \n\
                 {second} 00000000 00:00 0 \nVmFlags: rd mr mw me {flags}\n\
                 {third} 00000000 00:00 0 [heap]\nVmFlags: rd wr mr mw me ac \n"
            )
        };
        let found = |second, flags, third| has_protected_part(text(second, flags, third).as_bytes());
        assert!(found("2000-3000 r--p", "ac ", "4000-5000 rw-p"));
        assert!(found("3000-4000 ---p", "ac ", "4000-5000 rw-p"));
        assert!(!found("2000-3000 ---p", "", "3000-4000 rw-p"), "a guard of a stack");
        assert!(!found("3000-4000 r--p", "ac ", "5000-6000 rw-p"), "by itself");
        assert!(!found("2000-3000 rw-p", "ac ", "3000-4000 rw-p"));
        assert!(!found("2000-3000 r--s", "ac ", "3000-4000 rw-p"));
    }

    #[test]
    fn details_are_no_mappings() {
        assert!(is_mapping(b"7fff0000-7fff1000 rw-p 00000000 00:00 0 [stack]"));
        assert!(is_mapping(b"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]"));
        assert!(!is_mapping(b"VmFlags: rd wr") && !is_mapping(b"Size:   4 kB"));
    }
}
