//! A mapping that `mremap` merges with its neighbour: the kernel ends the watch over both and keeps the marks of the
//! neighbour's pages, so that nothing tells of writes to them any more. The tracker finds them all the same.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use tranship_memory::send::Chunk;
use tranship_memory::tracker::{Method, Round, Tracker};
use tranship_types::{PAGE_SIZE, PageRange};

/// Maps 32 pages, moves half of them away and back, and writes.
const REMAPPER: &str = "
import ctypes, sys
c = ctypes.CDLL(None); page, half, near, far = 4096, 16 * 4096, 0x300000000000, 0x300001000000
for call in (c.mmap, c.mremap): call.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
c.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
assert c.mmap(near, 2 * half, 3, 0x32, -1, 0) == near
ctypes.memset(near, 1, 2 * half)
print('ready', flush=True)
for line in sys.stdin:
    if line == 'away\\n': assert c.mremap(near + half, half, half, 3, far) == far
    elif line == 'back\\n': assert c.mremap(far, half, half, 3, near + half) == near + half
    else: ctypes.memset(near + 3 * page, 2, 1)
    print('done', flush=True)
";
const NEAR: u64 = 0x3000_0000_0000;
const WRITTEN: u64 = NEAR + 3 * PAGE_SIZE;

struct Remapper {
    child: Child,
    tracker: Tracker,
}

impl Remapper {
    fn start() -> Self {
        Method::WriteProtect.available().unwrap();
        let mut command = Command::new("python3");
        let child = command.args(["-c", REMAPPER]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut remapper = Self { child, tracker: Tracker::new(Method::WriteProtect) };
        remapper.hear("ready");
        remapper
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        BufReader::with_capacity(1, self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn does(&mut self, deed: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{deed}").unwrap();
        self.hear("done");
    }

    /// Whether a round finds the page that is written.
    fn found(&mut self, last: bool) -> bool {
        let pids = [self.child.id()];
        let Round { plan, .. } =
            if last { self.tracker.last_round(&pids).unwrap() } else { self.tracker.round(&pids).unwrap() };
        let page = PageRange { start: WRITTEN, end: WRITTEN + PAGE_SIZE };
        plan.first.iter().chain(&plan.rest).map(Chunk::pages).any(|(_, range)| range.intersection(&page).is_some())
    }
}

impl Drop for Remapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_write_to_a_mapping_that_was_merged_with_another_is_found() {
    for last in [false, true] {
        let mut remapper = Remapper::start();
        assert!(remapper.found(false), "at first everything is found");
        remapper.does("away");
        remapper.found(false);
        assert!(!remapper.found(false), "nothing was written");
        remapper.does("back");
        remapper.does("write");
        assert!(remapper.found(last), "the write was not found, last round: {last}");
    }
}

#[test]
fn a_write_after_the_round_that_found_the_merge_is_found() {
    let mut remapper = Remapper::start();
    for deed in ["away", "back"] {
        remapper.found(false);
        remapper.does(deed);
    }
    remapper.found(false);
    assert!(!remapper.found(false), "the merged mapping is watched anew");
    remapper.does("write");
    assert!(remapper.found(false));
}

#[test]
fn a_page_that_was_written_while_nobody_watched_is_watched_again() {
    let mut remapper = Remapper::start();
    for deed in ["away", "back"] {
        remapper.found(false);
        remapper.does(deed);
    }
    remapper.does("write");
    assert!(remapper.found(false), "what is not watched counts as written");
    assert!(!remapper.found(false), "nothing was written");
    remapper.does("write");
    assert!(remapper.found(false), "the second write was not found");
}
