//! SysV shared memory, semaphores and message queues.

use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::{Result, ensure};

use crate::kin::Kin;
use crate::raw;
use crate::species::{Check, pattern, pattern_bytes};

/// A segment that two processes have attached.
pub fn shared_memory(_: &Path) -> Result<Check> {
    const LENGTH: usize = 512 << 10;
    let id = raw::shm_create(LENGTH)?;
    let words = raw::shm_attach(id, LENGTH)?;
    // Every second page stays untouched.
    let written = move || (0..words.len()).filter(|i| (i / raw::PAGE_WORDS).is_multiple_of(2));
    for i in written() {
        words[i].store(pattern(i as u64), Ordering::Relaxed);
    }
    let mut kin = Kin::fork(|| {
        let words = raw::shm_attach(id, LENGTH)?;
        Ok(Box::new(move |_| Ok(words[0].fetch_add(1, Ordering::SeqCst).to_string())))
    })?;
    let mut turn = 0u64;
    Ok(Box::new(move || {
        for i in written().skip(1) {
            let found = words[i].load(Ordering::Relaxed);
            ensure!(found == pattern(i as u64), "word {i} is {found:#x}");
        }
        let empty = (0..words.len()).find(|i| i / raw::PAGE_WORDS % 2 == 1 && words[*i].load(Ordering::Relaxed) != 0);
        ensure!(empty.is_none(), "the untouched word {empty:?} has a value");
        turn += 2;
        words[0].store(turn, Ordering::SeqCst);
        let seen = kin.ask("add one")?;
        ensure!(seen == turn.to_string(), "the other process saw {seen} instead of {turn}");
        ensure!(words[0].load(Ordering::SeqCst) == turn + 1, "what the other process wrote does not show");
        Ok(())
    }))
}

/// A segment that goes away with its last user, as one does that was removed while it was attached.
pub fn transient(_: &Path) -> Result<Check> {
    const LENGTH: usize = 64 << 10;
    let id = raw::shm_create(LENGTH)?;
    let words = raw::shm_attach(id, LENGTH)?;
    raw::shm_remove(id)?;
    (0..words.len()).for_each(|i| words[i].store(pattern(i as u64), Ordering::Relaxed));
    Ok(Box::new(move || {
        let wrong = (0..words.len()).find(|i| words[*i].load(Ordering::Relaxed) != pattern(*i as u64));
        ensure!(wrong.is_none(), "word {wrong:?} is wrong");
        ensure!(raw::shm_is_removed(id)?, "the segment would stay when nobody uses it any more");
        Ok(())
    }))
}

/// A set of semaphores with values.
pub fn semaphores(_: &Path) -> Result<Check> {
    const VALUES: [u16; 3] = [3, 1, 0];
    let id = raw::sem_create(&VALUES)?;
    Ok(Box::new(move || {
        for (i, right) in VALUES.iter().enumerate() {
            let found = raw::sem_value(id, i)?;
            ensure!(found == *right, "semaphore {i} is {found} instead of {right}");
        }
        raw::sem_add(id, 0, -3)?;
        ensure!(raw::sem_add(id, 0, -1).is_err(), "semaphore 0 gave more than it had");
        raw::sem_add(id, 0, 3)
    }))
}

/// A queue with messages of two kinds.
pub fn messages(_: &Path) -> Result<Check> {
    const QUEUED: u64 = 6;
    let id = raw::msg_create()?;
    let body = |n: u64| <[u8; 64]>::try_from(pattern_bytes(n, 64)).expect("64 bytes are 64 bytes");
    let kind = |n: u64| 1 + (n % 2).cast_signed();
    for n in 0..QUEUED {
        raw::msg_send(id, kind(n), body(n))?;
    }
    let mut next = 0u64;
    Ok(Box::new(move || {
        // The second message is the first of its kind; taking it first shows that the kinds are kept.
        for n in [next + 1, next] {
            let found = raw::msg_receive(id, kind(n))?;
            ensure!(found == (kind(n), body(n)), "message {n} came out as {found:?}");
        }
        for n in [next, next + 1] {
            raw::msg_send(id, kind(n + QUEUED), body(n + QUEUED))?;
        }
        next += 2;
        Ok(())
    }))
}
