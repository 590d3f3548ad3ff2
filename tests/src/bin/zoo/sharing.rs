//! Anonymous memory that two processes share, and both write all the time.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::kin::Kin;
use crate::raw::{Region, Sharing};
use crate::species::{Check, pattern};

/// Names how many MiB an animal's memory has, of those that may have much.
const SIZE: &str = "ZOO_MIB";

/// How many bytes of memory an animal is to have: so many MiB if nothing else is asked for.
pub fn size(mebibytes: usize) -> Result<usize> {
    Ok(std::env::var(SIZE).map_or(Ok(mebibytes), |text| text.parse()).context(SIZE)? << 20)
}

fn word(i: u64, version: u64) -> u64 {
    pattern(i ^ version << 40)
}

/// Every page has a version; before one is written anew it must be as it was left, by whichever of the two that was.
pub fn rewritten(_: &Path) -> Result<Check> {
    let region = Arc::new(Region::anonymous(size(16)?, Sharing::Shared)?);
    region.fill(0..region.pages(), |i| word(i, 0));
    let common = Arc::clone(&region);
    let mut kin = Kin::fork(move || {
        Ok(Box::new(move |question| {
            let (page, version) = question.trim().split_once(' ').context("not two numbers")?;
            let (page, version): (usize, u64) = (page.parse()?, version.parse()?);
            common.verify(page, |i| word(i, version))?;
            common.fill([page], |i| word(i, version + 1));
            Ok("written".to_owned())
        }))
    })?;
    let mut versions = vec![0u64; region.pages()];
    let (mut n, mut sweep) = (0u64, 0);
    Ok(Box::new(move || {
        for _ in 0..8 {
            n += 1;
            let page = pattern(n) as usize % region.pages();
            let version = &mut versions[page];
            if n.is_multiple_of(2) {
                let answer = kin.ask(&format!("{page} {version}"))?;
                ensure!(answer == "written", "the other process said {answer:?}");
            } else {
                region.verify(page, |i| word(i, *version))?;
                region.fill([page], |i| word(i, *version + 1));
            }
            *version += 1;
        }
        // All of them in turn: those that nobody has written for long are as important.
        for _ in 0..64 {
            region.verify(sweep, |i| word(i, versions[sweep]))?;
            sweep = (sweep + 1) % region.pages();
        }
        Ok(())
    }))
}
