//! Readers of texts and records: of the kernel, and of the files that the agent and this library write. Without system calls, so that
//! the fuzz targets (`fuzz/`) can run them.

use std::collections::{HashMap, HashSet};

/// A range of a task's address space whose pages are hidden from criu.
#[derive(Debug, Clone, Copy)]
pub struct Hidden {
    pub pid: u32,
    pub start: u64,
    pub end: u64,
}

/// What is hidden from criu.
#[derive(Debug, Default)]
pub struct Table {
    /// Of the tasks' address spaces.
    pub ranges: Vec<Hidden>,
    /// Shared memory: device and inode.
    pub objects: Vec<(u64, u64)>,
}

impl Table {
    /// Reads its records (see the library's own page); a part of one at the end is left out.
    pub fn read(bytes: &[u8]) -> Self {
        let mut table = Self::default();
        for record in bytes.as_chunks().0.iter().map(|words: &[u8; 24]| words.as_chunks().0) {
            let [head, start, end] = std::array::from_fn(|word| u64::from_le_bytes(record[word]));
            match head >> 32 {
                0 => table.ranges.push(Hidden { pid: head as u32, start, end }),
                _ => table.objects.push((start, end)),
            }
        }
        table
    }
}

/// Names of files whose name for the kernel is gone, by device and inode: each is `DEVICE INODE PATH` and a zero.
pub fn renamed(bytes: &[u8]) -> HashMap<(u64, u64), Vec<u8>> {
    let one = |record: &[u8]| {
        let mut words = record.splitn(3, |byte| *byte == b' ');
        let mut number = || str::from_utf8(words.next()?).ok()?.parse().ok();
        let file = (number()?, number()?);
        words.next().filter(|path| path.starts_with(b"/")).map(|path| (file, path.to_vec()))
    };
    bytes.split(|byte| *byte == 0).filter_map(one).collect()
}

/// A process that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zombie {
    /// On the node of the dump.
    pub pid: u32,
    /// Its parent's pid in the container, and its own.
    pub parent: u32,
    pub own: u32,
    /// Its exit status.
    pub status: u8,
    /// Whether it leads a process group of its own.
    pub leads_group: bool,
    pub name: Vec<u8>,
}

/// Each is a line of its fields, the name in hexadecimal digits. What is none is left out.
pub fn zombies(text: &str) -> Vec<Zombie> {
    let one = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [pid, parent, own, status, leads_group, name] = words[..] else { return None };
        let byte = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
        Some(Zombie {
            pid: pid.parse().ok()?,
            parent: parent.parse().ok()?,
            own: own.parse().ok()?,
            status: status.parse().ok()?,
            leads_group: leads_group == "1",
            name: name.as_bytes().chunks(2).map(byte).collect::<Option<_>>()?,
        })
    };
    text.lines().filter_map(one).collect()
}

/// How a process ended, by its pid in the container: `exit_code` of proc_pid_stat(5). Each is a line.
pub fn ends(text: &str) -> HashMap<u32, i32> {
    let one = |line: &str| {
        let (own, code) = line.split_once(' ')?;
        Some((own.parse().ok()?, code.parse().ok()?))
    };
    text.lines().filter_map(one).collect()
}

/// The numbers in a text, whatever is between them.
pub fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// One row of `/proc/PID/limits`, whose rows are in the order of the resources' numbers: (soft, hard).
pub fn limits_row(text: &str, resource: usize) -> Option<[u64; 2]> {
    let row = text.lines().nth(resource + 1)?;
    let value = |column: &str| match column.trim() {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    // The name's column is 26 wide and has blanks in it.
    let mut values = row.get(26..)?.split_ascii_whitespace();
    Some([value(values.next()?)?, value(values.next()?)?])
}

/// The segments in the text of `/proc/PID/maps`: numbers, which stand in the place of the inode's, and names in
/// `map_files`.
pub fn segments(maps: &str) -> impl Iterator<Item = (i32, String)> {
    maps.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let id = words.nth(3)?.parse().ok()?;
        // There are leading zeros here, and none there.
        let number = |text| u64::from_str_radix(text, 16).ok();
        words.next()?.starts_with("/SYSV").then_some((id, format!("{:x}-{:x}", number(start)?, number(end)?)))
    })
}

/// A file in an epoll set: device (major, minor) and inode.
pub type WatchedFile = (u32, u32, u64);

/// The files in the `fdinfo` text of an epoll set, which has them in the kernel's own order, by number and place among those of this number.
pub fn watched_files(text: &str) -> HashMap<(u32, u32), WatchedFile> {
    let mut before: HashMap<u32, u32> = HashMap::new();
    let file = |line: &str| {
        let after = |name: &str| line.split_once(name)?.1.split_ascii_whitespace().next();
        let number = after("tfd:")?.parse().ok()?;
        let inode = u64::from_str_radix(after(" ino:")?, 16).ok()?;
        // The kernel's own form: 12 bits and 20 bits.
        let device = u32::from_str_radix(after(" sdev:")?, 16).ok()?;
        let nth = before.entry(number).or_default();
        *nth += 1;
        Some(((number, *nth - 1), (device >> 20, device & 0xf_ffff, inode)))
    };
    text.lines().filter_map(file).collect()
}

/// The names in `map_files` of which the task's `smaps` text says that there is no file.
pub fn without_file(smaps: &str) -> HashSet<String> {
    let name = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (name, _flags, _offset, device, inode) =
            (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
        let (start, end) = name.split_once('-')?;
        let trimmed = |address: &str| u64::from_str_radix(address, 16).ok();
        (device == "00:00" && inode == "0").then_some(format!("{:x}-{:x}", trimmed(start)?, trimmed(end)?))
    };
    smaps.lines().filter_map(name).collect()
}

/// The object whose pages are listed in the image of this name.
pub fn key_of(name: &[u8]) -> Option<u64> {
    let name = std::str::from_utf8(name).ok()?;
    name.strip_prefix("pagemap-shmem-")?.strip_suffix(".img")?.parse().ok()
}

/// The rows of the table of shared objects: its key, whether it is a System V segment, and the path of its content.
pub fn shared_objects(text: &str) -> Vec<(u64, bool, &str)> {
    let row = |line| {
        let mut words = str::splitn(line, 3, ' ');
        let (key, kind, path) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        ["file", "segment"].contains(&kind).then_some((key, kind == "segment", path))
    };
    text.lines().filter_map(row).collect()
}

/// Recorded waits, by the numbers that threads have in the container: the system call, and what is left of its time in ns.
pub fn waits(text: &str) -> HashMap<u32, (i64, u64)> {
    let wait = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        Some((words.get(1)?.parse().ok()?, (words.get(2)?.parse().ok()?, words.get(5)?.parse().ok()?)))
    };
    text.lines().filter_map(wait).collect()
}

/// A private mapping that is readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Private {
    pub start: usize,
    pub end: usize,
    pub is_writable: bool,
}

/// The private mappings in `/proc/PID/smaps` that have pages of their own and can be replaced by a copy: they are readable, without code, and do not grow
/// by themselves as a stack does.
pub fn private_mappings(text: &str) -> Vec<Private> {
    // What else a mapping may be, a shadow stack say (`ss`), a copy would not be.
    const PLAIN: [&str; 8] = ["rd", "wr", "mr", "mw", "me", "ac", "nr", "sd"];
    let mut found = Vec::new();
    let (mut mapping, mut anonymous) = (None, false);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Anonymous:") => anonymous = words.next().is_some_and(|kib| kib != "0"),
            Some("VmFlags:") => {
                found.extend(mapping.take().filter(|_| anonymous && words.all(|flag| PLAIN.contains(&flag))));
            }
            Some(word) if !word.ends_with(':') => {
                anonymous = false;
                let address = |text: &str| usize::from_str_radix(text, 16).ok();
                let range = word.split_once('-').and_then(|(start, end)| Some((address(start)?, address(end)?)));
                let is_writable = match words.next() {
                    Some("r--p") => Some(false),
                    Some("rw-p") => Some(true),
                    _ => None,
                };
                mapping = range
                    .zip(is_writable)
                    .map(|((start, end), is_writable)| Private { start, end, is_writable })
                    .filter(|mapping| mapping.start < mapping.end);
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_rows_are_read_and_parts_of_them_are_left_out() {
        let record = |head: u64, start: u64, end: u64| [head, start, end].map(u64::to_le_bytes).concat();
        let bytes = [record(812, 0x1000, 0x9000), record(1 << 32, 8, 77), vec![1; 23]].concat();
        let table = Table::read(&bytes);
        let [Hidden { pid: 812, start: 0x1000, end: 0x9000 }] = *table.ranges else { panic!("{table:?}") };
        assert_eq!(table.objects, [(8, 77)]);

        let objects = shared_objects("5 file /a b\n6 segment /c\n7 other /d\nx file /e\n8 file\n");
        assert_eq!(objects, [(5, false, "/a b"), (6, true, "/c")]);
        assert_eq!(waits("812 7 35 1 50 15\n813 8 202 0 7\n"), HashMap::from([(7, (35, 15))]));
        assert_eq!((key_of(b"pagemap-shmem-12.img"), key_of(b"pagemap-12.img")), (Some(12), None));
        let smaps = "007f00-7f10 rw-p 0 00:00 0 \nSize: 4 kB\n7f10-7f20 r--p 0 08:01 5 /x\n";
        assert_eq!(without_file(smaps), HashSet::from(["7f00-7f10".to_owned()]));
        let anonymous = |range: &str, kib: u32, flags: &str| {
            format!("{range} 0 00:00 0 \nAnonymous: {kib} kB\nVmFlags: {flags} \n")
        };
        let smaps = [
            anonymous("1000-3000 rw-p", 4, "rd wr mr mw me ac"),
            anonymous("3000-4000 rw-p", 0, "rd wr mr mw me ac"),
            anonymous("4000-5000 r--p", 4, "rd mr mw me ac"),
            anonymous("5000-6000 r-xp", 4, "rd ex mr mw me"),
            anonymous("6000-7000 rw-s", 4, "rd wr sh mr mw me ms"),
            anonymous("7000-9000 rw-p", 8, "rd wr mr mw me gd ac"),
            anonymous("9000-a000 rw-p", 4, "rd wr mr mw me ss"),
        ];
        let [first, second] = *private_mappings(&smaps.concat()) else {
            panic!("{:?}", private_mappings(&smaps.concat()))
        };
        assert_eq!(first, Private { start: 0x1000, end: 0x3000, is_writable: true });
        assert_eq!(second, Private { start: 0x4000, end: 0x5000, is_writable: false });
        let set = "tfd:        5 events: 19 data: 5  pos:0 ino:2f sdev:8\ntfd: 5 events: 19 data: 5 pos:0 ino:30 sdev:100002\n";
        let files = [((5, 0), (0, 8, 0x2f)), ((5, 1), (1, 2, 0x30))];
        assert_eq!(watched_files(set), HashMap::from(files));
    }
}
