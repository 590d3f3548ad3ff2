use std::fmt;

use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange};

use crate::{Codec, WireError};

/// Length of an encoded [`FrameHeader`] in bytes.
pub const HEADER_LEN: usize = 24;
/// Most bytes in a message's JSON.
pub const MAX_MESSAGE: u32 = 1 << 20;
/// Most bytes of pages in one frame.
pub const MAX_PAGES: u32 = 1 << 20;
/// Most bytes in one piece of a file.
pub const MAX_FILE_DATA: u32 = 1 << 20;
/// Most bytes in the JSON that announces a file.
pub const MAX_FILE_BEGIN: u32 = 4096;
/// Most bytes in one list of runs of pages.
pub const MAX_RUNS: u32 = 64 << 10;
/// End of a task's address space: 47 bits, as x86-64 and arm64 tasks have them unless they ask for more.
pub const USER_ADDRESS_END: u64 = 1 << 47;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A request or response in JSON.
    Message = 1,
    /// Pages with their content.
    Pages = 2,
    /// Pages of zeros, without content.
    Zero = 3,
    /// Announces a file.
    FileBegin = 4,
    /// A piece of the file.
    FileData = 5,
    /// The stream is complete.
    End = 6,
    /// Asks for a [`Kind::Pong`].
    Ping = 7,
    /// Answers a [`Kind::Ping`].
    Pong = 8,
    /// Names pages whose content comes later.
    Later = 9,
    /// All pages that come later have been named.
    Named = 10,
    /// Asks for pages.
    Want = 11,
    /// Pages with their content, compressed.
    Packed = 12,
    /// Pages that are as another task's are.
    Same = 13,
}

impl Kind {
    fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Kind::Message,
            2 => Kind::Pages,
            3 => Kind::Zero,
            4 => Kind::FileBegin,
            5 => Kind::FileData,
            6 => Kind::End,
            7 => Kind::Ping,
            8 => Kind::Pong,
            9 => Kind::Later,
            10 => Kind::Named,
            11 => Kind::Want,
            12 => Kind::Packed,
            13 => Kind::Same,
            _ => return None,
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Message => "Message",
            Kind::Pages => "Pages",
            Kind::Zero => "Zero",
            Kind::FileBegin => "FileBegin",
            Kind::FileData => "FileData",
            Kind::End => "End",
            Kind::Ping => "Ping",
            Kind::Pong => "Pong",
            Kind::Later => "Later",
            Kind::Named => "Named",
            Kind::Want => "Want",
            Kind::Packed => "Packed",
            Kind::Same => "Same",
        })
    }
}

/// The header of a frame: each variant has what exists in a frame of that kind.
///
/// On the wire, little-endian, 24 bytes:
///
/// ```text
/// 0     1      2         4      8        16       20     24
/// │kind │flags │reserved │space │address │length  │extra │ payload: `length` bytes
/// ```
///
/// | kind | space | address | length | extra |
/// |---|---|---|---|---|
/// | Message, FileBegin | 0 | 0 | bytes of JSON | 0 |
/// | Pages | address space | first page | bytes of pages | 0 |
/// | Zero | address space | first page | 0 | pages |
/// | FileData | 0 | offset in the file | bytes | 0 |
/// | End | 0 | bytes of pages on the stream | 0 | 0 |
/// | Ping, Pong | 0 | sender's timestamp in ns | 0 | 0 |
/// | Later, Want | address space | where the first gap is counted from | bytes of [`crate::runs`] | 0 |
/// | Named | 0 | 0 | 0 | 0 |
/// | Packed | address space | first page | bytes as compressed | pages |
/// | Same | address space | first page | the other address space | pages |
///
/// `flags` is the [`Codec`] of Packed, else 0; `reserved` is 0. What a kind does not use must be 0, so that a later version can give it a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameHeader {
    /// `length` bytes of JSON follow.
    Message {
        /// Bytes of JSON, 1 to [`MAX_MESSAGE`].
        length: u32,
    },
    /// The content of `range` follows.
    Pages {
        /// Whose pages.
        space: AddressSpaceId,
        /// Which, at most [`MAX_PAGES`] bytes.
        range: PageRange,
    },
    /// `range` is all zeros; nothing follows.
    Zero {
        /// Whose pages.
        space: AddressSpaceId,
        /// Which.
        range: PageRange,
    },
    /// `length` bytes of JSON follow, a [`crate::FileBegin`].
    FileBegin {
        /// Bytes of JSON, 1 to [`MAX_FILE_BEGIN`].
        length: u32,
    },
    /// `length` bytes of the file follow.
    FileData {
        /// Where in the file they belong.
        offset: u64,
        /// Bytes, 1 to [`MAX_FILE_DATA`].
        length: u32,
    },
    /// The stream is complete.
    End {
        /// The bytes of pages, as they are before compression, that the sender counted.
        total: u64,
    },
    /// Asks for a [`FrameHeader::Pong`] with the same timestamp.
    Ping {
        /// The sender's clock in ns; means something to the sender only.
        timestamp_ns: u64,
    },
    /// Answers a [`FrameHeader::Ping`].
    Pong {
        /// The timestamp of the ping.
        timestamp_ns: u64,
    },
    /// Runs of pages follow ([`crate::runs`]), `length` bytes: what they have now is not what they will have; that comes later.
    Later {
        /// Whose pages.
        space: AddressSpaceId,
        /// Where the first gap is counted from.
        base: u64,
        /// Bytes of runs, 1 to [`MAX_RUNS`].
        length: u32,
    },
    /// Every page that comes later has been named on this stream.
    Named,
    /// Runs of pages follow, `length` bytes: the sender would like to have them.
    Want {
        /// Whose pages.
        space: AddressSpaceId,
        /// Where the first gap is counted from.
        base: u64,
        /// Bytes of runs, 1 to [`MAX_RUNS`].
        length: u32,
    },
    /// The content of `range` follows, compressed to `length` bytes ([`crate::packed`]).
    Packed {
        /// Whose pages.
        space: AddressSpaceId,
        /// Which, at most [`MAX_PAGES`] bytes.
        range: PageRange,
        /// How they are compressed.
        codec: Codec,
        /// Bytes, at least 1 and fewer than the pages have.
        length: u32,
    },
    /// `range` is as the same addresses of another task are by now: as this stream has brought them. Nothing follows.
    Same {
        /// Whose pages.
        space: AddressSpaceId,
        /// Which, at most [`MAX_PAGES`] bytes.
        range: PageRange,
        /// The other task's address space.
        other: AddressSpaceId,
    },
}

impl FrameHeader {
    /// The header of a message of `length` bytes of JSON.
    ///
    /// # Errors
    /// If it is empty or over [`MAX_MESSAGE`].
    pub fn message(length: usize) -> Result<Self, WireError> {
        let length = bounded(Kind::Message, length as u64, MAX_MESSAGE)?;
        Ok(Self::Message { length })
    }

    /// The header of the pages at `address`, `length` bytes.
    ///
    /// # Errors
    /// If these are not whole pages, not at least one, over [`MAX_PAGES`], or beyond [`USER_ADDRESS_END`].
    pub fn pages(space: AddressSpaceId, address: u64, length: usize) -> Result<Self, WireError> {
        bounded(Kind::Pages, length as u64, MAX_PAGES)?;
        Ok(Self::Pages { space, range: range(Kind::Pages, address, length as u64)? })
    }

    /// The header that says that `pages` pages from `address` on are zero.
    ///
    /// # Errors
    /// If `address` is not a page's, there is no page, or the pages go beyond [`USER_ADDRESS_END`].
    pub fn zero(space: AddressSpaceId, address: u64, pages: u32) -> Result<Self, WireError> {
        Ok(Self::Zero { space, range: range(Kind::Zero, address, u64::from(pages) * PAGE_SIZE)? })
    }

    /// The header of a [`crate::FileBegin`] of `length` bytes of JSON.
    ///
    /// # Errors
    /// If it is empty or over [`MAX_FILE_BEGIN`].
    pub fn file_begin(length: usize) -> Result<Self, WireError> {
        let length = bounded(Kind::FileBegin, length as u64, MAX_FILE_BEGIN)?;
        Ok(Self::FileBegin { length })
    }

    /// The header of `length` bytes of a file, from `offset` on.
    ///
    /// # Errors
    /// If there are none, more than [`MAX_FILE_DATA`], or they end beyond 2^64.
    pub fn file_data(offset: u64, length: usize) -> Result<Self, WireError> {
        let length = bounded(Kind::FileData, length as u64, MAX_FILE_DATA)?;
        if offset.checked_add(u64::from(length)).is_none() {
            return Err(WireError::OutOfRange { kind: Kind::FileData, address: offset, length: u64::from(length) });
        }
        Ok(Self::FileData { offset, length })
    }

    /// The header of runs of pages that come later, `length` bytes.
    ///
    /// # Errors
    /// If there are none, more than [`MAX_RUNS`] bytes, or `base` is not a page's address.
    pub fn later(space: AddressSpaceId, base: u64, length: usize) -> Result<Self, WireError> {
        let length = runs(Kind::Later, base, length)?;
        Ok(Self::Later { space, base, length })
    }

    /// The header of runs of pages that are wanted, `length` bytes.
    ///
    /// # Errors
    /// As [`FrameHeader::later`].
    pub fn want(space: AddressSpaceId, base: u64, length: usize) -> Result<Self, WireError> {
        let length = runs(Kind::Want, base, length)?;
        Ok(Self::Want { space, base, length })
    }

    /// The header of the pages at `address`, `pages` of them, compressed to `length` bytes.
    ///
    /// # Errors
    /// As [`FrameHeader::pages`]; and if compression has left nothing of them, or has not made them fewer bytes.
    pub fn packed(
        space: AddressSpaceId,
        (address, pages): (u64, u32),
        codec: Codec,
        length: usize,
    ) -> Result<Self, WireError> {
        let bytes = u64::from(pages) * PAGE_SIZE;
        let bytes = bounded(Kind::Packed, bytes, MAX_PAGES)?;
        let length = bounded(Kind::Packed, length as u64, bytes - 1)?;
        Ok(Self::Packed { space, range: range(Kind::Packed, address, u64::from(bytes))?, codec, length })
    }

    /// The header that says that `pages` pages from `address` on are as those of `other`.
    ///
    /// # Errors
    /// As [`FrameHeader::pages`]; and if these are not the address spaces of two tasks.
    pub fn same(space: AddressSpaceId, (address, pages): (u64, u32), other: AddressSpaceId) -> Result<Self, WireError> {
        if other == space || other.is_object() || space.is_object() {
            let value = u64::from(other.0);
            return Err(WireError::Unknown { field: "the other address space of a Same frame", value });
        }
        let bytes = bounded(Kind::Same, u64::from(pages) * PAGE_SIZE, MAX_PAGES)?;
        Ok(Self::Same { space, range: range(Kind::Same, address, u64::from(bytes))?, other })
    }

    /// What kind of frame this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Message { .. } => Kind::Message,
            Self::Pages { .. } => Kind::Pages,
            Self::Zero { .. } => Kind::Zero,
            Self::FileBegin { .. } => Kind::FileBegin,
            Self::FileData { .. } => Kind::FileData,
            Self::End { .. } => Kind::End,
            Self::Ping { .. } => Kind::Ping,
            Self::Pong { .. } => Kind::Pong,
            Self::Later { .. } => Kind::Later,
            Self::Named => Kind::Named,
            Self::Want { .. } => Kind::Want,
            Self::Packed { .. } => Kind::Packed,
            Self::Same { .. } => Kind::Same,
        }
    }

    /// Bytes that follow the header; at most 1 MiB in a header that was decoded.
    pub fn payload_len(&self) -> usize {
        match self {
            Self::Message { length }
            | Self::FileBegin { length }
            | Self::FileData { length, .. }
            | Self::Later { length, .. }
            | Self::Want { length, .. }
            | Self::Packed { length, .. } => *length as usize,
            Self::Pages { range, .. } => range.len() as usize,
            Self::Zero { .. }
            | Self::Same { .. }
            | Self::End { .. }
            | Self::Ping { .. }
            | Self::Pong { .. }
            | Self::Named => 0,
        }
    }

    /// The 24 bytes for the wire. A header that the constructors or [`FrameHeader::decode`] made decodes to itself.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let (space, address, length, extra) = match *self {
            Self::Message { length } | Self::FileBegin { length } => (0, 0, length, 0),
            Self::Pages { space, range } => (space.0, range.start, range.end.wrapping_sub(range.start) as u32, 0),
            Self::Zero { space, range } => {
                (space.0, range.start, 0, (range.end.wrapping_sub(range.start) / PAGE_SIZE) as u32)
            }
            Self::FileData { offset, length } => (0, offset, length, 0),
            Self::End { total } => (0, total, 0, 0),
            Self::Ping { timestamp_ns } | Self::Pong { timestamp_ns } => (0, timestamp_ns, 0, 0),
            Self::Later { space, base, length } | Self::Want { space, base, length } => (space.0, base, length, 0),
            Self::Named => (0, 0, 0, 0),
            Self::Packed { space, range, length, .. } => (space.0, range.start, length, range.pages() as u32),
            Self::Same { space, range, other } => (space.0, range.start, other.0, range.pages() as u32),
        };
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.kind() as u8;
        if let Self::Packed { codec, .. } = self {
            bytes[1] = *codec as u8;
        }
        bytes[4..8].copy_from_slice(&space.to_le_bytes());
        bytes[8..16].copy_from_slice(&address.to_le_bytes());
        bytes[16..20].copy_from_slice(&length.to_le_bytes());
        bytes[20..24].copy_from_slice(&extra.to_le_bytes());
        bytes
    }

    /// Reads and checks a header: what it returns is within all limits.
    ///
    /// # Errors
    /// Any kind that is unknown, any length, address or range that is not allowed, any unused field that is not 0.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let kind = Kind::from_u8(bytes[0])
            .ok_or(WireError::Unknown { field: "the kind of a frame", value: u64::from(bytes[0]) })?;
        let (space, length, extra) = (u32_at(4), u32_at(16), u32_at(20));
        let address = u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32;
        let zero = |field, value: u64| if value == 0 { Ok(()) } else { Err(WireError::NotZero { kind, field, value }) };

        if kind != Kind::Packed {
            zero("flags", u64::from(bytes[1]))?;
        }
        zero("reserved", u64::from(u16::from_le_bytes([bytes[2], bytes[3]])))?;
        if !matches!(kind, Kind::Pages | Kind::Packed | Kind::Zero | Kind::Same | Kind::Later | Kind::Want) {
            zero("space", u64::from(space))?;
        }
        if !matches!(kind, Kind::Zero | Kind::Packed | Kind::Same) {
            zero("extra", u64::from(extra))?;
        }
        if matches!(kind, Kind::Message | Kind::FileBegin | Kind::Named) {
            zero("address", address)?;
        }
        if matches!(kind, Kind::Zero | Kind::End | Kind::Ping | Kind::Pong | Kind::Named) {
            zero("length", u64::from(length))?;
        }
        match kind {
            Kind::Message => Self::message(length as usize),
            Kind::Pages => Self::pages(AddressSpaceId(space), address, length as usize),
            Kind::Zero => Self::zero(AddressSpaceId(space), address, extra),
            Kind::FileBegin => Self::file_begin(length as usize),
            Kind::FileData => Self::file_data(address, length as usize),
            Kind::End => Ok(Self::End { total: address }),
            Kind::Ping => Ok(Self::Ping { timestamp_ns: address }),
            Kind::Pong => Ok(Self::Pong { timestamp_ns: address }),
            Kind::Later => Self::later(AddressSpaceId(space), address, length as usize),
            Kind::Named => Ok(Self::Named),
            Kind::Want => Self::want(AddressSpaceId(space), address, length as usize),
            Kind::Packed => {
                let codec = Codec::from_u8(bytes[1])
                    .ok_or(WireError::Unknown { field: "the codec of a frame", value: u64::from(bytes[1]) })?;
                Self::packed(AddressSpaceId(space), (address, extra), codec, length as usize)
            }
            Kind::Same => Self::same(AddressSpaceId(space), (address, extra), AddressSpaceId(length)),
        }
    }
}

fn runs(kind: Kind, base: u64, length: usize) -> Result<u32, WireError> {
    let length = bounded(kind, length as u64, MAX_RUNS)?;
    if base.is_multiple_of(PAGE_SIZE) {
        Ok(length)
    } else {
        Err(WireError::Unaligned { kind, address: base, length: u64::from(length) })
    }
}

fn bounded(kind: Kind, length: u64, limit: u32) -> Result<u32, WireError> {
    let what = match kind {
        Kind::Message => "a message",
        Kind::Pages | Kind::Packed | Kind::Same => "a frame of pages",
        Kind::FileBegin => "the announcement of a file",
        Kind::Later | Kind::Want => "a list of pages",
        _ => "a piece of a file",
    };
    match u32::try_from(length) {
        Ok(0) => Err(WireError::Empty { kind }),
        Ok(n) if n <= limit => Ok(n),
        _ => Err(WireError::TooLong { what, length, limit: u64::from(limit) }),
    }
}

fn range(kind: Kind, address: u64, length: u64) -> Result<PageRange, WireError> {
    if length == 0 {
        return Err(WireError::Empty { kind });
    }
    let end = address.checked_add(length).filter(|end| *end <= USER_ADDRESS_END).ok_or(WireError::OutOfRange {
        kind,
        address,
        length,
    })?;
    PageRange::new(address, end).ok_or(WireError::Unaligned { kind, address, length })
}
