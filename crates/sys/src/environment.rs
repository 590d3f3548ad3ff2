//! This process's environment.

/// Takes variables out of the environment, so that no program inherits them that is started from now on; returns their
/// values, in order.
///
/// # Panics
/// If there is another thread, which could read the environment at the same time.
pub fn take<const N: usize>(names: [&str; N]) -> [Option<std::ffi::OsString>; N] {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    assert_eq!(threads, 1, "the environment is changed before any thread is started");
    names.map(|name| {
        let value = std::env::var_os(name);
        // SAFETY: there is no other thread, as was just seen.
        unsafe { std::env::remove_var(name) };
        value
    })
}
