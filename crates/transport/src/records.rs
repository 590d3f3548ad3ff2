//! The record layer of TLS 1.3 (RFC 8446, sections 5 and 7): what an established link needs of TLS.
//!
//! The handshake is rustls's, and may be done by another process ([`crate::handshake`]). What it leaves are two traffic secrets. From
//! them this module derives keys, seals and opens records, and renews the keys.

use ring::aead::{
    AES_128_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey,
};
use ring::hkdf;
use rustls::{AlertDescription, Error};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

/// Most plaintext in one record (section 5.1).
pub(crate) const RECORD: usize = 16 << 10;
/// Most bytes that a record has after its header (section 5.2).
const SEALED: usize = RECORD + 256;
const HEADER: usize = 5;
/// What a record has beside its plaintext: header, type, tag.
pub(crate) const OVERHEAD: usize = HEADER + 1 + MAX_TAG_LEN;
/// Records that AES-GCM may seal with one key (section 5.5; rustls has the same bound).
const AES_LIMIT: u64 = 1 << 24;
/// The type and length of a handshake message KeyUpdate (section 4.6.3); its one byte requests an update in return, or does not.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

/// Types of content (appendix B.1).
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;

/// The two suites of this project (`identity.rs`), both with SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Suite {
    /// TLS_AES_128_GCM_SHA256.
    Aes128Gcm,
    /// TLS_CHACHA20_POLY1305_SHA256.
    Chacha20Poly1305,
}

impl Suite {
    fn algorithm(self) -> &'static Algorithm {
        match self {
            Suite::Aes128Gcm => &AES_128_GCM,
            Suite::Chacha20Poly1305 => &CHACHA20_POLY1305,
        }
    }

    fn limit(self) -> u64 {
        match self {
            Suite::Aes128Gcm => AES_LIMIT,
            // More than there are sequence numbers.
            Suite::Chacha20Poly1305 => u64::MAX,
        }
    }
}

/// A traffic secret of one direction, and the number of the next record.
#[derive(Clone, Serialize, Deserialize)]
pub struct Traffic {
    pub(crate) secret: Zeroizing<Vec<u8>>,
    pub(crate) sequence: u64,
}

impl std::fmt::Debug for Traffic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traffic").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// Key and nonce of a traffic secret.
pub(crate) struct Derived {
    pub key: Zeroizing<Vec<u8>>,
    pub iv: [u8; NONCE_LEN],
}

/// HKDF-Expand-Label with an empty context (section 7.1).
fn expand(secret: &[u8], label: &str, out: &mut [u8]) {
    struct Length(usize);
    impl hkdf::KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    let length = (out.len() as u16).to_be_bytes();
    let label_length = [b"tls13 ".len() as u8 + label.len() as u8];
    let info: [&[u8]; 5] = [&length, &label_length, b"tls13 ", label.as_bytes(), &[0]];
    let prk = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret);
    // It fails for outputs longer than 255 hashes only.
    prk.expand(&info, Length(out.len())).and_then(|okm| okm.fill(out)).expect("the output is short");
}

pub(crate) fn derive(suite: Suite, secret: &[u8]) -> Derived {
    let mut key = Zeroizing::new(vec![0; suite.algorithm().key_len()]);
    expand(secret, "key", &mut key);
    let mut iv = [0; NONCE_LEN];
    expand(secret, "iv", &mut iv);
    Derived { key, iv }
}

/// One direction.
struct Half {
    suite: Suite,
    traffic: Traffic,
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
}

impl Half {
    fn new(suite: Suite, traffic: Traffic) -> Result<Self, Error> {
        let Derived { key, iv } = derive(suite, &traffic.secret);
        let key = UnboundKey::new(suite.algorithm(), &key).map_err(|_| Error::General("no key".to_owned()))?;
        Ok(Self { suite, traffic, key: LessSafeKey::new(key), iv })
    }

    /// The nonce of the next record (section 5.3).
    fn nonce(&mut self) -> Result<Nonce, Error> {
        let mut nonce = self.iv;
        for (byte, of_sequence) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.traffic.sequence.to_be_bytes()) {
            *byte ^= of_sequence;
        }
        self.traffic.sequence = self.traffic.sequence.checked_add(1).ok_or(Error::EncryptError)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// The next key (section 7.2).
    fn renew(&mut self) -> Result<(), Error> {
        let mut secret = Zeroizing::new(vec![0; self.traffic.secret.len()]);
        expand(&self.traffic.secret, "traffic upd", &mut secret);
        *self = Self::new(self.suite, Traffic { secret, sequence: 0 })?;
        Ok(())
    }
}

fn unexpected(what: &str) -> Error {
    Error::General(format!("the peer sent {what}"))
}

/// Bytes for the wire.
pub(crate) struct Outgoing {
    pub bytes: Vec<u8>,
    pub len: usize,
}

/// What a record came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Something was done; go on.
    Progress,
    /// Plaintext was put into the destination (this many bytes) and, beyond its end, into the overflow.
    Data(usize),
    /// There is no whole record.
    Idle,
    /// The peer has ended the link in good order.
    PeerClosed,
}

/// Seals and opens the records of a link.
pub(crate) struct Records {
    sending: Half,
    receiving: Half,
    /// Records that one key may seal.
    limit: u64,
    /// The peer has renewed its key and requested the same of us.
    update_requested: bool,
    peer_closed: bool,
}

impl Records {
    pub fn new(suite: Suite, sending: Traffic, receiving: Traffic) -> Result<Self, Error> {
        let (sending, receiving) = (Half::new(suite, sending)?, Half::new(suite, receiving)?);
        Ok(Self { sending, receiving, limit: suite.limit(), update_requested: false, peer_closed: false })
    }

    /// Lets a key seal so many records only.
    #[cfg(test)]
    pub fn limit(&mut self, records: u64) {
        self.limit = records;
    }

    /// How often the keys were renewed cannot be told from outside; this is the number of the next record to send.
    #[cfg(test)]
    pub fn next_to_send(&self) -> u64 {
        self.sending.traffic.sequence
    }

    /// Seals data of any length behind what is in `out`.
    pub fn seal(&mut self, data: &[u8], out: &mut Outgoing) -> Result<(), Error> {
        for piece in data.chunks(RECORD) {
            if self.update_requested || self.sending.traffic.sequence >= self.limit {
                // An update of ours in answer to the peer's requests none in return, else there would be no end.
                self.update(!self.update_requested, out)?;
            }
            self.record(DATA, piece, out)?;
        }
        Ok(())
    }

    /// Seals the notification that nothing more will be sent.
    pub fn close(&mut self, out: &mut Outgoing) -> Result<(), Error> {
        const WARNING: u8 = 1;
        self.record(ALERT, &[WARNING, AlertDescription::CloseNotify.into()], out)
    }

    fn update(&mut self, request: bool, out: &mut Outgoing) -> Result<(), Error> {
        let [kind, length @ ..] = KEY_UPDATE;
        self.record(HANDSHAKE, &[kind, length[0], length[1], length[2], u8::from(request)], out)?;
        self.update_requested = false;
        self.sending.renew()
    }

    fn record(&mut self, kind: u8, data: &[u8], out: &mut Outgoing) -> Result<(), Error> {
        let (start, sealed) = (out.len, data.len() + 1 + MAX_TAG_LEN);
        let end = start + HEADER + sealed;
        if out.bytes.len() < end {
            out.bytes.resize(end, 0);
        }
        let (header, body) = out.bytes[start..end].split_at_mut(HEADER);
        header.copy_from_slice(&[DATA, 3, 3, (sealed >> 8) as u8, sealed as u8]);
        let (content, tag) = body.split_at_mut(data.len() + 1);
        content[..data.len()].copy_from_slice(data);
        content[data.len()] = kind;
        let nonce = self.sending.nonce()?;
        let made = self.sending.key.seal_in_place_separate_tag(nonce, Aad::from(&*header), content);
        tag.copy_from_slice(made.map_err(|_| Error::EncryptError)?.as_ref());
        out.len = end;
        Ok(())
    }

    /// Opens at most one record at the beginning of `incoming`; returns how many of its first bytes are done with.
    pub fn open(&mut self, incoming: &mut [u8], to: &mut [u8], overflow: &mut Vec<u8>) -> Result<(usize, Step), Error> {
        if self.peer_closed {
            return Ok((incoming.len(), Step::PeerClosed));
        }
        let Some((header, rest)) = incoming.split_first_chunk_mut::<HEADER>() else { return Ok((0, Step::Idle)) };
        let [kind, major, _, length @ ..] = *header;
        let length = usize::from(u16::from_be_bytes(length));
        // Everything is sealed after the handshake; the type and version outside are always these.
        if kind != DATA || major != 3 || length > SEALED {
            return Err(Error::DecryptError);
        }
        let Some(sealed) = rest.get_mut(..length) else { return Ok((0, Step::Idle)) };
        let nonce = self.receiving.nonce()?;
        let opened = self.receiving.key.open_in_place(nonce, Aad::from(&*header), sealed);
        let opened = opened.map_err(|_| Error::DecryptError)?;
        let last = opened.iter().rposition(|byte| *byte != 0);
        let (content, kind) = match last {
            Some(last) if last <= RECORD => (&opened[..last], opened[last]),
            Some(_) => return Err(Error::PeerSentOversizedRecord),
            None => return Err(unexpected("a record without a type")),
        };
        let step = match kind {
            DATA => {
                let direct = if overflow.is_empty() { content.len().min(to.len()) } else { 0 };
                to[..direct].copy_from_slice(&content[..direct]);
                overflow.extend_from_slice(&content[direct..]);
                Step::Data(direct)
            }
            ALERT => match *content {
                [_, alert] => self.alert(alert.into())?,
                _ => return Err(unexpected("an alert of another length")),
            },
            HANDSHAKE => self.handshake_message(content)?,
            _ => return Err(unexpected("a record of another type")),
        };
        Ok((HEADER + length, step))
    }

    fn alert(&mut self, alert: AlertDescription) -> Result<Step, Error> {
        match alert {
            AlertDescription::CloseNotify => {
                self.peer_closed = true;
                Ok(Step::PeerClosed)
            }
            // It only goes before a close notification (section 6.1).
            AlertDescription::UserCanceled => Ok(Step::Progress),
            other => Err(Error::AlertReceived(other)),
        }
    }

    /// Sessions are never resumed, so that the only message there can be renews a key.
    fn handshake_message(&mut self, message: &[u8]) -> Result<Step, Error> {
        match message.strip_prefix(&KEY_UPDATE) {
            Some([request @ 0..=1]) => {
                self.receiving.renew()?;
                self.update_requested |= *request == 1;
                Ok(Step::Progress)
            }
            _ => Err(unexpected("a handshake message after the handshake")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Records, Records) {
        let traffic = |byte: u8| Traffic { secret: Zeroizing::new(vec![byte; 32]), sequence: 0 };
        let suite = Suite::Chacha20Poly1305;
        let one = Records::new(suite, traffic(1), traffic(2)).unwrap();
        (one, Records::new(suite, traffic(2), traffic(1)).unwrap())
    }

    fn sealed(from: &mut Records, kind: u8, data: &[u8]) -> Vec<u8> {
        let mut out = Outgoing { bytes: Vec::new(), len: 0 };
        from.record(kind, data, &mut out).unwrap();
        out.bytes.truncate(out.len);
        out.bytes
    }

    /// What opening it comes to, with the plaintext.
    fn opened(by: &mut Records, mut bytes: Vec<u8>) -> Result<(Step, Vec<u8>), Error> {
        let mut plain = Vec::new();
        let (done, step) = by.open(&mut bytes, &mut [], &mut plain)?;
        assert_eq!(done, if step == Step::Idle { 0 } else { bytes.len() });
        Ok((step, plain))
    }

    #[test]
    fn keys_are_those_of_the_example_in_rfc_8448() {
        let bytes = |hex: &str| -> Vec<u8> {
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
        };
        // Section 3, the server's application traffic.
        let secret = bytes("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643");
        let Derived { key, iv } = derive(Suite::Aes128Gcm, &secret);
        assert_eq!(*key, bytes("9f02283b6c9c07efc26bb9f2ac92e356"));
        assert_eq!(iv.to_vec(), bytes("cf782b88dd83549aadf1e984"));
    }

    #[test]
    fn a_record_is_opened_once_whole_and_unchanged() {
        for length in [0, 1, 100] {
            let (mut a, mut b) = pair();
            let data = vec![7; length];
            let record = sealed(&mut a, DATA, &data);
            for part in 0..record.len() {
                assert_eq!(opened(&mut b, record[..part].to_vec()), Ok((Step::Idle, vec![])), "{part}");
            }
            for bit in 0..record.len() * 8 {
                let mut changed = record.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                // A length that became greater has it wait for more.
                let (_, mut b) = pair();
                assert!(matches!(opened(&mut b, changed), Err(_) | Ok((Step::Idle, _))), "{bit}");
            }
            assert_eq!(opened(&mut b, record.clone()), Ok((Step::Data(0), data)));
            assert_eq!(opened(&mut b, record), Err(Error::DecryptError), "again");
        }
    }

    #[test]
    fn lengths_and_types_that_cannot_be_are_refused() {
        let refused = |kind: u8, data: &[u8]| {
            let (mut a, mut b) = pair();
            let record = sealed(&mut a, kind, data);
            opened(&mut b, record).unwrap_err()
        };
        assert_eq!(refused(DATA, &vec![7; RECORD + 1]), Error::PeerSentOversizedRecord);
        // More padding than there may be; none of it is content.
        assert_eq!(refused(0, &vec![0; RECORD + 300]), Error::DecryptError);
        refused(0, &[0; 10]);
        refused(20, &[1]);
        refused(24, &[1]);
        refused(ALERT, &[1]);
        refused(ALERT, &[1, 0, 0]);
        // A session ticket, a key update in two records, one with more behind it, and one that requests what is not known.
        refused(HANDSHAKE, &[4, 0, 0, 1, 0]);
        refused(HANDSHAKE, &[24, 0]);
        refused(HANDSHAKE, &[24, 0, 0, 1, 0, 24, 0, 0, 1, 0]);
        refused(HANDSHAKE, &[24, 0, 0, 1, 2]);
        let alert = refused(ALERT, &[2, 48]);
        assert_eq!(alert, Error::AlertReceived(AlertDescription::UnknownCA));
        // What is not sealed.
        let (_, mut b) = pair();
        opened(&mut b, vec![ALERT, 3, 3, 0, 2, 1, 0]).unwrap_err();
    }

    #[test]
    fn nothing_comes_behind_the_end() {
        let (mut a, mut b) = pair();
        let (end, more) = (sealed(&mut a, ALERT, &[1, 0]), sealed(&mut a, DATA, &[7]));
        assert_eq!(opened(&mut b, end), Ok((Step::PeerClosed, vec![])));
        assert_eq!(opened(&mut b, more), Ok((Step::PeerClosed, vec![])));
    }

    #[test]
    fn an_update_that_is_requested_is_made_with_the_next_data_and_requests_none() {
        let (mut a, mut b) = pair();
        let update = sealed(&mut a, HANDSHAKE, &[24, 0, 0, 1, 1]);
        a.sending.renew().unwrap();
        assert_eq!(opened(&mut b, update), Ok((Step::Progress, vec![])));
        let mut out = Outgoing { bytes: Vec::new(), len: 0 };
        b.seal(&[1, 2, 3], &mut out).unwrap();
        let (mut plain, mut at) = (Vec::new(), 0);
        while at < out.len {
            at += a.open(&mut out.bytes[at..out.len], &mut [], &mut plain).unwrap().0;
        }
        assert_eq!((plain, a.update_requested), (vec![1, 2, 3], false));
        let data = sealed(&mut a, DATA, &[4]);
        assert_eq!(opened(&mut b, data), Ok((Step::Data(0), vec![4])));
    }
}
