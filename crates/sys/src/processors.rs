//! Which processors there are.

use std::io;

/// The list of processors that are there now.
///
/// # Errors
/// The kernel does not tell.
pub fn online() -> io::Result<String> {
    std::fs::read_to_string("/sys/devices/system/cpu/online")
}

/// More processors than a kernel can be built for (`CONFIG_NR_CPUS`).
const MOST: i32 = 1 << 14;

/// The processors of a list as the kernel writes it: `0-3,8`. Numbers that no kernel has are left out.
pub fn listed(list: &str) -> Vec<i32> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<i32>().ok()?.max(0)..=last.parse::<i32>().ok()?.min(MOST - 1))
    });
    ranges.flatten().take(MOST as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(listed("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(listed("0\n"), [0]);
    }

    #[test]
    fn a_list_cannot_ask_for_more_than_there_can_be() {
        assert_eq!(listed("0-2147483647,0-2147483647").len(), MOST as usize);
        assert!(listed("-5-1").is_empty());
    }
}
