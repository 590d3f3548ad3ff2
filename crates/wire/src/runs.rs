//! Runs of pages in few bytes, for [`Kind::Later`](crate::Kind::Later) and [`Kind::Want`](crate::Kind::Want).
//!
//! Each run is two numbers in LEB128, seven bits a byte and the lowest first: the pages between the end of the run before
//! (the frame's base, for the first) and its start, and its length in pages, at least one. Runs are in ascending order and
//! do not touch the end of a task's address space.

use std::io::{Read, Write};

use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use crate::frame::{FrameHeader, MAX_RUNS, USER_ADDRESS_END};
use crate::io::write_frame;
use crate::{Kind, ReadError, WireError, WriteError};

/// Most bytes of one run: two numbers below 2^35.
const LONGEST: usize = 10;

/// Names pages whose content comes later. `ranges` are in ascending order. Does not flush.
///
/// # Errors
/// Those of the stream; a range beyond [`USER_ADDRESS_END`].
pub fn write_later<W: Write>(w: &mut W, space: AddressSpaceId, ranges: &[PageRange]) -> Result<(), WriteError> {
    write(w, ranges, Kind::Later, |base, length| FrameHeader::later(space, base, length))
}

/// Asks for pages. `ranges` are in ascending order. Does not flush.
///
/// # Errors
/// As [`write_later`].
pub fn write_want<W: Write>(w: &mut W, space: AddressSpaceId, ranges: &[PageRange]) -> Result<(), WriteError> {
    write(w, ranges, Kind::Want, |base, length| FrameHeader::want(space, base, length))
}

fn write<W: Write>(
    w: &mut W,
    mut ranges: &[PageRange],
    kind: Kind,
    header: impl Fn(u64, usize) -> Result<FrameHeader, WireError>,
) -> Result<(), WriteError> {
    while let Some(first) = ranges.first() {
        let mut bytes = Vec::new();
        let (base, mut at, mut count) = (first.start, first.start, 0);
        for range in ranges {
            if range.start < at || bytes.len() + LONGEST > MAX_RUNS as usize {
                break;
            }
            if range.end > USER_ADDRESS_END {
                return Err(WireError::OutOfRange { kind, address: range.start, length: range.len() }.into());
            }
            number(&mut bytes, (range.start - at) / PAGE_SIZE);
            number(&mut bytes, range.pages());
            (at, count) = (range.end, count + 1);
        }
        write_frame(w, &header(base, bytes.len())?, &bytes)?;
        ranges = &ranges[count..];
    }
    Ok(())
}

/// Receives the runs of a [`FrameHeader::Later`] or [`FrameHeader::Want`] whose header was read.
///
/// # Errors
/// Those of the stream; runs that are cut, empty, or go beyond [`USER_ADDRESS_END`]; a header of another kind.
pub fn read_runs<R: Read>(header: &FrameHeader, r: &mut R) -> Result<Vec<PageRange>, ReadError> {
    let (base, length) = match *header {
        FrameHeader::Later { base, length, .. } | FrameHeader::Want { base, length, .. } => (base, length),
        other => return Err(ReadError::Unexpected { expected: Kind::Later, found: other.kind() }),
    };
    let mut bytes = vec![0; length as usize];
    r.read_exact(&mut bytes).map_err(ReadError::Io)?;
    Ok(decode_runs(header.kind(), base, &bytes)?)
}

/// Reads runs from the payload of a frame of this kind.
///
/// # Errors
/// As [`read_runs`].
pub fn decode_runs(kind: Kind, base: u64, mut bytes: &[u8]) -> Result<Vec<PageRange>, WireError> {
    let mut ranges = Vec::with_capacity(bytes.len() / 4 + 1);
    let mut at = base;
    while !bytes.is_empty() {
        let gap = take(kind, &mut bytes)?;
        let pages = take(kind, &mut bytes)?;
        let address = at;
        let beyond = || WireError::OutOfRange { kind, address, length: pages.saturating_mul(PAGE_SIZE) };
        if pages == 0 {
            return Err(WireError::Empty { kind });
        }
        let start = gap.checked_mul(PAGE_SIZE).and_then(|gap| at.checked_add(gap)).ok_or_else(beyond)?;
        let end = pages.checked_mul(PAGE_SIZE).and_then(|len| start.checked_add(len)).ok_or_else(beyond)?;
        if end > USER_ADDRESS_END {
            return Err(beyond());
        }
        let unaligned = WireError::Unaligned { kind, address: start, length: end - start };
        ranges.push(PageRange::new(start, end).ok_or(unaligned)?);
        at = end;
    }
    Ok(ranges)
}

fn number(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn take(kind: Kind, bytes: &mut &[u8]) -> Result<u64, WireError> {
    let mut value = 0;
    for (place, byte) in bytes.iter().enumerate().take(LONGEST / 2) {
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            *bytes = &bytes[place + 1..];
            return Ok(value);
        }
    }
    Err(WireError::Runs { kind })
}

/// Reads the next frame of a list of wanted pages: `None` when the list has ended with [`FrameHeader::Named`].
///
/// # Errors
/// As [`read_runs`], and frames of other kinds.
pub fn read_wants<R: Read>(r: &mut R) -> Result<Option<(AddressSpaceId, Vec<PageRange>)>, ReadError> {
    match crate::read_header(r)? {
        FrameHeader::Named => Ok(None),
        header @ FrameHeader::Want { space, .. } => Ok(Some((space, read_runs(&header, r)?))),
        other => Err(ReadError::Unexpected { expected: Kind::Want, found: other.kind() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges() -> impl Strategy<Value = Vec<PageRange>> {
        prop::collection::vec((0u64..5000, 1u64..5000), 0..40000).prop_map(|gaps| {
            let mut at = 0x5555_0000_0000;
            let place = |(gap, pages): (u64, u64)| {
                let start = at + gap * PAGE_SIZE;
                at = start + pages * PAGE_SIZE;
                PageRange { start, end: at }
            };
            gaps.into_iter().map(place).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn runs_come_back_in_as_many_frames_as_they_need(ranges in ranges()) {
            let mut wire = Vec::new();
            write_later(&mut wire, AddressSpaceId(7), &ranges).unwrap();
            let (mut rest, mut back) = (&wire[..], Vec::new());
            while !rest.is_empty() {
                let header = crate::read_header(&mut rest).unwrap();
                back.extend(read_runs(&header, &mut rest).unwrap());
            }
            prop_assert_eq!(back, ranges);
        }

        #[test]
        fn arbitrary_bytes_give_runs_in_order_or_an_error(base in any::<u64>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(ranges) = decode_runs(Kind::Later, base, &bytes) {
                prop_assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
                prop_assert!(ranges.iter().all(|r| r.end <= USER_ADDRESS_END && r.start >= base));
            }
        }
    }

    #[test]
    fn runs_that_are_cut_or_empty_are_refused() {
        assert!(matches!(decode_runs(Kind::Want, 0, &[0x80]), Err(WireError::Runs { .. })));
        assert!(matches!(decode_runs(Kind::Want, 0, &[1]), Err(WireError::Runs { .. })));
        assert!(matches!(decode_runs(Kind::Want, 0, &[1, 0]), Err(WireError::Empty { .. })));
        assert!(matches!(decode_runs(Kind::Want, 0, &[0xff; 12]), Err(WireError::Runs { .. })));
    }
}
