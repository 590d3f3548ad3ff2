//! CRIU, the tool that dumps and restores the skeleton: its RPC, the front that stands between an engine and criu, what it
//! cannot carry (preflight), and where a working one is found.

pub mod affinity;
pub mod apparmor;
pub mod cpu;
pub mod file_settings;
pub mod find;
pub mod front;
#[doc(hidden)]
pub mod fuzz;
pub mod hidden;
pub mod images;
pub mod irmap;
pub mod mount_flags;
pub mod preflight;
pub mod rpc;
pub mod settings;
pub mod smaps;
pub mod socket_files;
pub mod timers;
pub mod undo;
pub mod watch_flags;
