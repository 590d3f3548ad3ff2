//! The content of a container's tmpfs mounts: copied ahead while the container runs, and what has changed since in the freeze.
//!
//! ```text
//!  source                                          destination
//!  find ───────── the mounts, in the offer ──────▶ make: one tmpfs for each, below the migration's directory
//!  Source::open   (each tree cloned, watched)
//!  Source::pass ═ operations and content ════════▶ Replica::apply    while the container runs, as often as it pays
//!  ── freeze ──
//!  Source::decide (which mounts CRIU leaves alone)
//!  Source::pass ═ what has changed since ════════▶ Replica::apply, Replica::finish, then criu binds it into the container
//! ```
//!
//! What the freeze costs grows with the files that are being written, and not with those that are there: see [`crate::copy`].
//!
//! **What cannot be done so** stays with CRIU, which makes an archive of the mount in the freeze: mounts that propagate, with
//! options that are not known here, changed while the container was on its way; see [`find`] and [`Source::decide`].

mod find;
mod make;
mod source;

pub use find::{Options, TmpfsMount, find};
pub use make::make;
pub use source::{Decision, Renamed, Source};

/// Most files in one mount; one with more stays with CRIU. Each costs the agent a few hundred bytes.
pub const MAX_FILES: usize = 100_000;

/// For the fuzz targets: the mounts that a table has.
pub(crate) fn fuzz(table: &str) -> Vec<TmpfsMount> {
    let found = find::candidates(table, &["/dev/shm".into()]);
    fuzz_options(&found);
    found
}

/// For the fuzz targets: how they would be mounted.
pub(crate) fn fuzz_options(mounts: &[TmpfsMount]) {
    for options in mounts.iter().map(|mount| &mount.options).filter(|options| options.are_known()) {
        let mounted = [options.limits(), options.roomy()];
        assert!(mounted.iter().all(|text| text.chars().all(|c| c.is_ascii_alphanumeric() || "_=,".contains(c))));
    }
}
