//! How much is asked for at the source with a page that a thread waits for.

use std::collections::VecDeque;

use tranship_types::{PAGE_SIZE, PageRange};

/// Bytes asked for where a thread goes on beside what was asked for before: more would keep the next one waiting.
pub(super) const WANT_BESIDE: u64 = 8 * PAGE_SIZE;
/// And elsewhere. Over a slow link the next page that somebody waits for comes behind these.
const WANT_ELSEWHERE: u64 = 2 * PAGE_SIZE;
/// How far away is still beside: what nobody waits for comes meanwhile, and is passed.
const BESIDE: u64 = 64 * PAGE_SIZE;
/// Places that are remembered: as many as there may be threads that go on.
const PLACES: usize = 16;

/// Tells threads that go through memory, which will soon want the pages that follow, from those that want one here and one there.
#[derive(Debug, Default)]
pub(super) struct Around {
    /// Where what was asked for ends; the latest at the end.
    asked: VecDeque<u64>,
}

impl Around {
    /// How much of these missing pages, of which a thread waits for the first, is to be asked for.
    pub fn wanted(&mut self, missing: PageRange) -> PageRange {
        let start = missing.start;
        let before = self.asked.iter().position(|asked| asked.abs_diff(start) < BESIDE);
        let window = if before.is_some() { WANT_BESIDE } else { WANT_ELSEWHERE };
        let end = missing.end.min(start + window);
        if let Some(place) = before.or((self.asked.len() == PLACES).then_some(0)) {
            self.asked.remove(place);
        }
        self.asked.push_back(end);
        PageRange { start, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many pages are asked for where all from this one on are missing.
    fn pages(around: &mut Around, page: u64) -> u64 {
        let missing = PageRange { start: page * PAGE_SIZE, end: (page + 8) * PAGE_SIZE };
        let wanted = around.wanted(missing);
        assert_eq!(wanted.start, missing.start);
        wanted.pages()
    }

    #[test]
    fn threads_that_go_on_get_more_than_those_that_want_a_page_here_and_there() {
        let mut around = Around::default();
        let mut at: Vec<u64> = (0..PLACES as u64).map(|thread| 10_000 * thread).collect();
        at.iter_mut().for_each(|page| *page += pages(&mut around, *page));
        assert_eq!(at[1], 10_002);
        for _ in 0..10 {
            at.iter_mut().for_each(|page| *page += pages(&mut around, *page));
        }
        assert!(at.iter().enumerate().all(|(thread, page)| *page == 10_000 * thread as u64 + 82), "{at:?}");
        // Another one: it takes the place of what was longest ago.
        assert!((1..10).all(|page| pages(&mut around, page * 1_000_000) == 2));
        assert_eq!((pages(&mut around, at[0]), pages(&mut around, at[15])), (2, 8));
    }

    #[test]
    fn no_more_is_asked_for_than_is_missing() {
        let mut around = Around::default();
        let page = |start: u64| PageRange { start, end: start + PAGE_SIZE };
        assert_eq!(around.wanted(page(0)), page(0));
        assert_eq!(around.wanted(page(PAGE_SIZE)), page(PAGE_SIZE));
    }
}
