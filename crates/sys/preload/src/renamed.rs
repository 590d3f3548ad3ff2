//! Files that are open or mapped by a name that is gone, while they have another one: sem_open(3) writes a file, links
//! it to its name and removes the one that it had. In a dump criu makes a name of its own for such a file
//! (`dump_linked_remap` of files-reg.c), which the copy of the filesystem has not got. So it is told a name that the
//! file has, from the list that the agent has written beside the table of hidden pages, with `.renamed` appended.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::OnceLock;

use crate::{Open, texts};

fn names() -> &'static HashMap<(u64, u64), Vec<u8>> {
    static NAMES: OnceLock<HashMap<(u64, u64), Vec<u8>>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let Some(mut path) = std::env::var_os("TRANSHIP_HIDDEN") else { return HashMap::new() };
        path.push(".renamed");
        std::fs::read(path).map(|bytes| texts::renamed(&bytes)).unwrap_or_default()
    })
}

/// A name of the file behind a descriptor of criu's, whose name for the kernel is gone.
pub(super) fn name(fd: c_int) -> Option<Vec<u8>> {
    if names().is_empty() {
        return None;
    }
    let open = Open::of(fd)?;
    names().get(&(open.device, open.inode)).cloned()
}
