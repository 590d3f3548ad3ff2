//! Which processors there are.

use std::io;

/// The list of processors that are there now.
///
/// # Errors
/// The kernel does not tell.
pub fn online() -> io::Result<String> {
    std::fs::read_to_string("/sys/devices/system/cpu/online")
}

/// The processors of a list as the kernel writes it: `0-3,8`.
pub fn listed(list: &str) -> Vec<i32> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<i32>().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(listed("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(listed("0\n"), [0]);
    }
}
