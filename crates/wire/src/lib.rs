//! The protocol between agents: frames, version negotiation, limits.
//!
//! Parsing and checking are sans-I/O ([`FrameHeader`], [`Hello`], [`Welcome`], [`negotiate`]); thin functions over
//! [`std::io`] carry them over any byte stream. Everything that arrives is taken for hostile: a length is checked against
//! its limit before anything is allocated for it, and no input makes this crate panic.
//!
//! ```text
//! dialling agent                         listening agent
//!    │ ── Hello (versions, purpose, …) ──▶ │
//!    │ ◀── Welcome (version) or refusal ── │
//!    │ ══ frames: 24-byte header, payload ═│   Control: Message both ways, Ping/Pong
//!    │                                     │   Pages:   Pages, Packed, Zero, Same; Later and Named; the first three again; End
//!    │                                     │   Wants:   Want and Named, from the listener
//!    │                                     │   Files:   Message and FileData, the other way Message
//! ```

mod error;
mod file;
mod frame;
mod hello;
mod io;
pub mod message;
pub mod packed;
pub mod runs;

pub use error::{FileError, ReadError, WireError, WriteError};
pub use file::{FileBegin, MAX_FILE, receive_file, receive_file_after, send_file};
pub use frame::{
    FrameHeader, HEADER_LEN, Kind, MAX_FILE_BEGIN, MAX_FILE_DATA, MAX_MESSAGE, MAX_PAGES, MAX_RUNS, USER_ADDRESS_END,
};
pub use hello::{
    HELLO_PREFIX_LEN, Hello, MAGIC, MAX_HELLO, Purpose, Refusal, RefusalKind, URGENT_STREAM, Versions, Welcome,
    greeting_body_len, negotiate, read_hello, read_welcome, write_hello, write_welcome,
};
pub use io::{
    queue_message, read_end, read_header, read_message, read_message_after, write_end, write_file_data, write_header,
    write_message, write_packed, write_pages, write_ping, write_pong, write_same, write_zero,
};
pub use packed::Codec;
