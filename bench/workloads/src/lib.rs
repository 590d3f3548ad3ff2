//! What the programs have in common that the benchmarks move.
//!
//! `bench-writer` rewrites a large memory, or a large file, at a given rate, `bench-stencil` computes, and both answer clients by Redis's
//! protocol, so that the same client can watch them that watches a Redis: it counts, and sees every gap. `bench-setter`
//! is a client: it keeps a Redis busy and knows what it must contain. `bench-traffic` is the server of numbered traffic
//! ([`traffic`]).

mod file;
mod memory;
mod service;
mod stencil;
pub mod traffic;

pub use file::FilePages;
pub use memory::{Pages, Rewritten};
pub use service::{Answer, PORT, Service, serve};
pub use stencil::Stencil;
