//! Memory that processes share: anonymous shared mappings, memfds, System V segments.
//!
//! Each such object is one file in the kernel's own tmpfs, whoever maps it or has it open. The source reads it through a
//! descriptor of its own ([`source`]); its pages travel on the page streams like any others, in an address space whose
//! addresses are offsets in the object. The destination writes them to a file of its own ([`target`]), in their final
//! place: when criu makes the object, the preloaded library puts that file in its stead. So nothing of it is read or
//! written in the freeze but what has changed since the last round.
//!
//! ```text
//!   source                                          destination
//!   object ◀─ mapped and open in the container      file ── kept open by the pager, listed in its table
//!     │ find, look: which pages may have changed     ▲ │
//!     │ send: those whose hash differs ─────────────▶┘ └─▶ criu, preloaded: maps it; the restored tasks get it
//! ```
//!
//! **What has changed** is decided by content in the end: the source keeps a hash of each page as it was last sent, and sends
//! a page only if it hashes differently. Which pages are worth hashing is another question, and where nothing better is
//! known the answer is: all of them, which takes 0.1 s or more for a GB. The page tables of the processes that map it tell which
//! pages were written ([`watch`]), unless
//!
//! - it is open, or a segment, and was used since the last look ([`uses`]), or less than 20 ms (a segment: 1 s) before that;
//! - a process that mapped it has forked, or does not map all of it any more: what it or its child wrote is not known;
//! - a process has unmapped, moved or copied a mapping of it, or thrown away pages of it;
//! - a mapping of it was not registered yet at the last look;
//! - the kernel does not tell.

pub mod copies;
mod object;
pub mod source;
pub mod target;
mod uses;
mod watch;

/// For the fuzz targets: reads the text of `/proc/sysvipc/shm`.
#[doc(hidden)]
pub fn fuzz_segments(text: &str) {
    assert!(uses::Uses::listed(text, 0).len() <= text.lines().count());
}

#[cfg(test)]
mod tests;
