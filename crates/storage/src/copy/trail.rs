//! Which chunks of the files that interest us were written, by the kernel's own account.
//!
//! It has two logs. One tells of each folio that becomes dirty, however that came about; but not where in it something was written,
//! and nothing more while it is dirty ([`DirtyLog`]). The other one tells exactly what calls write, always, but nothing of mappings
//! ([`WriteLog`]). So as long as a file is written by calls alone, what they wrote since the last look is all that has changed.
//! Else whatever is in folios that became dirty since the file was written back may have changed, and it has to be written back before
//! it is read, so that its folios become dirty again ([`Told::to_write_back`]).

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tranship_sys::dirty_log::{DirtyLog, Written};
use tranship_sys::write_log::{WriteLog, Wrote};

use super::chunks::Chunks;
use super::content::CHUNK;
use super::reader::Reader;

/// Bytes of a part that are too many to be noted: the whole file may have changed then.
const TOO_MUCH: u64 = 1 << 36;

/// What the kernel has told of a file.
#[derive(Debug, Default)]
struct Account {
    /// Written or cleared by calls since it was taken last.
    called: Chunks,
    /// What was taken last of that: of a write's folio the kernel tells after the write.
    called_before: Chunks,
    /// Calls since it was taken last were such that all of it may have changed.
    whole: bool,
    /// In folios that became dirty since the file was written back.
    dirty: Chunks,
    /// A folio became dirty since it was taken last that no call has written to.
    otherwise: bool,
}

impl Account {
    /// A call has changed this part.
    fn note_call(&mut self, start: u64, end: u64) {
        match end.saturating_sub(start) > TOO_MUCH {
            true => self.whole = true,
            false => self.called.add(chunks(start, end)),
        }
    }

    /// A folio has become dirty. If no call that is told wrote to it, it was written otherwise.
    fn note_folio(&mut self, folio: Range<u64>) {
        let called = [&self.called, &self.called_before].iter().any(|chunks| chunks.meets(folio.clone()));
        self.otherwise |= !called;
        self.dirty.add(folio);
    }

    /// What may have changed since it was taken last. `exact`: nothing but calls told of has written to the file.
    fn take(&mut self, exact: bool) -> Told {
        let exact = exact && !std::mem::take(&mut self.otherwise);
        let mut written = std::mem::take(&mut self.called);
        self.called_before = written.clone();
        if !exact {
            written.merge(&std::mem::take(&mut self.dirty));
        }
        let written = if std::mem::take(&mut self.whole) { Part::Whole } else { Part::Chunks(written) };
        Told { written, to_write_back: !exact }
    }
}

/// Which part of a file may have changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Anything.
    Whole,
    /// Nothing but these.
    Chunks(Chunks),
}

/// What may have changed in a file since the trail was asked last.
#[derive(Debug)]
pub(super) struct Told {
    /// Where.
    pub written: Part,
    /// It has to be written back before it is read: the trail knows of its folios only what it has told now.
    pub to_write_back: bool,
}

#[derive(Debug)]
struct State {
    log: DirtyLog,
    calls: WriteLog,
    /// Files that are looked after.
    files: HashMap<u64, Account>,
    /// How often not everything was told.
    losses: u64,
    /// All calls were told of since the last look.
    calls_complete: bool,
}

/// The chunks of a range of bytes.
fn chunks(start: u64, end: u64) -> Range<u64> {
    start / CHUNK..end.div_ceil(CHUNK)
}

impl State {
    fn read(&mut self) {
        let Self { log, calls, files, .. } = self;
        // First, since a call that writes is told of before the folio that it makes dirty.
        let mut folios = Vec::new();
        let complete = log.read(|Written { ino, start, end, folio }| match files.get_mut(&ino) {
            Some(_) if folio => folios.push((ino, chunks(start, end))),
            Some(account) => account.note_call(start, end),
            None => {}
        });
        self.losses += u64::from(!complete);
        self.calls_complete &= calls.read(|Wrote { ino, start, end }| {
            if let Some(account) = files.get_mut(&ino) {
                account.note_call(start, end);
            }
        });
        for (ino, folio) in folios {
            if let Some(account) = files.get_mut(&ino) {
                account.note_folio(folio);
            }
        }
    }
}

/// Follows what is written, from its start on.
#[derive(Debug)]
pub(crate) struct Trail {
    state: Arc<Mutex<State>>,
    _reader: Reader,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trail {
    /// Begins to follow.
    pub fn start() -> io::Result<Self> {
        let log = DirtyLog::start()?;
        let calls = WriteLog::start()?;
        let state = State { log, calls, files: HashMap::new(), losses: 0, calls_complete: true };
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        let reader = {
            let state = lock(&state);
            let events = state.log.descriptors().chain(state.calls.descriptors());
            Reader::start("file trail", events, move || lock(&shared).read())?
        };
        Ok(Self { state, _reader: reader })
    }

    /// Looks after these files, too.
    pub fn follow(&self, files: impl Iterator<Item = u64>) {
        let mut state = lock(&self.state);
        for ino in files {
            state.files.entry(ino).or_default();
        }
    }

    /// What may have changed in these files since they were taken last, where anything may have, and how often something was lost so
    /// far. Those that are `mapped`, or were since, may have been written otherwise than by calls.
    pub(super) fn take(&self, of: &HashSet<u64>, mapped: impl Fn(u64) -> bool) -> (u64, HashMap<u64, Told>) {
        let mut state = lock(&self.state);
        state.read();
        let State { files, losses, calls_complete, .. } = &mut *state;
        let exact = std::mem::replace(calls_complete, true);
        let told = files.iter_mut().filter(|(ino, _)| of.contains(ino));
        let told = told.map(|(ino, account)| (*ino, account.take(exact && !mapped(*ino))));
        (*losses, told.filter(|(_, told)| told.written != Part::Chunks(Chunks::default())).collect())
    }
}
