//! What two holders of standard streams say to each other, over whatever carries bytes between
//! them.
//!
//! ```text
//!   kind u8 │ stream u8 │ 0 u16 │ length u32 │ position u64 │ bytes
//! ```
//! Numbers are little-endian. Positions count the bytes of one direction of a stream from 0; its
//! end counts as one byte.

/// Bytes before the content.
const HEAD: usize = 16;
/// Most bytes of content in one frame.
pub const MOST: usize = 32 << 10;

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The receiver has passed on everything before the position; sent for each stream when a link
    /// begins.
    State = 1,
    /// Content from the position on.
    Data = 2,
    /// The receiver has passed on everything before the position.
    Ack = 3,
    /// The stream ends at the position.
    End = 4,
    /// Nobody takes what the stream brings any more.
    Closed = 5,
    /// All streams have ended, and everything was passed on.
    Done = 6,
}

impl Kind {
    fn of(number: u8) -> Option<Self> {
        [Self::State, Self::Data, Self::Ack, Self::End, Self::Closed, Self::Done]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub stream: u8,
    pub position: u64,
    pub bytes: Vec<u8>,
}

/// Appends a frame to what is to be sent.
pub fn put(to: &mut Vec<u8>, kind: Kind, stream: u8, position: u64, bytes: &[u8]) {
    debug_assert!(bytes.len() <= MOST);
    to.extend([kind as u8, stream, 0, 0]);
    to.extend(u32::try_from(bytes.len()).unwrap_or_default().to_le_bytes());
    to.extend(position.to_le_bytes());
    to.extend(bytes);
}

/// Bytes that are no frame.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("what came is no frame of standard streams")]
pub struct Malformed;

/// Takes the first frame off what has been received; `None` where it is not complete.
///
/// # Errors
/// It is no frame, or a longer one than there may be.
pub fn take(from: &mut Vec<u8>) -> Result<Option<Frame>, Malformed> {
    let Some((head, rest)) = from.split_first_chunk::<HEAD>() else { return Ok(None) };
    let [kind, stream, 0, 0, l0, l1, l2, l3, position @ ..] = *head else { return Err(Malformed) };
    let kind = Kind::of(kind).ok_or(Malformed)?;
    let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).map_err(|_| Malformed)?;
    if length > MOST || (length > 0 && kind != Kind::Data) {
        return Err(Malformed);
    }
    let Some(bytes) = rest.get(..length).map(<[u8]>::to_vec) else { return Ok(None) };
    from.drain(..HEAD + length);
    Ok(Some(Frame { kind, stream, position: u64::from_le_bytes(position), bytes }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written_also_in_pieces() {
        let mut sent = Vec::new();
        put(&mut sent, Kind::Data, 1, 7, b"hello");
        put(&mut sent, Kind::Ack, 0, u64::MAX, b"");
        let (mut received, mut frames) = (Vec::new(), Vec::new());
        for byte in sent {
            received.push(byte);
            frames.extend(take(&mut received).unwrap());
        }
        let data = Frame { kind: Kind::Data, stream: 1, position: 7, bytes: b"hello".to_vec() };
        assert_eq!(frames, [data, Frame { kind: Kind::Ack, stream: 0, position: u64::MAX, bytes: Vec::new() }]);
        assert!(received.is_empty());
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_it_has_come() {
        let mut head = vec![Kind::Data as u8, 0, 0, 0];
        head.extend(u32::MAX.to_le_bytes());
        head.extend([0; 8]);
        assert_eq!(take(&mut head), Err(Malformed));
    }

    proptest! {
        #[test]
        fn no_input_makes_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            while let Ok(Some(_)) = take(&mut bytes) {}
        }
    }
}
