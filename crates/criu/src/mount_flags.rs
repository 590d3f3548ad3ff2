//! Options of mounts that CRIU drops. Of a mount that the engine binds into the container, and whose directory is mounted elsewhere in it, too, CRIU makes a
//! bind mount without the options of its own: a directory that was read-only can be written to (crun masks directories in this way, all with one
//! directory of the node).

use std::collections::HashMap;
use std::io;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use tranship_sys::mount::{Restrictions, inside, restrict};
use tranship_sys::process::text;

use crate::images::restrictions;
use crate::preflight::Mount;

/// Gives the mounts of a restored container, whose first process is `init` and is held, the options that they have in the images. Returns how many lacked
/// some.
///
/// # Errors
/// The images cannot be read; the system's.
pub fn put_right(images: &Path, init: u32) -> io::Result<usize> {
    let expected = restrictions(images)?;
    let restored = Mount::parse_all(&text(format!("/proc/{init}/mountinfo"))?);
    let lacking = lacking(&expected, &restored);
    if lacking.is_empty() {
        return Ok(0);
    }
    inside(init, || lacking.iter().try_for_each(|(mount, missing)| give(mount, *missing)))?;
    Ok(lacking.len())
}

/// The restored mounts that lack options. Where several mounts are at one place, each gets what all of them had.
fn lacking<'a>(expected: &[(String, Restrictions)], restored: &'a [Mount]) -> Vec<(&'a Mount, Restrictions)> {
    let mut of_places: HashMap<&str, Restrictions> = HashMap::new();
    for (place, restrictions) in expected {
        of_places.entry(place).and_modify(|all| *all = all.common(*restrictions)).or_insert(*restrictions);
    }
    let missing = |mount: &'a Mount| {
        let had = of_places.get(mount.point.as_str())?;
        let missing = had.without(Restrictions::of_options(&mount.options));
        (!missing.is_empty()).then_some((mount, missing))
    };
    restored.iter().filter_map(missing).collect()
}

/// In the container's mount namespace.
fn give(mount: &Mount, missing: Restrictions) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let told = |error: io::Error| io::Error::new(error.kind(), format!("the mount at {}: {error}", mount.point));
    let open = || -> io::Result<_> {
        let found = openat2(CWD, &mount.place, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
        let is = statx(&found, "", rustix::fs::AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
        Ok((found, is.stx_mnt_id))
    };
    match open() {
        Ok((found, id)) if id == u64::from(mount.id) => {
            restrict(std::os::fd::AsFd::as_fd(&found), missing).map_err(told)
        }
        // Another mount hides it from every program.
        Ok(_) => Ok(()),
        Err(error) => Err(told(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(lines: &[(&str, &str)]) -> Vec<Mount> {
        let line = |(number, (point, options)): (usize, &(&str, &str))| {
            format!("{} 1 0:5 / {point} {options} - tmpfs none rw\n", number + 10)
        };
        Mount::parse_all(&lines.iter().enumerate().map(line).collect::<String>())
    }

    #[test]
    fn mounts_lack_what_they_had_before() {
        let had = |options: &str| Restrictions::of_options(options);
        let expected = [
            ("/".to_owned(), had("rw")),
            ("/a".to_owned(), had("ro,nosuid,relatime")),
            ("/b".to_owned(), had("rw,noexec")),
            ("/twice".to_owned(), had("ro,nodev")),
            ("/twice".to_owned(), had("ro")),
        ];
        let restored =
            mounts(&[("/", "rw"), ("/a", "rw,nosuid"), ("/b", "rw,noexec"), ("/twice", "rw"), ("/more", "rw")]);
        let found: Vec<_> =
            lacking(&expected, &restored).into_iter().map(|(mount, missing)| (mount.point.as_str(), missing)).collect();
        assert_eq!(found, [("/a", had("ro")), ("/twice", had("ro"))]);
    }
}
