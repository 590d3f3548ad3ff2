//! Changed inputs: bytes, numbers, lines and pieces of seeds, put in other places.

/// What parsers compare with, and what numbers overflow at.
const WORDS: &[&[u8]] = &[
    b"0",
    b"-1",
    b"1",
    b"4294967295",
    b"4294967296",
    b"9223372036854775807",
    b"18446744073709551615",
    b"ffffffffffffffff",
    b"0x",
    b"\\040",
    b"\\777",
    b" - ",
    b":",
    b"-",
    b",",
    b"=",
    b"\n",
    b"\t",
    b"\0",
    b"\"",
    b"\\u0000",
    b"{",
    b"}",
    b"[]",
    b"{}",
    b"null",
    b"true",
    b"1e308",
    b"\"\"",
    b"..",
    b"/",
    b"\xff",
    b"\xf0\x9f",
    b"(deleted)",
    b"kB",
    b"\r\n\r\n",
];
const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    17,
    20,
    255,
    4095,
    4096,
    0x7fff,
    0x8000,
    0xffff,
    0x10000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 47,
    0x7fff_ffff_ffff_f000,
    u64::MAX - 4095,
    u64::MAX,
];

/// Inputs without an end, the same for the same number.
pub struct Changes<'a> {
    state: u64,
    seeds: &'a [Vec<u8>],
    input: Vec<u8>,
}

impl<'a> Changes<'a> {
    pub fn new(number: u64, seeds: &'a [Vec<u8>]) -> Self {
        Self { state: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, seeds, input: Vec::new() }
    }

    /// A number below `end`, which is not zero.
    fn below(&mut self, end: usize) -> usize {
        // xorshift64* (Vigna, 2016).
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        let at = self.below(all.len());
        all[at]
    }

    /// A part of an input of this length.
    fn part(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        let longest = 1 << self.below(11);
        start..(start + self.below(longest + 1)).min(length)
    }

    /// The next input, of so many bytes at most.
    pub fn next(&mut self, longest: usize) -> &[u8] {
        let seed = self.below(self.seeds.len());
        self.input.clone_from(&self.seeds[seed]);
        for _ in 0..=self.below(6) {
            self.change();
        }
        self.input.truncate(longest);
        &self.input
    }

    fn change(&mut self) {
        let length = self.input.len();
        let at = self.below(length + 1);
        match self.below(12) {
            0 if at < length => self.input[at] ^= 1 << self.below(8),
            1 if at < length => self.input[at] = self.below(256) as u8,
            2 => {
                let part = self.part(length);
                self.input.drain(part);
            }
            3 => {
                let copied = self.part(length);
                let copied = self.input[copied].to_vec();
                self.input.splice(at..at, copied);
            }
            4 => {
                let word = self.of(WORDS);
                self.input.splice(at..at, word.iter().copied());
            }
            // A number in letters becomes another one.
            5 | 6 => {
                let is_digit = |byte: &u8| byte.is_ascii_hexdigit();
                let Some(start) = self.input[at..].iter().position(is_digit).map(|digit| at + digit) else { return };
                let end = self.input[start..].iter().position(|byte| !is_digit(byte)).map_or(length, |end| start + end);
                let word = self.of(WORDS);
                self.input.splice(start..end, word.iter().copied());
            }
            // Binary ones, aligned most of the time.
            7 | 8 => {
                let size = self.of(&[2usize, 4, 4, 8]);
                let at = if self.below(4) > 0 { at & !(size - 1) } else { at };
                let number = self.of(NUMBERS);
                let little = self.below(4) > 0;
                let bytes = match (little, size) {
                    (true, _) => number.to_le_bytes().to_vec(),
                    (false, 2) => (number as u16).to_be_bytes().to_vec(),
                    (false, 4) => (number as u32).to_be_bytes().to_vec(),
                    (false, _) => number.to_be_bytes().to_vec(),
                };
                let end = (at + size).min(length);
                self.input[at.min(end)..end].copy_from_slice(&bytes[..end - at.min(end)]);
            }
            9 => self.input.truncate(at),
            // A piece of another seed.
            10 => {
                let other = self.below(self.seeds.len());
                let part = self.part(self.seeds[other].len());
                let piece = self.seeds[other][part].to_vec();
                let replaced = self.part(length);
                self.input.splice(replaced, piece);
            }
            // Lines in another order.
            _ => {
                let mut lines: Vec<&[u8]> = self.input.split(|byte| *byte == b'\n').collect();
                let count = lines.len();
                let mut state = self.state;
                let mut pick = || {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as usize % count
                };
                lines.swap(pick(), pick());
                let joined = lines.join(&b'\n');
                self.below(2);
                self.input = joined;
            }
        }
    }
}
