//! What the kernel answers on a netlink socket: acknowledgements, refusals and their explanations.

use std::fmt;
use std::io;

use nix::errno::Errno;

/// Bytes of `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// The kernel said no.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub errno: Errno,
    /// The kernel's own words (extended acknowledgement), where it has any.
    pub explanation: Option<String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.explanation {
            Some(text) => write!(f, "{} ({text})", self.errno.desc()),
            None => f.write_str(self.errno.desc()),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Self {
        match e.raw_os_error() {
            Some(n) => Self { errno: Errno::from_raw(n), explanation: None },
            None => Self { errno: Errno::EIO, explanation: Some(e.to_string()) },
        }
    }
}

impl Refusal {
    /// For an answer that makes no sense.
    pub(crate) fn nonsense(what: impl Into<String>) -> Self {
        Self { errno: Errno::EPROTO, explanation: Some(what.into()) }
    }
}

/// One netlink message of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub payload: &'a [u8],
}

impl Message<'_> {
    /// `None` if this is no acknowledgement, else what it says.
    pub(crate) fn verdict(&self) -> Option<Result<(), Refusal>> {
        (self.kind == NLMSG_ERROR).then(|| {
            let code = self.payload.first_chunk().map_or(-(Errno::EPROTO as i32), |b| i32::from_ne_bytes(*b));
            if code == 0 {
                return Ok(());
            }
            Err(Refusal { errno: Errno::from_raw(code.wrapping_neg()), explanation: self.explanation() })
        })
    }

    fn explanation(&self) -> Option<String> {
        if self.flags & NLM_F_ACK_TLVS == 0 {
            return None;
        }
        // The error code, the header of the request, the request itself unless it was capped, then the attributes.
        let request = self.payload.get(4..)?;
        let skip =
            if self.flags & NLM_F_CAPPED == 0 { u32::from_ne_bytes(*request.first_chunk()?) as usize } else { HEADER };
        let (_, text) = Attributes(request.get(align(skip)..)?).find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)?;
        Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
    }
}

fn align(length: usize) -> usize {
    length.div_ceil(4) * 4
}

/// The messages of one datagram; ends at the first one that is cut short.
pub(crate) struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let header: &[u8; HEADER] = self.0.first_chunk()?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let payload = self.0.get(HEADER..length)?;
        self.0 = self.0.get(align(length)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: u32::from_ne_bytes([header[8], header[9], header[10], header[11]]),
            payload,
        })
    }
}

/// Attributes (type without its flag bits, value); ends at the first one that is cut short.
pub(crate) struct Attributes<'a>(pub &'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header: &[u8; 4] = self.0.first_chunk()?;
        let length = u16::from_ne_bytes([header[0], header[1]]) as usize;
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(align(length)..).unwrap_or_default();
        Some((u16::from_ne_bytes([header[2], header[3]]) & 0x3fff, value))
    }
}

/// The value of the first attribute of a type.
pub(crate) fn value(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    Attributes(attributes).find(|(k, _)| *k == kind).map(|(_, value)| value)
}

/// Attributes as they are, header, flag bits and padding included, each with its type; ends at the first one that is cut short.
pub(crate) struct Pieces<'a>(pub &'a [u8]);

impl<'a> Iterator for Pieces<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, value) = Attributes(self.0).next()?;
        let (piece, rest) = self.0.split_at_checked(align(4 + value.len())).unwrap_or((self.0, &[]));
        self.0 = rest;
        Some((kind, piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_datagram_makes_the_parser_panic_or_run_forever(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            for message in Messages(&bytes) {
                let _ = message.verdict();
                prop_assert!(Attributes(message.payload).count() <= message.payload.len());
                prop_assert_eq!(Pieces(message.payload).count(), Attributes(message.payload).count());
            }
        }
    }

    #[test]
    fn an_error_that_has_no_positive_number_is_one_that_nobody_knows() {
        let payload = i32::MIN.to_ne_bytes();
        let message = Message { kind: NLMSG_ERROR, flags: 0, sequence: 7, payload: &payload };
        let refusal = message.verdict().unwrap().unwrap_err();
        assert_eq!(refusal.errno, Errno::UnknownErrno);
    }

    #[test]
    fn a_refusal_carries_the_kernels_words() {
        let mut bytes = Vec::new();
        let text = b"no such hook\0";
        let length = 16 + 4 + 16 + 4 + text.len();
        bytes.extend_from_slice(&(length as u32).to_ne_bytes());
        bytes.extend_from_slice(&NLMSG_ERROR.to_ne_bytes());
        bytes.extend_from_slice(&(NLM_F_CAPPED | NLM_F_ACK_TLVS).to_ne_bytes());
        bytes.extend_from_slice(&[7, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&(-2i32).to_ne_bytes());
        bytes.extend_from_slice(&[0; 16]);
        bytes.extend_from_slice(&((4 + text.len()) as u16).to_ne_bytes());
        bytes.extend_from_slice(&NLMSGERR_ATTR_MSG.to_ne_bytes());
        bytes.extend_from_slice(text);
        let message = Messages(&bytes).next().unwrap();
        let refusal = message.verdict().unwrap().unwrap_err();
        assert_eq!(refusal.errno, Errno::ENOENT);
        assert_eq!(refusal.explanation.as_deref(), Some("no such hook"));
    }
}
