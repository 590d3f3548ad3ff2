//! Where the fields of kernel structures lie, from the kernel's own description of its types
//! (Documentation/bpf/btf.rst), `/sys/kernel/btf/vmlinux`.

use std::collections::HashMap;
use std::io;

const MAGIC: u16 = 0xeb9f;
/// A structure within a structure within…: more than any of the kernel's.
const DEPTH: u32 = 8;

/// The kernel's types: as many as some hundred thousand. Meant to be asked and dropped.
pub struct Btf {
    bytes: Vec<u8>,
    strings: usize,
    /// Where each type begins; type 1 is the first.
    types: Vec<usize>,
}

enum Kind {
    Struct,
    Modifier,
    Func,
    Other,
}

impl Btf {
    /// Reads the description of the running kernel. Fails where it was built without (CONFIG_DEBUG_INFO_BTF).
    pub fn of_kernel() -> io::Result<Self> {
        Self::parse(std::fs::read("/sys/kernel/btf/vmlinux")?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    pub(crate) fn parse(bytes: Vec<u8>) -> Option<Self> {
        let half = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
        if half(0)? != MAGIC {
            return None;
        }
        let header = word(4)?;
        let (first, len, strings) = (header + word(8)?, word(12)?, header + word(16)?);
        let (mut at, mut types) = (first, Vec::new());
        while at < first + len {
            types.push(at);
            let info = word(at + 4)?;
            let count = info & 0xffff;
            at += 12
                + match info >> 24 & 0x1f {
                    // Integers, variables, declaration tags.
                    1 | 14 | 17 => 4,
                    // Arrays.
                    3 => 12,
                    // Structures, unions, sections, 64-bit enumerations.
                    4 | 5 | 15 | 19 => 12 * count,
                    // Enumerations, prototypes.
                    6 | 13 => 8 * count,
                    _ => 0,
                };
        }
        Some(Self { bytes, strings, types })
    }

    fn word(&self, at: usize) -> usize {
        self.bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes(b.try_into().expect("4 bytes")) as usize)
    }

    fn name(&self, at: usize) -> &[u8] {
        let start = self.strings + self.word(at);
        let rest = self.bytes.get(start..).unwrap_or_default();
        rest.split(|b| *b == 0).next().unwrap_or_default()
    }

    fn kind(&self, at: usize) -> Kind {
        match self.word(at + 4) >> 24 & 0x1f {
            4 | 5 => Kind::Struct,
            8..=11 | 18 => Kind::Modifier,
            12 => Kind::Func,
            _ => Kind::Other,
        }
    }

    /// The number of the kernel function of this name.
    pub fn function(&self, name: &str) -> Option<u32> {
        let found = |at: &usize| matches!(self.kind(*at), Kind::Func) && self.name(*at) == name.as_bytes();
        self.types.iter().position(found).map(|index| index as u32 + 1)
    }

    /// Where these fields of a structure begin, as [`fields`](Self::fields) has them.
    ///
    /// # Errors
    /// `Unsupported`: the kernel has no such structure, or it has not all of them.
    pub fn offsets<const N: usize>(&self, structure: &str, names: [&str; N]) -> io::Result<[usize; N]> {
        let fields = self.fields(structure);
        let found: Option<Vec<usize>> = names.iter().map(|name| fields.get(*name).copied()).collect();
        found.and_then(|found| found.try_into().ok()).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Where fields of the structure of this name begin, in bytes from its start; also those of its unnamed parts. The name may be
    /// that of a type that stands for the structure.
    pub fn fields(&self, structure: &str) -> HashMap<String, usize> {
        let named = |at: usize| match self.kind(at) {
            Kind::Struct if self.name(at) == structure.as_bytes() => Some(at),
            Kind::Modifier if self.name(at) == structure.as_bytes() => self.resolved(self.word(at + 8), DEPTH),
            _ => None,
        };
        let mut fields = HashMap::new();
        if let Some(at) = self.types.iter().find_map(|at| named(*at)) {
            self.collect(at, 0, DEPTH, &mut fields);
        }
        fields
    }

    /// Where a field begins that lies within fields of a structure: `["restart_block", "futex", "time"]`.
    ///
    /// # Errors
    /// `Unsupported`: the kernel has no such structure or field.
    pub fn offset_within(&self, structure: &str, path: &[&str]) -> io::Result<usize> {
        let is_named = |at: &&usize| matches!(self.kind(**at), Kind::Struct) && self.name(**at) == structure.as_bytes();
        let mut at = self.types.iter().find(is_named).copied();
        let mut offset = 0;
        for name in path {
            let (start, id) = at.and_then(|at| self.field(at, name, DEPTH)).ok_or(io::ErrorKind::Unsupported)?;
            offset += start;
            at = self.resolved(id, DEPTH);
        }
        Ok(offset)
    }

    /// The members of a structure: the places of their descriptions, and where they begin.
    fn members(&self, at: usize) -> impl Iterator<Item = (usize, usize)> {
        let info = self.word(at + 4);
        let (count, bitfields) = (info & 0xffff, info >> 31 == 1);
        (0..count).map(move |n| at + 12 + n * 12).map(move |member| {
            let offset = self.word(member + 8);
            (member, if bitfields { offset & 0xff_ffff } else { offset } / 8)
        })
    }

    /// Where a field of the structure at a place begins, also one of its unnamed parts, and the number of its type.
    fn field(&self, at: usize, name: &str, depth: u32) -> Option<(usize, usize)> {
        self.members(at).find_map(|(member, start)| match self.name(member) {
            b"" if depth > 0 => {
                let part = self.resolved(self.word(member + 4), depth)?;
                self.field(part, name, depth - 1).map(|(within, id)| (start + within, id))
            }
            found => (found == name.as_bytes()).then(|| (start, self.word(member + 4))),
        })
    }

    fn collect(&self, at: usize, base: usize, depth: u32, fields: &mut HashMap<String, usize>) {
        for (member, offset) in self.members(at) {
            let start = base + offset;
            match self.name(member) {
                b"" if depth > 0 => {
                    if let Some(part) = self.resolved(self.word(member + 4), depth) {
                        self.collect(part, start, depth - 1, fields);
                    }
                }
                name => drop(fields.insert(String::from_utf8_lossy(name).into_owned(), start)),
            }
        }
    }

    /// The structure that a type is, behind its qualifiers.
    fn resolved(&self, id: usize, depth: u32) -> Option<usize> {
        let at = *self.types.get(id.checked_sub(1)?)?;
        match self.kind(at) {
            Kind::Struct => Some(at),
            Kind::Modifier if depth > 0 => self.resolved(self.word(at + 8), depth - 1),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_known_structure_are_where_they_have_always_been() {
        let Ok(btf) = Btf::of_kernel() else {
            println!("skipped: this kernel does not describe its types");
            return;
        };
        let fields = btf.fields("list_head");
        assert_eq!((fields["next"], fields["prev"]), (0, 8));
        assert!(btf.function("schedule").is_some());
        assert_eq!(btf.function("no_such_function_in_any_kernel"), None);
    }

    #[test]
    fn what_is_no_description_is_refused() {
        assert!(Btf::parse(Vec::new()).is_none());
        assert!(Btf::parse(vec![0; 64]).is_none());
        let cut = vec![0x9f, 0xeb, 1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0];
        assert!(Btf::parse(cut).is_none());
    }
}
