//! What the fuzz targets do with their input. The normal tests of `crates/wire` include this file and run the same
//! functions on generated input, so that the targets cannot rot.

use std::io::{Cursor, Read};

use tranship_wire::{FrameHeader, HEADER_LEN, HELLO_PREFIX_LEN, Hello, MAX_HELLO, USER_ADDRESS_END, Welcome};

/// A header decodes to something within the limits that encodes to the same bytes, or not at all.
pub fn frame_header(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = FrameHeader::decode(bytes) else { return };
    assert_eq!(&header.encode(), bytes, "{header:?}");
    assert!(header.payload_len() <= 1 << 20, "{header:?}");
    if let FrameHeader::Pages { range, .. } | FrameHeader::Zero { range, .. } = header {
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
