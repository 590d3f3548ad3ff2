//! Leases on files (fcntl(2), `F_SETLEASE`), which an open would break.

use std::collections::HashMap;

use crate::copy::Device;

/// Files with a write lease, by device and inode; of each the process that took it. An open for reading breaks such a lease, and the
/// holder is sent a signal, which ends it if it has no handler. A read lease is broken only by who writes.
pub(crate) fn write_leases() -> HashMap<(Device, u64), u32> {
    std::fs::read_to_string("/proc/locks").map(|table| parse(&table)).unwrap_or_default()
}

/// Lines such as `8: LEASE  ACTIVE    WRITE 31962 00:27:3 0 EOF` (proc_locks(5)).
pub(crate) fn parse(table: &str) -> HashMap<(Device, u64), u32> {
    let lease = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        (words.next()? == "LEASE").then_some(())?;
        let (state, kind) = (words.next()?, words.next()?);
        // One that is being broken down to a read lease is shown as that.
        (kind == "WRITE" || state == "BREAKING").then_some(())?;
        let pid = words.next()?.parse().ok()?;
        let mut file = words.next()?.split(':');
        let mut number = || u32::from_str_radix(file.next()?, 16).ok();
        let device = (number()?, number()?);
        Some(((device, file.next()?.parse().ok()?), pid))
    };
    table.lines().filter_map(lease).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn write_leases_are_told_from_other_locks() {
        let table = "1: FLOCK  ADVISORY  WRITE 31885 fe:00:5686437 0 EOF\n\
                     2: LEASE  ACTIVE    WRITE 31962 00:27:3 0 EOF\n\
                     3: LEASE  ACTIVE    READ 5 00:27:4 0 EOF\n\
                     4: LEASE  BREAKING  READ 6 00:2a:5 0 EOF\n";
        assert_eq!(parse(table), HashMap::from([(((0, 0x27), 3), 31962), (((0, 0x2a), 5), 6)]));
    }

    proptest! {
        #[test]
        fn no_table_makes_it_panic(table in "([0-9:A-Z a-f]{0,40}\n){0,4}") {
            parse(&table);
        }
    }
}
