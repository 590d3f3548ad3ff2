use std::io;

/// Words of a page.
pub(crate) const WORDS: usize = 512;

/// Pages that are rewritten one by one, drawn at random, and can be checked.
pub trait Rewritten: Send {
    /// Gives a page its next version.
    ///
    /// # Errors
    /// If the page cannot be read or written.
    fn rewrite_one(&mut self) -> io::Result<()>;

    /// How many pages have been rewritten.
    fn written(&self) -> u64;

    /// How many pages are not what they must be, and by how much the sum of all versions is not what it must be.
    ///
    /// # Errors
    /// If a page cannot be read.
    fn mismatches(&mut self) -> io::Result<(u64, u64)>;
}

/// Draws pages: the same ones in each run.
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// One of so many.
    pub(crate) fn one_of(&mut self, count: usize) -> usize {
        // xorshift64*: its high bits are good.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d));
        ((drawn * count as u128) >> 64) as usize
    }
}

/// A large memory of pages that do not compress and can be checked: each says which version it has, and the rest of it
/// follows from its number and version. A page that has an older version than it should shows in the sum of the versions.
#[derive(Debug)]
pub struct Pages {
    words: Vec<u64>,
    written: u64,
    draw: Draw,
}

impl Pages {
    /// So many pages of 4 KiB, all of version 0.
    pub fn new(count: usize) -> Self {
        let mut pages = Self { words: vec![0; count * WORDS], written: 0, draw: Draw::new() };
        for (number, page) in pages.words.chunks_exact_mut(WORDS).enumerate() {
            fill(page, number as u64, 0);
        }
        pages
    }

    /// How many pages there are.
    pub fn len(&self) -> usize {
        self.words.len() / WORDS
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Gives a page drawn at random its next version.
    pub fn rewrite_one(&mut self) {
        let number = self.draw.one_of(self.len());
        let page = &mut self.words[number * WORDS..][..WORDS];
        let version = page[0] + 1;
        fill(page, number as u64, version);
        self.written += 1;
    }

    /// How many pages have been rewritten.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// How many pages are not what they must be, and by how much the sum of all versions is not what it must be.
    pub fn mismatches(&self) -> (u64, u64) {
        let (mut wrong, mut versions) = (0, 0u64);
        let mut expected = [0; WORDS];
        for (number, page) in self.words.chunks_exact(WORDS).enumerate() {
            fill(&mut expected, number as u64, page[0]);
            wrong += u64::from(page != expected);
            versions = versions.wrapping_add(page[0]);
        }
        (wrong, versions.abs_diff(self.written))
    }
}

impl Rewritten for Pages {
    fn rewrite_one(&mut self) -> io::Result<()> {
        Pages::rewrite_one(self);
        Ok(())
    }

    fn written(&self) -> u64 {
        self.written
    }

    fn mismatches(&mut self) -> io::Result<(u64, u64)> {
        Ok(Pages::mismatches(self))
    }
}

/// Writes a version of a page: words from a counter by a mixing function (as in splitmix64), all different.
pub(crate) fn fill(page: &mut [u64], number: u64, version: u64) {
    let seed = (number << 32).wrapping_add(version).wrapping_mul(0xd6e8_feb8_6659_fd93);
    for (at, word) in page.iter_mut().enumerate() {
        let mut z = seed.wrapping_add((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        *word = z ^ (z >> 27);
    }
    page[0] = version;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewriting_keeps_pages_right() {
        let mut pages = Pages::new(16);
        (0..100).for_each(|_| pages.rewrite_one());
        assert_eq!((pages.written(), pages.mismatches()), (100, (0, 0)));
    }

    #[test]
    fn damage_and_old_versions_are_seen() {
        let mut pages = Pages::new(4);
        (0..10).for_each(|_| pages.rewrite_one());
        pages.words[WORDS + 3] ^= 1;
        assert_eq!(pages.mismatches(), (1, 0));
        pages.words[WORDS + 3] ^= 1;
        let behind = pages.words[0] as i64;
        fill(&mut pages.words[..WORDS], 0, 0);
        assert_eq!(pages.mismatches(), (0, behind.unsigned_abs()));
        assert!(behind > 0, "ten rewrites of four pages reach the first one");
    }

    #[test]
    fn every_page_is_reached() {
        let mut pages = Pages::new(8);
        (0..400).for_each(|_| pages.rewrite_one());
        assert!(pages.words.chunks_exact(WORDS).all(|page| page[0] > 10));
    }
}
