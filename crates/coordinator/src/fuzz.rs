//! Parsers of this crate for the fuzz targets (`fuzz/`). They panic where an invariant does not hold. Not an interface for other programs.

pub use crate::journal::fuzz as journal;
