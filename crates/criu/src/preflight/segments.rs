//! Rules about attached segments of System V (CRIU: shmem.c, `open_shmem_sysv`): each is attached anew as a whole.

use std::fs;

use tranship_sys::process;

use super::Look;
use super::container::Container;

const PAGE: u64 = 4096;

/// A mapping of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    range: String,
    start: u64,
    end: u64,
    offset: u64,
    inode: u64,
    /// It may be written to and executed. Of what may only be read and executed, CRIU restores both.
    is_executable: bool,
}

impl Part {
    /// Of a line of `/proc/PID/maps`.
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (range, permissions, offset, _, inode) =
            (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        words.next().filter(|name| name.starts_with("/SYSV"))?;
        Some(Self {
            range: range.to_owned(),
            start: number(start)?,
            end: number(end)?,
            offset: number(offset)?,
            inode: inode.parse().ok()?,
            is_executable: permissions.contains("wx"),
        })
    }
}

/// A part of an attached segment of which another part is not attached any more; `size` knows the segments' sizes.
fn incomplete(parts: &[Part], size: impl Fn(&Part) -> Option<u64>) -> Option<&Part> {
    let follows = |one: &Part, next: &Part| {
        next.inode == one.inode && next.start == one.end && next.offset == one.offset + (one.end - one.start)
    };
    parts.chunk_by(|one, next| next.offset != 0 && follows(one, next)).find_map(|attached| {
        let (first, last) = (&attached[0], attached.last()?);
        let is_whole = |size: u64| first.offset == 0 && last.end - first.start == size.next_multiple_of(PAGE);
        (!size(first).is_none_or(is_whole)).then_some(first)
    })
}

pub(super) fn check(container: &Container, look: &mut Look) {
    for task in container.tasks.values() {
        let Ok(maps) = process::mappings(task.pid) else { continue };
        let parts: Vec<Part> = maps.map_while(Result::ok).filter_map(|line| Part::of(&line)).collect();
        if let Some(part) = parts.iter().find(|part| part.is_executable) {
            let what = format!(
                "has a System V segment ({}) at {:#x} that it may write to and execute (SHM_EXEC), of which CRIU does not \
                 restore the latter",
                part.inode, part.start
            );
            let remedy = "let the program attach the segment without SHM_EXEC";
            look.block(task.blocker(&what, remedy).allowable("executable-segments"));
        }
        let size = |part: &Part| Some(fs::metadata(format!("/proc/{}/map_files/{}", task.pid, part.range)).ok()?.len());
        if let Some(part) = incomplete(&parts, size) {
            let what = format!(
                "has a System V segment ({}) at {:#x} of which a part was unmapped or moved, which CRIU does not support",
                part.inode, part.start
            );
            look.block(task.blocker(&what, "let the program attach the segment anew (shmat)"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(lines: &[&str]) -> Vec<Part> {
        lines.iter().filter_map(|line| Part::of(line)).collect()
    }

    #[test]
    fn segments_are_whole_or_named() {
        let line =
            |range: &str, offset: &str, id: u32| format!("{range} rw-s {offset} 00:01 {id}    /SYSV00000000 (deleted)");
        let whole = [line("10000-12000", "00000000", 3), line("12000-14000", "00002000", 3)];
        let other = [line("14000-15000", "00000000", 4), "20000-21000 rw-p 00000000 00:00 0 ".to_owned()];
        let of = |lines: &[String]| {
            let parts = parts(&lines.iter().map(String::as_str).collect::<Vec<_>>());
            incomplete(&parts, |part| Some(if part.inode == 3 { 0x4000 } else { 0x10 })).map(|part| part.start)
        };
        assert_eq!(of(&[&whole[..], &other].concat()), None);
        assert_eq!(of(&whole[..1]), Some(0x10000));
        assert_eq!(of(&whole[1..]), Some(0x12000));
        assert_eq!(of(&[&other[..], &whole].concat()), None);
        let holed = [line("10000-11000", "00000000", 3), line("12000-14000", "00002000", 3)];
        assert_eq!(of(&holed), Some(0x10000));
    }
}
