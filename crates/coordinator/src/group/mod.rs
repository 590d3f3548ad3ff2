//! Several containers as one unit: in which order they move, and which of their stages may overlap. Pure: it is asked, and
//! told what has happened; who asks does the waiting.

mod order;
mod schedule;

pub use order::{OrderError, Ranked, in_levels, rank};
pub use schedule::{Answer, Limits, Schedule, Stage};
