use std::io::{self, ErrorKind, IoSlice, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tranship_types::AddressSpaceId;

use crate::{Codec, FrameHeader, HEADER_LEN, Kind, MAX_MESSAGE, ReadError, WireError, WriteError};

/// Receives and checks the next header. Its payload, [`FrameHeader::payload_len`] bytes, is then the caller's to read:
/// pages go straight to where they belong.
///
/// # Errors
/// [`ReadError::Closed`] if the stream ends before the first byte.
pub fn read_header<R: Read>(r: &mut R) -> Result<FrameHeader, ReadError> {
    let mut bytes = [0; HEADER_LEN];
    let mut got = 0;
    while got < HEADER_LEN {
        match r.read(&mut bytes[got..]) {
            Ok(0) if got == 0 => return Err(ReadError::Closed),
            Ok(0) => return Err(ReadError::Io(ErrorKind::UnexpectedEof.into())),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(ReadError::Io(e)),
        }
    }
    Ok(FrameHeader::decode(&bytes)?)
}

/// Sends a header that has no payload. Does not flush.
///
/// # Errors
/// Those of the stream.
pub fn write_header<W: Write>(w: &mut W, header: &FrameHeader) -> Result<(), WriteError> {
    Ok(w.write_all(&header.encode())?)
}

/// Sends a message and flushes.
///
/// # Errors
/// [`WireError::TooLong`] if its JSON is over [`MAX_MESSAGE`], [`WireError::Json`] if it has none, and those of the stream.
pub fn write_message<W: Write, T: Serialize + ?Sized>(w: &mut W, message: &T) -> Result<(), WriteError> {
    queue_message(w, message)?;
    Ok(w.flush()?)
}

/// Sends a message of which there are many in a row. Does not flush.
///
/// # Errors
/// As [`write_message`].
pub fn queue_message<W: Write, T: Serialize + ?Sized>(w: &mut W, message: &T) -> Result<(), WriteError> {
    let mut json = Capped { bytes: Vec::with_capacity(512), wanted: 0 };
    let result = serde_json::to_writer(&mut json, message);
    if json.wanted > u64::from(MAX_MESSAGE) {
        let (length, limit) = (json.wanted, u64::from(MAX_MESSAGE));
        return Err(WireError::TooLong { what: "a message", length, limit }.into());
    }
    result.map_err(|e| WireError::Json { kind: Kind::Message, why: e.to_string() })?;
    write_frame(w, &FrameHeader::message(json.bytes.len())?, &json.bytes)
}

/// Sends `bytes` of a file, from `offset` on. Does not flush.
///
/// # Errors
/// If there are none, or more than [`crate::MAX_FILE_DATA`], and those of the stream.
pub fn write_file_data<W: Write>(w: &mut W, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
    write_frame(w, &FrameHeader::file_data(offset, bytes.len())?, bytes)
}

/// Receives a message; a frame of any other kind is an error.
///
/// # Errors
/// [`ReadError::Closed`] if the peer closed the link instead, [`ReadError::Unexpected`], [`WireError::Json`].
pub fn read_message<R: Read, T: DeserializeOwned>(r: &mut R) -> Result<T, ReadError> {
    let header = read_header(r)?;
    read_message_after(&header, r)
}

/// Receives the rest of a message whose header was read with [`read_header`].
///
/// # Errors
/// As [`read_message`].
pub fn read_message_after<R: Read, T: DeserializeOwned>(header: &FrameHeader, r: &mut R) -> Result<T, ReadError> {
    read_json(header, Kind::Message, r)
}

/// Sends the content of the pages at `address` of `space`; header and payload leave in one write where the stream can.
/// Does not flush.
///
/// # Errors
/// If `pages` is not made of 1 to 256 whole pages within a task's address space, and those of the stream.
pub fn write_pages<W: Write>(w: &mut W, space: AddressSpaceId, address: u64, pages: &[u8]) -> Result<(), WriteError> {
    write_frame(w, &FrameHeader::pages(space, address, pages.len())?, pages)
}

/// Sends the content of `pages` pages from `address` on of `space` as `packed`, which [`crate::packed::Packer`] has made of
/// them with `codec`. Does not flush.
///
/// # Errors
/// As [`FrameHeader::packed`], and those of the stream.
pub fn write_packed<W: Write>(
    w: &mut W,
    space: AddressSpaceId,
    pages: (u64, u32),
    codec: Codec,
    packed: &[u8],
) -> Result<(), WriteError> {
    write_frame(w, &FrameHeader::packed(space, pages, codec, packed.len())?, packed)
}

/// Says that `pages` pages from `address` on are zero. Does not flush.
///
/// # Errors
/// As [`write_pages`].
pub fn write_zero<W: Write>(w: &mut W, space: AddressSpaceId, address: u64, pages: u32) -> Result<(), WriteError> {
    write_header(w, &FrameHeader::zero(space, address, pages)?)
}

/// Says that `pages` pages from `address` on of `space` are as those of `other`. Does not flush.
///
/// # Errors
/// As [`FrameHeader::same`], and those of the stream.
pub fn write_same<W: Write>(
    w: &mut W,
    space: AddressSpaceId,
    pages: (u64, u32),
    other: AddressSpaceId,
) -> Result<(), WriteError> {
    write_header(w, &FrameHeader::same(space, pages, other)?)
}

/// Ends a stream and flushes; `total` is how many bytes of pages were sent, as they are before compression.
///
/// # Errors
/// Those of the stream.
pub fn write_end<W: Write>(w: &mut W, total: u64) -> Result<(), WriteError> {
    write_header(w, &FrameHeader::End { total })?;
    Ok(w.flush()?)
}

/// Receives the end of a stream of which `received` bytes of pages have arrived.
///
/// # Errors
/// [`ReadError::Incomplete`] if the sender counted otherwise, [`ReadError::Unexpected`] if the stream goes on.
pub fn read_end<R: Read>(r: &mut R, received: u64) -> Result<(), ReadError> {
    match read_header(r)? {
        FrameHeader::End { total } if total == received => Ok(()),
        FrameHeader::End { total } => Err(ReadError::Incomplete { sent: total, received }),
        other => Err(ReadError::Unexpected { expected: Kind::End, found: other.kind() }),
    }
}

/// Sends a ping and flushes.
///
/// # Errors
/// Those of the stream.
pub fn write_ping<W: Write>(w: &mut W, timestamp_ns: u64) -> Result<(), WriteError> {
    write_header(w, &FrameHeader::Ping { timestamp_ns })?;
    Ok(w.flush()?)
}

/// Answers a ping and flushes.
///
/// # Errors
/// Those of the stream.
pub fn write_pong<W: Write>(w: &mut W, timestamp_ns: u64) -> Result<(), WriteError> {
    write_header(w, &FrameHeader::Pong { timestamp_ns })?;
    Ok(w.flush()?)
}

pub(crate) fn read_json<R: Read, T: DeserializeOwned>(
    header: &FrameHeader,
    expected: Kind,
    r: &mut R,
) -> Result<T, ReadError> {
    if header.kind() != expected {
        return Err(ReadError::Unexpected { expected, found: header.kind() });
    }
    // Not one allocation of the announced length: a peer that announces much and sends little shall not cost much.
    let mut json = Vec::new();
    let length = header.payload_len() as u64;
    r.take(length).read_to_end(&mut json).map_err(ReadError::Io)?;
    if json.len() as u64 != length {
        return Err(ReadError::Io(ErrorKind::UnexpectedEof.into()));
    }
    // The parser's words can quote the peer's; they will be shown on terminals.
    let printable = |e: serde_json::Error| e.to_string().chars().filter(|c| !c.is_control()).take(200).collect();
    Ok(serde_json::from_slice(&json).map_err(|e| WireError::Json { kind: expected, why: printable(e) })?)
}

pub(crate) fn write_frame<W: Write>(w: &mut W, header: &FrameHeader, payload: &[u8]) -> Result<(), WriteError> {
    let head = header.encode();
    let mut done = 0;
    while done < HEADER_LEN {
        match w.write_vectored(&[IoSlice::new(&head[done..]), IoSlice::new(payload)]) {
            Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(w.write_all(payload.get(done - HEADER_LEN..).unwrap_or_default())?)
}

/// Collects up to [`MAX_MESSAGE`] bytes and stops the serialiser there.
struct Capped {
    bytes: Vec<u8>,
    wanted: u64,
}

impl Write for Capped {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.wanted += buf.len() as u64;
        if self.wanted > u64::from(MAX_MESSAGE) {
            return Err(ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
