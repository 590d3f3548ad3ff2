/// Random numbers of which a seed gives always the same (splitmix64).
#[derive(Debug, Clone)]
pub struct Chance(u64);

/// Mixes the bits of a number.
pub fn mix(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A number of the range.
    pub fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of several, each as often as its weight says.
    pub fn weighted<T: Copy>(&mut self, list: &[(T, usize)]) -> T {
        let mut drawn = self.below(list.iter().map(|(_, weight)| weight).sum());
        for (thing, weight) in list {
            if drawn < *weight {
                return *thing;
            }
            drawn -= weight;
        }
        list[0].0
    }
}
