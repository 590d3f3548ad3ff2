//! Wrappers over the kernel interfaces that Tranship needs. The only crate with `unsafe` code of its own, beside the preloaded
//! library in `preload/`, which cannot be anything else; the contracts are listed in `docs/decisions/unsafe.md`.
//!
//! Each `unsafe` block names the invariant that makes it sound; ioctl numbers and the sizes of kernel structures are
//! asserted at compile time.

pub mod arena;
pub mod awake;
mod bpf;
pub mod breakpoints;
mod btf;
pub mod call_log;
pub mod charge;
pub mod clock;
pub mod descriptor;
pub mod directory;
pub mod dirty_log;
pub mod environment;
pub mod file_handle;
pub mod file_settings;
#[doc(hidden)]
pub mod fuzz;
pub mod guard_log;
pub mod hidden_files;
pub mod hidden_states;
pub mod huge;
pub mod hugetlb;
mod interrupted;
pub mod io_priority;
pub mod journal;
pub mod kcmp;
pub mod keyrings;
pub mod launch;
pub mod mapping_flags;
pub mod mapping_log;
pub mod message_queue;
pub mod mount;
#[cfg(target_arch = "x86_64")]
mod own_process;
pub mod pacing;
pub mod packet;
pub mod pagemap;
mod perf;
pub mod privileges;
pub mod process;
pub mod processors;
pub mod promise;
#[cfg(target_arch = "x86_64")]
mod remote;
pub mod reserve;
pub mod restart_blocks;
#[cfg(target_arch = "x86_64")]
mod rseq;
pub mod sched_attr;
pub mod schedule;
mod scratch;
pub mod seccomp;
pub mod segment;
pub mod semaphores;
pub mod shared_namespaces;
#[cfg(target_arch = "x86_64")]
mod siblings;
pub mod socket;
pub mod soft_dirty;
pub mod standstill;
mod task_iterator;
pub mod thaw;
pub mod thread_memory;
pub mod threads;
mod tracee;
mod tracepoint;
pub mod unix_socket;
pub mod userfault;
#[cfg(target_arch = "x86_64")]
mod vdso;
#[cfg(target_arch = "x86_64")]
mod waits;
pub mod watch_queue;
pub mod write_log;
pub mod writes;
