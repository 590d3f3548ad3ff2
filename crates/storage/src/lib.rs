//! Files of a container on a node: is a root filesystem the same on both, the content of tmpfs mounts and of directory trees that
//! move with it, and how to clean up without following a mount.
//!
//! A recursive deletion that ran into a mount once deleted a container's whole root filesystem. So nothing here deletes
//! before it knows that nothing is mounted below, and no step of a deletion can enter another mount even if one appears
//! meanwhile.

pub mod carried;
pub mod copy;
mod digest;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod leases;
mod memory;
mod mounts;
pub mod overlay;
mod remove;
mod root;
pub mod tmpfs;

pub use digest::{Subtree, TreeDigest, digest};
pub use error::StorageError;
pub use memory::ensure_tmpfs;
pub use mounts::unmount_below;
pub use remove::remove_tree;
pub use root::Root;
