//! Pages in fewer bytes: what [`crate::Kind::Packed`] frames carry.
//!
//! Each frame is compressed by itself, so that a page can be read without those before it. What a peer sends is decompressed
//! into memory of the announced size, which the header's limits have bounded; it must fill that exactly.

use std::fmt;
use std::io::{self, Read};

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use zstd::bulk::{Compressor, Decompressor};

use crate::{MAX_PAGES, ReadError, WireError};

/// The level of zstd: higher ones take far longer for little more.
const ZSTD_LEVEL: i32 = 1;

/// How pages are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// An LZ4 block.
    Lz4 = 1,
    /// A frame of Zstandard (RFC 8878).
    Zstd = 2,
}

impl Codec {
    /// Both, the faster one first.
    pub const ALL: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    pub(crate) fn from_u8(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| *codec as u8 == value)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
        })
    }
}

/// Compresses pages, batch after batch, with memory that it takes once.
pub struct Packer {
    lz4: CompressTable,
    zstd: Compressor<'static>,
    packed: Vec<u8>,
}

impl Packer {
    /// Takes its memory, about 2 MiB.
    ///
    /// # Errors
    /// If there is none.
    pub fn new() -> io::Result<Self> {
        let most = MAX_PAGES as usize;
        let room = get_maximum_output_size(most).max(zstd::zstd_safe::compress_bound(most));
        Ok(Self { lz4: CompressTable::large(), zstd: Compressor::new(ZSTD_LEVEL)?, packed: vec![0; room] })
    }

    /// The pages, at most [`MAX_PAGES`] bytes, in fewer bytes; `None` where it would save less than an eighth.
    pub fn pack(&mut self, codec: Codec, pages: &[u8]) -> Option<&[u8]> {
        let length = match codec {
            Codec::Lz4 => compress_into_with_table(pages, &mut self.packed, &mut self.lz4).ok()?,
            Codec::Zstd => self.zstd.compress_to_buffer(pages, self.packed.as_mut_slice()).ok()?,
        };
        (length <= pages.len() - pages.len() / 8).then(|| &self.packed[..length])
    }
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").finish_non_exhaustive()
    }
}

/// Decompresses what a peer sends, with about 100 KiB of memory.
#[derive(Default)]
pub struct Unpacker {
    zstd: Decompressor<'static>,
    packed: Vec<u8>,
}

impl Unpacker {
    /// Receives the `length` bytes of a [`crate::FrameHeader::Packed`] and puts what they stand for into `pages`.
    ///
    /// # Errors
    /// Those of the stream; [`WireError::Packed`] if they stand for something else than exactly `pages.len()` bytes.
    pub fn read<R: Read>(&mut self, r: &mut R, codec: Codec, length: u32, pages: &mut [u8]) -> Result<(), ReadError> {
        self.packed.resize(length as usize, 0);
        r.read_exact(&mut self.packed).map_err(ReadError::Io)?;
        let unpacked = match codec {
            Codec::Lz4 => decompress_into(&self.packed, pages).ok(),
            Codec::Zstd => self.zstd.decompress_to_buffer(&self.packed, pages).ok(),
        };
        match unpacked {
            Some(length) if length == pages.len() => Ok(()),
            _ => Err(WireError::Packed { codec, length: pages.len() as u64 }.into()),
        }
    }
}

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}
