//! A process that executes its program anew, again and again: its memory is gone each time, but for a memfd.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, IntoRawFd};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::execv;

use crate::keeper::Word;
use crate::page::{Stamp, describe, is_zero};
use crate::raw::{Area, PAGE};
use crate::torture::Torture;

const PAGES: usize = 512;
/// Marks the pages of the memfd.
const REGION: u32 = 0xf000_0000;
/// Each life writes to one in so many pages.
const SHARE: u32 = 3;

/// The version of a page in a life, counted from 1: that of the last life that wrote to it. 0: none has.
fn version(page: u32, life: u32) -> u32 {
    let since = (page + life) % SHARE;
    life.saturating_sub(since)
}

/// Checks what the life before has left, lives for `steps`, leaves something itself, and begins the next life with
/// `program`. `memfd` is the number of the inherited descriptor; in the first life there is none.
pub fn live(
    torture: &mut Torture,
    mut program: Vec<String>,
    life: u32,
    memfd: Option<i32>,
    steps: usize,
) -> Result<()> {
    let number = match memfd {
        Some(number) => number,
        None => {
            let file = File::from(memfd_create("phoenix", MFdFlags::empty())?);
            file.set_len((PAGES * PAGE) as u64)?;
            file.into_raw_fd()
        }
    };
    let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"))?;
    let length = file.metadata()?.len();
    ensure!(length == (PAGES * PAGE) as u64, "the inherited memfd has {length} bytes");
    let area = Area::of_file(file.as_fd(), PAGES, true)?;
    let check = |life: u32| -> Result<()> {
        for page in 0..PAGES {
            let stamp = Stamp { region: REGION, page: page as u32, version: version(page as u32, life) };
            let words = area.words(page);
            let right = if stamp.version == 0 { is_zero(words) } else { stamp.compare(0, words).is_none() };
            ensure!(right, "the memfd of a process in life {life} must have {stamp} and has {}", describe(words));
        }
        Ok(())
    };
    check(life - 1).context("inherited")?;
    for page in (0..PAGES as u32).filter(|page| version(*page, life) == life) {
        Stamp { region: REGION, page, version: life }.write(area.words(page as usize));
    }
    for _ in 0..steps {
        torture.step()?;
        torture.rest();
    }
    torture.check_all()?;
    torture.end()?;
    check(life).context("at the end of a life")?;
    let counts = [("step.phoenix".to_owned(), u64::from(life)), ("check.phoenix".to_owned(), torture.checked())];
    let mut word = serde_json::to_string(&Word::Counts(counts.into_iter().collect()))?;
    word.push('\n');
    std::io::stdout().write_all(word.as_bytes())?;
    program.extend([format!("--memfd={number}"), format!("--life={}", life + 1)]);
    let arguments = program.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    execv(arguments.first().context("no program")?, &arguments).context("cannot execute this program anew")?;
    bail!("execv returned")
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn each_life_writes_to_a_third_of_the_pages_and_leaves_the_others() {
        for life in 1..20 {
            for page in 0..9 {
                let now = version(page, life);
                assert!(now == life || now == version(page, life - 1), "page {page} in life {life}");
            }
            assert_eq!((0..9).filter(|page| version(*page, life) == life).count(), 3);
        }
    }
}
