//! Transparent huge pages: what was in huge pages on the source is put into huge pages on the destination.
//!
//! Pages are put in place one by one by userfaultfd, so that a restored task has small ones only, and pays for it with misses of the
//! TLB. When the last one is in place, and nobody waits for anything, they are joined: [`make_anew`]. What is to be joined is what was joined on the
//! source before its pages were watched, since to write to a watched page splits a huge one.

use std::io;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use tranship_sys::huge::{self, Collapser, HUGE_PAGE};
use tranship_sys::pagemap::Pagemap;
use tranship_types::{HugePages, HugeReport, PAGE_SIZE, PageRange};
use tranship_wire::USER_ADDRESS_END;

use crate::survey::{Space, survey};

/// Runs in one list: it travels in a message of 1 MiB at most.
const MOST_RUNS: usize = 20_000;
/// Huge pages that are made at most: 1 TiB.
pub const MOST: u64 = 1 << 19;
/// Part of the time that is taken for it: meanwhile the task can neither change its mappings nor have pages supplied.
const SHARE: u32 = 10;

/// The huge pages that processes have, given by their pids on this node. None where the kernel does not tell (before 6.7).
pub fn find(pids: &[u32]) -> Vec<HugePages> {
    let mut found = Vec::new();
    // A process that ends meanwhile has none.
    for space in pids.iter().flat_map(|pid| survey(&[*pid]).unwrap_or_default()) {
        let mut runs = Vec::new();
        if let Ok(pagemap) = Pagemap::open(space.pid) {
            for range in &space.ranges {
                let whole = |start: u64, end: u64| (start.div_ceil(HUGE_PAGE), end / HUGE_PAGE);
                let _ = pagemap.huge(range.start, range.end, |start, end| match whole(start, end) {
                    (first, end) if first < end => runs.push((first, end - first)),
                    _ => {}
                });
            }
        }
        found.extend(runs.chunks(MOST_RUNS).map(|runs| HugePages { space: space.id, runs: runs.to_vec() }));
    }
    found
}

/// Takes what a peer says into a list, up to [`MOST`] in all; what cannot be is left out.
pub fn take_in(list: &mut Vec<HugePages>, said: HugePages) {
    let HugePages { space, runs } = said;
    let mut room = MOST.saturating_sub(count(list));
    let mut believable = Vec::new();
    for (first, count) in runs {
        let end = first.checked_add(count).filter(|end| *end <= USER_ADDRESS_END / HUGE_PAGE);
        if let Some(left) = room.checked_sub(count).filter(|_| count > 0 && end.is_some()) {
            room = left;
            believable.push((first, count));
        }
    }
    if !believable.is_empty() {
        list.push(HugePages { space, runs: believable });
    }
}

fn count(list: &[HugePages]) -> u64 {
    list.iter().flat_map(|pages| &pages.runs).map(|(_, count)| count).sum()
}

/// Makes huge pages in processes, given by their pids on this node, where `list` says that there were some. A task that has
/// moved or given back its memory since gets none there; nor does anybody where the administrator wants none. It takes a tenth of the
/// time only: after each one `pause` is called with how long to wait, and says whether to go on.
pub fn make_anew(list: &[HugePages], pids: &[u32], pause: impl Fn(Duration) -> bool) -> HugeReport {
    let mut report = HugeReport { found: count(list), restored: 0 };
    if huge::are_unwanted() {
        return report;
    }
    let spaces: Vec<Space> = pids.iter().flat_map(|pid| survey(&[*pid]).unwrap_or_default()).collect();
    for HugePages { space, runs } in list {
        let Some(space) = spaces.iter().find(|candidate| candidate.id == *space) else { continue };
        let Ok(collapser) = Collapser::of(space.pid) else { continue };
        for number in runs.iter().flat_map(|(first, count)| *first..first + count) {
            let start = Instant::now();
            match make_one(space, &collapser, number * HUGE_PAGE) {
                Ok(made) => report.restored += u64::from(made),
                Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => break,
                // One that cannot be made now is left as it is.
                Err(_) => {}
            }
            if !pause(start.elapsed() * (SHARE - 1)) {
                return report;
            }
        }
    }
    report
}

/// False: there is too little left of it.
fn make_one(space: &Space, collapser: &Collapser, address: u64) -> io::Result<bool> {
    let range = PageRange { start: address, end: address + HUGE_PAGE };
    if !space.ranges.iter().any(|mapping| mapping.intersection(&range) == Some(range)) {
        return Ok(false);
    }
    // Joining takes memory also for what is not there: pages of zeros, or such as the task has given back since.
    let mut there = 0;
    Pagemap::open(space.pid)?.populated(range.start, range.end, |start, end| there += (end - start) / PAGE_SIZE)?;
    if there < range.pages() / 2 {
        return Ok(false);
    }
    collapser.collapse(address)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::AddressSpaceId;

    const SPACE: AddressSpaceId = AddressSpaceId(1);

    #[test]
    fn small_pages_become_huge_ones_where_enough_is_there_and_keep_their_content() {
        if huge::are_unwanted() {
            return println!("skipped: transparent huge pages are switched off here");
        }
        let (pid, huge) = (std::process::id(), HUGE_PAGE as usize);
        let mut memory = vec![0u8; 5 * huge];
        let start = (memory.as_ptr() as u64).next_multiple_of(HUGE_PAGE);
        let skip = (start - memory.as_ptr() as u64) as usize;
        // The first two are there as a whole, the third as a page, the fourth not at all.
        for (at, byte) in memory[skip..skip + 2 * huge + 1].iter_mut().enumerate() {
            *byte = (at / 4096) as u8 | 1;
        }
        let own = survey(&[pid]).unwrap().remove(0).id;
        let first = start / HUGE_PAGE;
        let ours = |found: Vec<HugePages>| -> u64 {
            let numbers =
                found.into_iter().flat_map(|pages| pages.runs).flat_map(|(first, count)| first..first + count);
            numbers.filter(|number| (first..first + 4).contains(number)).count() as u64
        };
        let before = ours(find(&[pid]));
        let report = make_anew(&[HugePages { space: own, runs: vec![(first, 4)] }], &[pid], |_| true);
        assert_eq!(report, HugeReport { found: 4, restored: 2 });
        assert_eq!((before, ours(find(&[pid]))), (0, 2));
        let right = |(at, byte): (usize, &u8)| *byte == (at / 4096) as u8 | 1;
        assert!(memory[skip..skip + 2 * huge + 1].iter().enumerate().all(right));
    }

    #[test]
    fn what_a_peer_says_is_bounded() {
        let mut list = Vec::new();
        let mut say = |runs: &[(u64, u64)]| {
            take_in(&mut list, HugePages { space: SPACE, runs: runs.to_vec() });
            count(&list)
        };
        assert_eq!(say(&[(u64::MAX, 1), (1, u64::MAX), (USER_ADDRESS_END / HUGE_PAGE, 1), (7, 0)]), 0);
        assert_eq!(say(&[(7, 3), (100, 1)]), 4);
        assert_eq!(say(&[(1000, MOST - 4), (5, 1)]), MOST);
        assert_eq!(say(&[(5, 1)]), MOST);
    }
}
