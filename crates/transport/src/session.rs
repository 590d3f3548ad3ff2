use std::io;

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls_pki_types::CertificateDer;

/// One side of a TLS session over buffers of ours.
///
/// rustls's buffered interface reads from the socket in pieces of 4 KiB and keeps a queue of records on both ways; the
/// unbuffered one lets us read hundreds of KiB at once, decrypt where they lie, and encrypt into one buffer that leaves
/// in one write.
pub(crate) enum Session {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What a step through the incoming bytes came to.
pub(crate) enum Step {
    /// Something was done; go on.
    Progress,
    /// Plaintext was put into the destination (this many bytes) and, beyond its end, into the overflow.
    Data(usize),
    /// Nothing more can be done before more bytes arrive; application data may be sent.
    Idle,
    /// Nothing more can be done before more bytes arrive; the handshake is not finished.
    Blocked,
    /// The peer has ended the session in good order.
    PeerClosed,
}

/// What to do once the session has no more incoming data to handle.
pub(crate) enum Send<'a> {
    Nothing,
    Data(&'a [u8]),
    Close,
}

/// Bytes for the wire.
pub(crate) struct Outgoing {
    pub bytes: Vec<u8>,
    pub len: usize,
}

impl Outgoing {
    fn room(&mut self, needed: usize) -> &mut [u8] {
        if self.bytes.len() - self.len < needed {
            self.bytes.resize(self.len + needed, 0);
        }
        &mut self.bytes[self.len..]
    }
}

impl Session {
    /// Handles at most one record of `incoming`; returns how many of its first bytes are done with.
    /// `sent` tells whether `send` was carried out.
    pub fn step(
        &mut self,
        incoming: &mut [u8],
        to: &mut [u8],
        overflow: &mut Vec<u8>,
        out: &mut Outgoing,
        send: &mut Send<'_>,
    ) -> (usize, Result<Step, rustls::Error>) {
        match self {
            Session::Client(c) => advance(c.process_tls_records(incoming), to, overflow, out, send),
            Session::Server(s) => advance(s.process_tls_records(incoming), to, overflow, out, send),
        }
    }

    pub fn is_handshaking(&self) -> bool {
        match self {
            Session::Client(c) => c.is_handshaking(),
            Session::Server(s) => s.is_handshaking(),
        }
    }

    pub fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Session::Client(c) => c.peer_certificates(),
            Session::Server(s) => s.peer_certificates(),
        }
        .and_then(<[_]>::first)
    }
}

fn advance<D>(
    status: UnbufferedStatus<'_, '_, D>,
    to: &mut [u8],
    overflow: &mut Vec<u8>,
    out: &mut Outgoing,
    send: &mut Send<'_>,
) -> (usize, Result<Step, rustls::Error>) {
    let mut discard = status.discard;
    let state = match status.state {
        Ok(state) => state,
        Err(e) => return (discard, Err(e)),
    };
    let step = match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            let mut done = 0;
            while let Some(record) = traffic.next_record() {
                let record = match record {
                    Ok(record) => record,
                    Err(e) => return (discard, Err(e)),
                };
                discard += record.discard;
                let direct = if overflow.is_empty() { record.payload.len().min(to.len() - done) } else { 0 };
                to[done..done + direct].copy_from_slice(&record.payload[..direct]);
                overflow.extend_from_slice(&record.payload[direct..]);
                done += direct;
            }
            Step::Data(done)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let needed = match data.encode(&mut out.bytes[out.len..]) {
                Ok(n) => {
                    out.len += n;
                    0
                }
                Err(EncodeError::InsufficientSize(e)) => e.required_size,
                Err(EncodeError::AlreadyEncoded) => 0,
            };
            if needed > 0 {
                match data.encode(out.room(needed)) {
                    Ok(n) => out.len += n,
                    Err(e) => return (discard, Err(rustls::Error::General(e.to_string()))),
                }
            }
            Step::Progress
        }
        // What is to be transmitted is in `out`, and whoever waits for the peer sends that first.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Step::Progress
        }
        ConnectionState::BlockedHandshake => Step::Blocked,
        ConnectionState::PeerClosed | ConnectionState::Closed => Step::PeerClosed,
        ConnectionState::WriteTraffic(mut traffic) => {
            loop {
                let result = match send {
                    Send::Nothing => break,
                    Send::Data(data) => traffic.encrypt(data, &mut out.bytes[out.len..]),
                    Send::Close => traffic.queue_close_notify(&mut out.bytes[out.len..]),
                };
                match result {
                    Ok(n) => {
                        out.len += n;
                        *send = Send::Nothing;
                    }
                    Err(EncryptError::InsufficientSize(e)) => {
                        out.room(e.required_size);
                    }
                    Err(EncryptError::EncryptExhausted) => return (discard, Err(rustls::Error::EncryptError)),
                }
            }
            Step::Idle
        }
        // Early data is not enabled; what a later rustls may add is not known to be safe.
        _ => return (discard, Err(rustls::Error::General("an unexpected state of the TLS session".to_owned()))),
    };
    (discard, Ok(step))
}

pub(crate) fn tls_io_error(e: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}
