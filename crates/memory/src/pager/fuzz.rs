//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

use super::control::{self, Message};
use crate::{hugetlb, maps, shared};

/// Messages to the pager, which come from an agent or out of the log of a pager that was killed.
pub fn message(data: &[u8]) {
    // Descriptors come beside the bytes; messages that need one are refused without.
    let Some(message) = control::decode(data, Vec::new()) else { return };
    match &message {
        Message::Extents(extents) => assert!(extents.len() <= data.len() / 24),
        Message::Later(_, ranges) => assert!(ranges.len() <= data.len() / 16),
        _ => {}
    }
    // The number of an address space has 32 bits, of 64 in some messages.
    assert_eq!(control::encode(&message).len(), data.len());
    let again = control::decode(&control::encode(&message), Vec::new());
    assert_eq!(format!("{again:?}"), format!("{:?}", Some(message)));
}

/// `/proc/PID/maps` and `smaps`, as the memory plane reads them.
pub fn maps(text: &str) {
    for mapping in text.lines().filter_map(maps::Mapping::parse) {
        assert!(mapping.range.start < mapping.range.end, "{mapping:?}");
        assert!(mapping.name.len() <= text.len());
        let _ = (mapping.is_private_anonymous(), mapping.is_private_file());
    }
    assert!(maps::locked_starts(text).len() <= text.lines().count());
    hugetlb::fuzz_smaps(text);
}

/// `/proc/sysvipc/shm`.
pub fn segments(text: &str) {
    shared::fuzz_segments(text);
}
