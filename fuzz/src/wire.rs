//! Frames and greetings between agents.

use std::io::{Cursor, Read};

use tranship_wire::packed::{Packer, Unpacker};
use tranship_wire::{
    Codec, FileBegin, FrameHeader, HEADER_LEN, HELLO_PREFIX_LEN, Hello, Kind, MAX_HELLO, USER_ADDRESS_END, Welcome,
};

/// A header decodes to something within the limits that encodes to the same bytes, or not at all.
pub fn frame_header(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = FrameHeader::decode(bytes) else { return };
    assert_eq!(&header.encode(), bytes, "{header:?}");
    assert!(header.payload_len() <= 1 << 20, "{header:?}");
    if let FrameHeader::Pages { range, .. }
    | FrameHeader::Zero { range, .. }
    | FrameHeader::Packed { range, .. }
    | FrameHeader::Same { range, .. } = header
    {
        assert!(range.start < range.end && range.end <= USER_ADDRESS_END, "{header:?}");
        assert!(range.start % 4096 == 0 && range.end % 4096 == 0, "{header:?}");
    }
}

/// A greeting that is accepted survives another round.
pub fn hello(data: &[u8]) {
    if let Ok(hello) = Hello::decode(data) {
        let bytes = hello.encode();
        assert!(bytes.len() <= HELLO_PREFIX_LEN + MAX_HELLO);
        assert_eq!(Hello::decode(&bytes[HELLO_PREFIX_LEN..]).as_ref(), Ok(&hello));
    }
    let _ = tranship_wire::read_hello(&mut Cursor::new(data));
}

/// An answer that is accepted survives another round and is safe to print.
pub fn welcome(data: &[u8]) {
    if let Ok(welcome) = Welcome::decode(data) {
        if let Welcome::Refused(refusal) = &welcome {
            assert!(!refusal.reason.chars().any(char::is_control));
        }
        let bytes = welcome.encode();
        assert!(bytes.len() <= HELLO_PREFIX_LEN + MAX_HELLO);
        assert_eq!(Welcome::decode(&bytes[HELLO_PREFIX_LEN..]).as_ref(), Ok(&welcome));
    }
    let _ = tranship_wire::read_welcome(&mut Cursor::new(data));
}

/// A receiver reads frame after frame until the stream ends or is refused; it never takes in more than what came.
pub fn stream(data: &[u8]) {
    let mut r = Cursor::new(data);
    loop {
        let before = r.position();
        let Ok(header) = tranship_wire::read_header(&mut r) else { return };
        match header {
            FrameHeader::Message { .. } => {
                if tranship_wire::read_message_after::<_, serde_json::Value>(&header, &mut r).is_err() {
                    return;
                }
            }
            FrameHeader::Later { .. } | FrameHeader::Want { .. } => {
                if tranship_wire::runs::read_runs(&header, &mut r).is_err() {
                    return;
                }
            }
            FrameHeader::Packed { range, codec, length, .. } => {
                assert!(range.len() <= 1 << 20, "{header:?}");
                let mut pages = vec![0; range.len() as usize];
                if Unpacker::default().read(&mut r, codec, length, &mut pages).is_err() {
                    return;
                }
            }
            _ => {
                let length = header.payload_len() as u64;
                if std::io::copy(&mut r.by_ref().take(length), &mut std::io::sink()).is_ok_and(|n| n < length) {
                    return;
                }
            }
        }
        assert!(r.position() >= before + HEADER_LEN as u64);
    }
}

/// What is compressed comes out as it was; what was not made by a [`Packer`] comes out as so many bytes, or not at all.
pub fn packed(data: &[u8]) {
    let (mut packer, mut unpacker) = (Packer::new().unwrap(), Unpacker::default());
    for codec in Codec::ALL {
        let mut got = vec![0; data.len()];
        if let Some(packed) = packer.pack(codec, data).map(<[u8]>::to_vec) {
            unpacker.read(&mut packed.as_slice(), codec, packed.len() as u32, &mut got).unwrap();
            assert_eq!(got, data, "{codec}");
            // Neither one byte fewer nor one more than was announced.
            for other in [data.len() - 1, data.len() + 1] {
                got.resize(other, 0);
                assert!(
                    unpacker.read(&mut packed.as_slice(), codec, packed.len() as u32, &mut got).is_err(),
                    "{codec}"
                );
            }
        }
        got.resize(4096, 0);
        let _ = unpacker.read(&mut &data[..], codec, data.len() as u32, &mut got);
    }
}

/// Runs of pages: in order, not empty, aligned, below the end of what a program can have; no more of them than bytes.
pub fn runs(data: &[u8]) {
    let Some((head, payload)) = data.split_first_chunk::<9>() else { return };
    let [kind, base @ ..] = *head;
    let kind = if kind & 1 == 0 { Kind::Later } else { Kind::Want };
    let base = u64::from_le_bytes(base) & !4095;
    let Ok(ranges) = tranship_wire::runs::decode_runs(kind, base, payload) else { return };
    assert!(ranges.len() <= payload.len() / 2);
    let mut last = base;
    for range in ranges {
        assert!(last <= range.start && range.start < range.end && range.end <= USER_ADDRESS_END, "{range:?}");
        last = range.end;
    }
}

/// The announcement of a file: a name that is accepted leads to no other directory.
pub fn file(data: &[u8]) {
    if let Ok(file) = serde_json::from_slice::<FileBegin>(data)
        && file.check(1 << 20).is_ok()
    {
        assert!(file.size <= 1 << 20 && !file.name.contains('/') && file.name != ".." && file.name != ".");
        let again = serde_json::from_slice::<FileBegin>(&serde_json::to_vec(&file).unwrap());
        assert_eq!(again.unwrap(), file);
    }
}
