//! Which files CRIU's images are: their names, what they begin with, and how entries follow each other (CRIU's
//! `image-desc.c`, `magic.h`).

/// What every image but the inventory begins with, before its own number.
const COMMON: u32 = 0x5456_4319;
const SERVICE: u32 = 0x5510_5940;
/// Most bytes of one image without pages; a table of files of a server with 100,000 connections has 20 MB.
pub(super) const LARGEST: usize = 256 << 20;

/// A kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// The name without its number and `.img`: `core`, `fdinfo`, …
    pub name: &'static str,
    number: Number,
    magic: Magic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    None,
    Decimal,
    Hexadecimal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Magic {
    /// Of another program's format: pages, archives, what `ip` and `iptables` write.
    Raw,
    /// The image's own number alone.
    Bare(u32),
    /// After the common one.
    Of(u32),
    /// After that of files about a dump, which a restore does not read.
    Service(u32),
}

const fn one(name: &'static str, magic: u32) -> Kind {
    Kind { name, number: Number::None, magic: Magic::Of(magic) }
}

const fn each(name: &'static str, magic: u32) -> Kind {
    Kind { name, number: Number::Decimal, magic: Magic::Of(magic) }
}

const fn raw(name: &'static str) -> Kind {
    Kind { name, number: Number::Decimal, magic: Magic::Raw }
}

/// The images that a restore may find, but for `autofs`, `ext-files`, and those of old versions, which say in another
/// way what these say.
const KINDS: [Kind; 55] = [
    Kind { name: "inventory", number: Number::None, magic: Magic::Bare(0x5831_3116) },
    Kind { name: "stats-dump", number: Number::None, magic: Magic::Service(0x5709_3306) },
    Kind { name: "stats-restore", number: Number::None, magic: Magic::Service(0x5709_3306) },
    Kind { name: "ghost-file", number: Number::Hexadecimal, magic: Magic::Of(0x5258_3605) },
    Kind { name: "tcp-stream", number: Number::Hexadecimal, magic: Magic::Of(0x5146_5506) },
    one("binfmt-misc", 0x6734_3323),
    one("bpfmap-data", 0x6432_4033),
    one("bpfmap-file", 0x5750_6142),
    one("cgroup", 0x5938_3330),
    one("cpuinfo", 0x6140_4013),
    one("eventpoll-tfd", 0x4443_3746),
    one("fanotify-mark", 0x5650_6035),
    one("fifo-data", 0x5933_3054),
    one("filelocks", 0x5432_3616),
    one("files", 0x5630_3138),
    one("inotify-wd", 0x5456_2009),
    one("memfd", 0x4845_3499),
    one("pidfd", 0x5443_5556),
    one("pipes-data", 0x5645_3709),
    one("pstree", 0x5027_3030),
    one("remap-fpath", 0x5913_3954),
    one("seccomp", 0x6441_3049),
    one("sk-queues", 0x5626_4026),
    one("tty-data", 0x5941_3026),
    one("tty-info", 0x5945_3036),
    one("apparmor", 0x5942_3047),
    each("core", 0x5505_3847),
    each("fdinfo", 0x5621_3732),
    each("fs", 0x5140_3912),
    each("ids", 0x5443_2030),
    each("ipcns-msg", 0x5545_3737),
    each("ipcns-sem", 0x5957_3019),
    each("ipcns-shm", 0x4628_3044),
    each("ipcns-var", 0x5311_5007),
    each("mm", 0x5749_2820),
    each("mountpoints", 0x5556_3928),
    each("netdev", 0x5737_3951),
    each("netns", 0x5593_3752),
    each("pagemap", 0x5608_4025),
    each("pagemap-shmem", 0x5608_4025),
    each("pidns", 0x6115_7326),
    each("timens", 0x4311_4433),
    each("userns", 0x5547_4906),
    each("utsns", 0x5447_3203),
    raw("ifaddr"),
    raw("ip6tables"),
    raw("iptables"),
    raw("netns-ct"),
    raw("netns-exp"),
    raw("nftables"),
    raw("pages"),
    raw("route"),
    raw("route6"),
    raw("rule"),
    raw("tmpfs-dev"),
];

impl Kind {
    /// The kind of a file, with its number where it has one.
    pub fn of(file: &str) -> Option<(Self, Option<u64>)> {
        let stem = file.strip_suffix(".img")?;
        let stem = stem.strip_suffix(".tar.gz").filter(|stem| stem.starts_with("tmpfs-")).unwrap_or(stem);
        let (kind, number) = KINDS.iter().find_map(|kind| {
            let rest = stem.strip_prefix(kind.name)?;
            let number = rest.strip_prefix('-');
            match (kind.number, number) {
                (Number::None, _) if rest.is_empty() => Some((*kind, None)),
                (Number::Decimal, Some(digits)) => Some((*kind, Some(digits.parse().ok()?))),
                (Number::Hexadecimal, Some(digits)) => Some((*kind, Some(u64::from_str_radix(digits, 16).ok()?))),
                _ => None,
            }
        })?;
        // CRIU writes numbers in one way; another file of the same number is none that it opens.
        let is_canonical = match (kind.number, number) {
            (Number::Hexadecimal, Some(number)) => stem.ends_with(&format!("-{number:x}")),
            (Number::Decimal, Some(number)) => stem.ends_with(&format!("-{number}")),
            _ => true,
        };
        is_canonical.then_some((kind, number))
    }

    /// What an image of this kind begins with.
    pub fn head(self) -> Vec<u8> {
        let numbers = match self.magic {
            Magic::Raw => vec![],
            Magic::Bare(own) => vec![own],
            Magic::Service(own) => vec![SERVICE, own],
            Magic::Of(own) => vec![COMMON, own],
        };
        numbers.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    /// What follows the magic numbers of an image of this kind.
    ///
    /// # Errors
    /// If it is another kind's, or too long.
    pub fn content(self, bytes: &[u8]) -> Result<&[u8], &'static str> {
        if bytes.len() > LARGEST {
            return Err("is larger than images without pages are");
        }
        // CRIU makes an empty file of one that it has not begun to write.
        if bytes.is_empty() {
            return Ok(bytes);
        }
        bytes.strip_prefix(&*self.head()).ok_or("does not begin as images of its name do")
    }
}

/// The entries of an image: each has its length before it. In images with raw data between entries only the
/// first ones can be told.
pub struct Entries<'a>(pub &'a [u8]);

impl<'a> Iterator for Entries<'a> {
    type Item = Result<&'a [u8], &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let entry = self.0.split_first_chunk().and_then(|(length, rest)| {
            let length = u32::from_le_bytes(*length) as usize;
            Some((rest.get(..length)?, &rest[length..]))
        });
        match entry {
            Some((entry, rest)) => {
                self.0 = rest;
                Some(Ok(entry))
            }
            None => {
                self.0 = &[];
                Some(Err("ends in the middle of an entry"))
            }
        }
    }
}
