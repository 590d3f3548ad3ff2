//! The destination's side: a file for each object, filled before criu makes the object.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use tranship_sys::charge::Charger;
use tranship_sys::hugetlb;
use tranship_types::{AddressSpaceId, PAGE_SIZE, PageRange, SharedKind, SharedObject};

use super::copies;
use crate::page_set::PageSet;
use crate::send::CHUNK;

/// How long pages may be there before their object is described: the description takes another link.
const DESCRIPTION: Duration = Duration::from_secs(10);
/// Objects in one container.
const OBJECTS: usize = 1 << 16;
/// Length of an object in bytes: what can be mapped.
const SIZE: u64 = tranship_wire::USER_ADDRESS_END;

/// Shared memory that cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Pages came of something that is not known.
    #[error("pages came of shared memory {space} that the source did not describe within {DESCRIPTION:?}")]
    Undescribed {
        /// Its id.
        space: u32,
    },
    /// A description that cannot be right.
    #[error("the source describes shared memory that cannot be: {what}")]
    Implausible {
        /// Why not.
        what: String,
    },
    /// The kernel refused.
    #[error("shared memory {name:?} cannot be stored: {source}")]
    Store {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// One object and the file that is to become it.
#[derive(Debug)]
struct Target {
    object: Mutex<SharedObject>,
    file: File,
    /// How much memory it occupied when that was looked at last, in blocks.
    blocks: Mutex<u64>,
    /// What there is, of [`SharedKind::Pages`]: to be told from holes, which the file may not have where it could. Of a file in huge pages,
    /// those that are allocated.
    pages: Mutex<PageSet>,
}

impl Target {
    fn new(object: &SharedObject) -> io::Result<Self> {
        let name = CString::new(object.name.as_str())?;
        let mut flags = MFdFlags::MFD_CLOEXEC;
        if object.sealable {
            flags |= MFdFlags::MFD_ALLOW_SEALING;
        }
        let file = match Self::huge_page(object) {
            Some(page) => hugetlb::create(&name, page, flags)?,
            None => File::from(memfd_create(name.as_c_str(), flags)?),
        };
        let target =
            Self { object: Mutex::new(object.clone()), file, blocks: Mutex::default(), pages: Mutex::default() };
        target.settle()?;
        Ok(target)
    }

    /// Of what the file consists, if it is of huge pages.
    fn huge_page(object: &SharedObject) -> Option<u64> {
        (object.huge_page > 0 && object.kind == SharedKind::File).then_some(object.huge_page)
    }

    fn object(&self) -> MutexGuard<'_, SharedObject> {
        self.object.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the file the length of the object. Not before all pages have come: they may overtake the word that their object
    /// has grown, and what is cut off by an older word would be lost.
    fn settle(&self) -> io::Result<()> {
        let object = self.object();
        self.file.set_len(match object.kind {
            SharedKind::File | SharedKind::Pages => object.size,
            // Its file only carries the content; segments have whole pages.
            SharedKind::Segment => object.size.next_multiple_of(PAGE_SIZE),
        })?;
        match object.kind {
            SharedKind::Pages if object.size > 0 => copies::list(&self.file, &self.pages()),
            _ => Ok(()),
        }
    }

    fn pages(&self) -> MutexGuard<'_, PageSet> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_pages(&self) -> bool {
        self.object().kind == SharedKind::Pages
    }

    /// Writes pages. Returns by how many bytes the file occupies more memory now.
    fn write(&self, range: PageRange, pages: &[u8], charger: &Charger) -> io::Result<i64> {
        let object = self.object().clone();
        if let Some(page) = Self::huge_page(&object) {
            return self.write_huge(range, pages, charger, page).map(|()| 0);
        }
        // What the others carry is copied into the restored tasks, which are charged then.
        if object.kind == SharedKind::File {
            charger.allocate(&self.file, range.start, range.len())?;
        }
        self.file.write_all_at(pages, range.start)?;
        if self.is_pages() {
            self.pages().insert(range);
        }
        self.grown()
    }

    /// Huge pages are not of the memory that the container's other pages occupy.
    fn write_huge(&self, range: PageRange, pages: &[u8], charger: &Charger, page: u64) -> io::Result<()> {
        let PageRange { start, end } = widened(range, page);
        let mut allocated = self.pages();
        if allocated.within(PageRange { start, end }) != [PageRange { start, end }] {
            if self.file.metadata()?.len() < end {
                self.file.set_len(end)?;
            }
            charger.allocate(&self.file, start, end - start)?;
            let mode = FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(&self.file, mode, start.cast_signed(), (end - start).cast_signed())?;
            allocated.insert(PageRange { start, end });
        }
        drop(allocated);
        hugetlb::write(&self.file, page, pages, range.start)
    }

    /// Zeros what there is; the rest is zeros.
    fn zero_huge(&self, range: PageRange, page: u64) -> io::Result<()> {
        let zeros = vec![0; CHUNK as usize];
        let there = self.pages().within(range);
        there
            .iter()
            .flat_map(|run| run.cut(CHUNK))
            .try_for_each(|piece| hugetlb::write(&self.file, page, &zeros[..piece.len() as usize], piece.start))
    }

    fn zero(&self, range: PageRange) -> io::Result<i64> {
        let huge_page = Self::huge_page(&self.object());
        if let Some(page) = huge_page {
            return self.zero_huge(range, page).map(|()| 0);
        }
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, mode, range.start.cast_signed(), range.len().cast_signed())?;
        self.pages().remove(range);
        self.grown()
    }

    /// By how many bytes the file occupies more memory than when this was asked last; other streams may write to it, too.
    fn grown(&self) -> io::Result<i64> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.file.metadata()?.blocks();
        Ok((now.cast_signed() - std::mem::replace(&mut *blocks, now).cast_signed()) * 512)
    }
}

/// The whole pages of this size that a range touches.
fn widened(range: PageRange, page: u64) -> PageRange {
    PageRange { start: range.start / page * page, end: range.end.next_multiple_of(page) }
}

/// The objects of a container that is arriving.
#[derive(Debug, Default)]
pub struct SharedStore {
    targets: Mutex<BTreeMap<AddressSpaceId, Arc<Target>>>,
    described: Condvar,
    /// Has the pages charged to the container.
    pub charger: Arc<Charger>,
}

impl SharedStore {
    fn targets(&self) -> MutexGuard<'_, BTreeMap<AddressSpaceId, Arc<Target>>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the objects that are described for the first time, and takes note of the length of the others. Each new one is
    /// handed to `keep`.
    ///
    /// # Errors
    /// A description that cannot be right, or no memory.
    pub fn describe<E>(
        &self,
        objects: &[SharedObject],
        mut keep: impl FnMut(&SharedObject, BorrowedFd<'_>) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<StoreError>,
    {
        for object in objects {
            let implausible = |what: &str| StoreError::Implausible { what: what.to_owned() };
            let page = object.huge_page;
            if !object.space.is_object() || object.size > SIZE || page > 0 && !page.is_power_of_two() {
                return Err(implausible("its id, its length or its pages are out of bounds").into());
            }
            let failed = |source| StoreError::Store { name: object.name.clone(), source };
            let known = self.targets().get(&object.space).cloned();
            match known {
                Some(target) => {
                    let before = target.object().clone();
                    if (before.key, before.kind, before.huge_page) != (object.key, object.kind, object.huge_page) {
                        return Err(implausible("it has become another one").into());
                    }
                    *target.object() = object.clone();
                }
                None => {
                    if self.targets().len() >= OBJECTS {
                        return Err(implausible("there are too many").into());
                    }
                    let target = Arc::new(Target::new(object).map_err(failed)?);
                    keep(object, target.file.as_fd())?;
                    self.targets().insert(object.space, target);
                    self.described.notify_all();
                }
            }
        }
        Ok(())
    }

    /// Gives every object its final length, when all pages have come.
    pub fn settle(&self) -> Result<(), StoreError> {
        let all: Vec<_> = self.targets().values().cloned().collect();
        all.iter().try_for_each(|target| {
            target.settle().map_err(|source| StoreError::Store { name: target.object().name.clone(), source })
        })
    }

    /// Hands every object to `keep`, as [`Self::describe`] does: in the order in which they were described first, because of
    /// those with the same key the last one counts.
    pub fn each<E>(&self, mut keep: impl FnMut(&SharedObject, BorrowedFd<'_>) -> Result<(), E>) -> Result<(), E> {
        let all: Vec<_> = self.targets().values().cloned().collect();
        all.iter().try_for_each(|target| {
            let object = target.object().clone();
            keep(&object, target.file.as_fd())
        })
    }

    /// Puts pages in their place; waits if their object is not described yet. Returns by how many bytes more memory is
    /// occupied. Pages behind the end stay until [`Self::settle`].
    pub fn write(&self, space: AddressSpaceId, range: PageRange, pages: &[u8]) -> Result<i64, StoreError> {
        let target = self.target(space)?;
        let written = target.write(range, pages, &self.charger);
        written.map_err(|source| StoreError::Store { name: target.object().name.clone(), source })
    }

    /// Makes pages zeros again. Returns by how many bytes more memory is occupied: never more than none.
    pub fn zero(&self, space: AddressSpaceId, range: PageRange) -> Result<i64, StoreError> {
        let target = self.target(space)?;
        target.zero(range).map_err(|source| StoreError::Store { name: target.object().name.clone(), source })
    }

    fn target(&self, space: AddressSpaceId) -> Result<Arc<Target>, StoreError> {
        let targets = self.targets();
        let absent = |targets: &mut BTreeMap<_, _>| !targets.contains_key(&space);
        let waited = self.described.wait_timeout_while(targets, DESCRIPTION, absent);
        let (targets, _) = waited.unwrap_or_else(PoisonError::into_inner);
        targets.get(&space).cloned().ok_or(StoreError::Undescribed { space: space.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn object(number: u32, size: u64) -> SharedObject {
        let space = AddressSpaceId::object(number).unwrap();
        let name = "a name".to_owned();
        SharedObject { space, key: number, kind: SharedKind::File, name, size, sealable: true, huge_page: 0 }
    }

    fn keep_none(_: &SharedObject, _: BorrowedFd<'_>) -> Result<(), StoreError> {
        Ok(())
    }

    fn pages(from: u64, to: u64) -> PageRange {
        PageRange { start: from * PAGE_SIZE, end: to * PAGE_SIZE }
    }

    #[test]
    fn pages_end_where_they_belong_and_not_beyond_the_end() {
        let store = SharedStore::default();
        let described = object(3, 2 * PAGE_SIZE + 100);
        let mut kept = None;
        store
            .describe(std::slice::from_ref(&described), |o, fd| {
                kept = Some((o.clone(), File::from(fd.try_clone_to_owned().unwrap())));
                Ok::<_, StoreError>(())
            })
            .unwrap();
        let (known, mut file) = kept.unwrap();
        assert_eq!(known, described);
        let text = vec![7u8; 3 * PAGE_SIZE as usize];
        assert_eq!(store.write(described.space, pages(0, 3), &text).unwrap(), 3 * PAGE_SIZE.cast_signed());
        assert_eq!(store.zero(described.space, pages(1, 2)).unwrap(), -PAGE_SIZE.cast_signed());
        store.settle().unwrap();
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        let mut expected = text[..2 * PAGE_SIZE as usize + 100].to_vec();
        expected[PAGE_SIZE as usize..2 * PAGE_SIZE as usize].fill(0);
        assert!(content == expected);
    }

    #[test]
    fn pages_that_overtake_the_word_that_their_object_has_grown_are_kept() {
        let store = SharedStore::default();
        store.describe(&[object(1, 2 * PAGE_SIZE)], keep_none).unwrap();
        let space = object(1, 0).space;
        // The source said: cut off at one page, grown to four.
        store.write(space, pages(2, 4), &[1; 2 * PAGE_SIZE as usize]).unwrap();
        for described in [object(1, PAGE_SIZE), object(1, 4 * PAGE_SIZE)] {
            store.describe(&[described], keep_none).unwrap();
        }
        store.settle().unwrap();
        let mut content = vec![0; 2 * PAGE_SIZE as usize];
        store.target(space).unwrap().file.read_exact_at(&mut content, 2 * PAGE_SIZE).unwrap();
        assert!(content.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn what_is_gone_at_the_end_has_no_content() {
        let store = SharedStore::default();
        store.describe(&[object(1, 4 * PAGE_SIZE)], keep_none).unwrap();
        store.write(object(1, 0).space, pages(0, 4), &[1; 4 * PAGE_SIZE as usize]).unwrap();
        store.describe(&[object(1, 0)], keep_none).unwrap();
        store.settle().unwrap();
        let found = store.target(object(1, 0).space).unwrap().file.metadata().unwrap();
        assert_eq!((found.len(), found.blocks()), (0, 0));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let store = SharedStore::default();
        let mut pid = object(1, PAGE_SIZE);
        pid.space = AddressSpaceId(1);
        assert!(matches!(store.describe(&[pid], keep_none), Err(StoreError::Implausible { .. })));
        assert!(store.describe(&[object(1, u64::MAX)], keep_none).is_err());
        store.describe(&[object(1, PAGE_SIZE)], keep_none).unwrap();
        let mut other = object(1, PAGE_SIZE);
        other.key = 2;
        assert!(matches!(store.describe(&[other], keep_none), Err(StoreError::Implausible { .. })));
    }
}
