//! Files of gzip that can be appended to: each piece is a member of its own, and stored as it is (RFC 1952, RFC 1951
//! 3.2.4).
//!
//! Readers concatenate members. Nothing is compressed, so that what is written in a freeze takes no processor time.

use std::io::{self, Write};

/// Most bytes of one stored block.
const BLOCK: usize = 0xffff;

/// Writes a member.
pub fn append(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let mut member = Vec::with_capacity(bytes.len() + bytes.len() / BLOCK * 5 + 32);
    // Deflate, without a name, a time or extra fields, from Unix.
    member.extend([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3]);
    let mut blocks = bytes.chunks(BLOCK).peekable();
    while let Some(block) = blocks.next() {
        member.push(u8::from(blocks.peek().is_none()));
        let length = block.len() as u16;
        member.extend(length.to_le_bytes());
        member.extend((!length).to_le_bytes());
        member.extend(block);
    }
    member.extend(crc32fast::hash(bytes).to_le_bytes());
    member.extend((bytes.len() as u32).to_le_bytes());
    to.write_all(&member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn gzip_reads_what_was_appended() {
        let (first, second) = (vec![b'a'; 200_000], b"the end\n".to_vec());
        let mut file = Vec::new();
        append(&mut file, &first).unwrap();
        append(&mut file, &second).unwrap();
        let mut gzip = Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = gzip.stdin.take().unwrap();
        let writer = std::thread::spawn(move || stdin.write_all(&file));
        let read = gzip.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(read.status.success());
        assert!(read.stdout == [first, second].concat());
    }
}
