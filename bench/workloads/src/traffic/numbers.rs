use std::fmt;

/// Where a stream is not what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct Mismatch {
    /// Place in the stream, in bytes.
    pub at: u64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} of the stream is not what was sent there", self.at)
    }
}

/// A place in the stream of the numbers 0, 1, 2 … as 8 bytes each, the least first: bytes that are missing, doubled or
/// elsewhere are wrong ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Numbers {
    at: u64,
}

impl Numbers {
    /// How many bytes lie before this place.
    pub fn at(self) -> u64 {
        self.at
    }

    /// Fills `bytes` with what follows, without passing on.
    pub fn write(self, bytes: &mut [u8]) {
        let head = bytes.len().min(((8 - self.at % 8) % 8) as usize);
        let (first, rest) = bytes.split_at_mut(head);
        for (byte, at) in first.iter_mut().zip(self.at..) {
            *byte = byte_at(at);
        }
        let mut number = self.at.div_ceil(8);
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&number.to_le_bytes());
            number += 1;
        }
        let last = words.into_remainder();
        let length = last.len();
        last.copy_from_slice(&number.to_le_bytes()[..length]);
    }

    /// Passes over so many bytes.
    pub fn pass(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }

    /// Compares `bytes` with what follows, and passes over them.
    ///
    /// # Errors
    /// The first wrong byte; the place stays.
    pub fn check(&mut self, bytes: &[u8]) -> Result<(), Mismatch> {
        let mut expected = vec![0; bytes.len()];
        self.write(&mut expected);
        if expected != bytes {
            let wrong = expected.iter().zip(bytes).take_while(|(a, b)| a == b).count();
            return Err(Mismatch { at: self.at + wrong as u64 });
        }
        self.pass(bytes.len());
        Ok(())
    }
}

fn byte_at(at: u64) -> u8 {
    (at / 8).to_le_bytes()[(at % 8) as usize]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_of_any_length_make_the_same_stream(lengths in proptest::collection::vec(0usize..40, 1..30)) {
            let mut writer = Numbers::default();
            let mut reader = Numbers::default();
            let mut all = Vec::new();
            for length in lengths {
                let mut piece = vec![0; length];
                writer.write(&mut piece);
                writer.pass(length);
                all.extend(piece);
            }
            prop_assert!(all.iter().zip(0..).all(|(byte, at)| *byte == byte_at(at)));
            prop_assert!(reader.check(&all).is_ok() && reader == writer);
        }
    }

    #[test]
    fn lost_doubled_and_exchanged_bytes_are_noticed() {
        let mut all = vec![0; 4096];
        Numbers::default().write(&mut all);
        let lost = [&all[..1448], &all[2896..]].concat();
        let doubled = [&all[..2896], &all[1448..]].concat();
        let exchanged = [&all[..1024], &all[2048..3072], &all[1024..2048]].concat();
        for (wrong, at) in [(lost, 1448), (doubled, 2896), (exchanged, 1024)] {
            let found = Numbers::default().check(&wrong).unwrap_err();
            assert!(found.at >= at && found.at < at + 8, "{found}");
        }
    }
}
