//! What is written to a page, so that a page that is not what it must be tells what it is instead: an older version, a
//! page of another place, zeros, or parts of several.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::chance::mix;
use crate::raw::PAGE_WORDS;

/// A page's words.
pub type Words = [AtomicU64; PAGE_WORDS];

const MAGIC: u64 = 0x70a9_e57d << 32;
/// Where the number of pokes is, which changes without the rest: a write of a single word.
const POKES: usize = 2;
/// Where the checksum of the words before the filler is.
const SUM: usize = 3;

/// Which page it is, and in which version. A version is never used for the same page twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub region: u32,
    pub page: u32,
    pub version: u32,
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {} page {} version {}", self.region, self.page, self.version)
    }
}

impl Stamp {
    fn base(self) -> u64 {
        mix(u64::from(self.region) << 32 | u64::from(self.page)) ^ mix(u64::from(self.version) << 17 | 1)
    }

    fn head(self) -> [u64; 2] {
        [MAGIC | u64::from(self.region), u64::from(self.page) << 32 | u64::from(self.version)]
    }

    /// The word at `index`, but for the pokes.
    fn word(self, base: u64, index: usize) -> u64 {
        match index {
            0 | 1 => self.head()[index],
            SUM => mix(self.head()[0] ^ self.head()[1].rotate_left(13)),
            _ => base ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        }
    }

    /// Writes the whole page; it has no pokes then.
    pub fn write(self, words: &Words) {
        let base = self.base();
        for (index, word) in words.iter().enumerate() {
            word.store(if index == POKES { 0 } else { self.word(base, index) }, Ordering::Relaxed);
        }
    }

    /// The bytes of the page, for a file.
    pub fn bytes(self) -> Vec<u8> {
        let base = self.base();
        let word = |index| if index == POKES { 0 } else { self.word(base, index) };
        (0..PAGE_WORDS).flat_map(|index| word(index).to_le_bytes()).collect()
    }

    /// The index of the first word that is not as it must be.
    pub fn compare(self, pokes: u64, words: &Words) -> Option<usize> {
        let base = self.base();
        words.iter().enumerate().position(|(index, word)| {
            let right = if index == POKES { pokes } else { self.word(base, index) };
            word.load(Ordering::Relaxed) != right
        })
    }

    /// Reads the stamp of a page, if its first words are those of one.
    fn read(words: &Words) -> Option<Self> {
        let [first, second, sum] = [0, 1, SUM].map(|index| words[index].load(Ordering::Relaxed));
        let stamp = Self { region: first as u32, page: (second >> 32) as u32, version: second as u32 };
        (stamp.head() == [first, second] && stamp.word(0, SUM) == sum).then_some(stamp)
    }
}

/// Whether all of the page is zeros.
pub fn is_zero(words: &Words) -> bool {
    words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
}

/// Changes one word of the page.
pub fn poke(words: &Words, pokes: u64) {
    words[POKES].store(pokes, Ordering::Relaxed);
}

/// What a page is, for whoever expected something else.
pub fn describe(words: &Words) -> String {
    if is_zero(words) {
        return "zeros".to_owned();
    }
    let Some(stamp) = Stamp::read(words) else {
        let first: Vec<String> = words[..6].iter().map(|w| format!("{:#x}", w.load(Ordering::Relaxed))).collect();
        let zeros = words.iter().filter(|w| w.load(Ordering::Relaxed) == 0).count();
        return format!(
            "nothing that was ever written as one page ({zeros} zero words; it begins {})",
            first.join(" ")
        );
    };
    let pokes = words[POKES].load(Ordering::Relaxed);
    match stamp.compare(pokes, words) {
        None => format!("{stamp} with {pokes} pokes, whole"),
        Some(at) => {
            let rest = words[at..].iter().filter(|w| w.load(Ordering::Relaxed) == 0).count();
            let found = words[at].load(Ordering::Relaxed);
            format!(
                "{stamp} with {pokes} pokes, torn at word {at}, where {found:#x} is ({rest} of the {} words from there are 0)",
                PAGE_WORDS - at
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blank() -> Box<Words> {
        Box::new([const { AtomicU64::new(0) }; PAGE_WORDS])
    }

    #[test]
    fn each_way_of_being_wrong_is_told_from_the_others() {
        let stamp = Stamp { region: 3, page: 7, version: 9 };
        let page = blank();
        assert_eq!(describe(&page), "zeros");
        stamp.write(&page);
        assert_eq!(stamp.compare(0, &page), None);
        poke(&page, 4);
        assert_eq!(stamp.compare(0, &page), Some(POKES));
        assert_eq!(stamp.compare(4, &page), None);
        let older = Stamp { version: 8, ..stamp };
        assert!(older.compare(4, &page).is_some());
        assert_eq!(describe(&page), "region 3 page 7 version 9 with 4 pokes, whole");
        page[300].store(0, Ordering::Relaxed);
        assert!(describe(&page).contains("torn at word 300"), "{}", describe(&page));
        page[0].store(5, Ordering::Relaxed);
        assert!(describe(&page).starts_with("nothing that was ever written"), "{}", describe(&page));
    }

    #[test]
    fn a_file_has_the_same_content() {
        let stamp = Stamp { region: 1, page: 2, version: 1 };
        let page = blank();
        for (word, bytes) in page.iter().zip(stamp.bytes().chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
        }
        assert_eq!(stamp.compare(0, &page), None);
    }
}
