//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use crate::btf::Btf;
use crate::call_log::Called;
use crate::guard_log::Guarded;
use crate::pagemap::Runs;
use crate::restart_blocks::Wait;
use crate::tracepoint::Event;
use crate::userfault::Message;
use crate::{mapping_log, processors, segment, semaphores, vdso};

/// Records of perf and BPF rings, messages of a userfaultfd.
pub fn records(data: &[u8]) {
    let _ = (Called::parse(data), mapping_log::parse(data));
    if let Some(guarded) = Guarded::parse(data) {
        assert!(guarded.start <= guarded.end);
    }
    if let Some(message) = Message::from_bytes(data) {
        assert_eq!(message.to_bytes(), data);
        let _ = message.event();
    }
}

/// Descriptions of tracepoints with a record of one of them, lists in /proc and /sys, what the preloaded library has recorded.
pub fn texts(data: &[u8], text: &str) {
    if let Some(event) = Event::parse(text, ["ino", "index"]) {
        let _ = event.fields(data);
        let _ = event.fields(&[&event.id.to_ne_bytes(), data].concat());
    }
    assert!(processors::listed(text).len() <= 1 << 14);
    assert!(text.lines().filter_map(Wait::parse).count() <= text.lines().count());
    for range in text.lines().filter_map(vdso::range) {
        assert!(range.end - range.start <= 64 << 10);
    }
    #[cfg(target_arch = "x86_64")]
    let _ = crate::interrupted::disturbance(text);
    let marked = segment::marks(text);
    assert!(marked.removed.len().max(marked.locked.len()) <= text.lines().count());
    assert!(semaphores::listed(text).len() <= text.lines().count());
}

/// The kernel's description of its types.
pub fn btf(data: &[u8]) {
    let Some(btf) = Btf::parse(data.to_vec()) else { return };
    let _ = btf.function("f");
    let _ = btf.offsets("s", ["a", "b"]);
    let _ = btf.offset_within("s", &["a", "b"]);
}

/// Entries of `/proc/PID/pagemap`: runs come in order, do not overlap, and lie within what was read.
pub fn pagemap(data: &[u8]) {
    const PAGE: u64 = 4096;
    let (first, second) = data.split_at(data.len() / 16 * 8);
    let pages = |entries: &[u8]| entries.len() as u64 / 8;
    let start = 1 << 20;
    let between = start + pages(first) * PAGE;
    let end = between + pages(second) * PAGE;
    let mut last = start;
    let mut found = |from: u64, to: u64, _: bool| {
        assert!(last <= from && from < to && to <= end);
        assert!(from.is_multiple_of(PAGE) && to.is_multiple_of(PAGE));
        last = to;
    };
    let mut runs = Runs::new(1 << 55);
    runs.take(start, first, &mut found);
    runs.take(between, second, &mut found);
    runs.end(&mut found);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under Miri, too, which has no kernel to ask.
    #[test]
    fn parsers_take_any_bytes() {
        let mut state = 7u64;
        for length in (0..96).step_by(if cfg!(miri) { 24 } else { 1 }) {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            records(&bytes);
            pagemap(&bytes);
            texts(&bytes, &String::from_utf8_lossy(&bytes));
            btf(&[&[0x9f, 0xeb, 1, 0][..], &24u32.to_le_bytes(), &bytes].concat());
        }
    }
}
