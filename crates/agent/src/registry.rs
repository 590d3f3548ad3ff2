//! What is known of migrations and groups: those under way, watched live, and those that ended, on disk.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tranship_api::Watched;
use tranship_types::{Outcome, Report};

use crate::sync::{Mutex, MutexGuard};

/// Reports kept on disk.
const HISTORY: usize = 500;
/// Reports kept in memory that the disk did not take.
const UNKEPT: usize = 50;

/// All reports of this node, of one kind.
#[derive(Debug)]
pub struct Registry<R: Watched> {
    live: Mutex<HashMap<R::Id, Shown<R>>>,
    /// The last ones that ended and could not be written: who follows them shall learn how.
    unkept: Mutex<Vec<R>>,
    directory: PathBuf,
}

/// What has a report that changes.
#[derive(Debug, Clone)]
struct Shown<R> {
    sender: watch::Sender<R>,
    /// Held by whoever changes it or writes it to the disk, which takes a while: what comes meanwhile is done after it.
    changing: Arc<Mutex<()>>,
}

/// One report while it changes.
#[derive(Debug, Clone)]
pub struct Live<R: Watched> {
    registry: Arc<Registry<R>>,
    shown: Shown<R>,
    id: R::Id,
}

/// One migration's report while it changes.
pub type LiveReport = Live<Report>;

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl<R: Watched> Registry<R> {
    /// A registry whose history is this directory, which need not exist yet.
    pub fn new(directory: PathBuf) -> Arc<Self> {
        Arc::new(Self { live: Mutex::default(), unkept: Mutex::default(), directory })
    }

    fn live(&self) -> MutexGuard<'_, HashMap<R::Id, Shown<R>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a report known from now on. One that has ended already stays in the history.
    pub fn begin(self: &Arc<Self>, report: R) -> Live<R> {
        let id = report.id().clone();
        let under_way = report.outcome() == Outcome::Running;
        let mut live = self.live();
        // Who watches it already goes on watching.
        let shown = match live.get(&id).filter(|_| under_way) {
            Some(known) => {
                known.sender.send_replace(report);
                known.clone()
            }
            None => Shown { sender: watch::channel(report).0, changing: Arc::default() },
        };
        if under_way {
            live.insert(id.clone(), shown.clone());
        }
        drop(live);
        Live { registry: Arc::clone(self), shown, id }
    }

    /// Follows one; one that has ended gives its last report only.
    pub fn watch(&self, id: &R::Id) -> Option<watch::Receiver<R>> {
        if let Some(shown) = self.live().get(id) {
            return Some(shown.sender.subscribe());
        }
        Some(watch::channel(self.ended(id)?).1)
    }

    /// Waits until one has ended, or the agent stops; its last report. Not to be called within a tokio runtime.
    pub fn wait(&self, id: &R::Id) -> Option<R> {
        let mut reports = self.watch(id)?;
        // Without timers and descriptors, so that there is nothing that could be lacking.
        let runtime = tokio::runtime::Builder::new_current_thread().build().ok()?;
        let ended = runtime.block_on(async {
            // An error says that there is no later report than the one that is there.
            let _ = reports.wait_for(|report| report.outcome() != Outcome::Running).await;
            reports.borrow().clone()
        });
        Some(ended)
    }

    /// One report.
    pub fn report(&self, id: &R::Id) -> Option<R> {
        let live = self.live().get(id).map(|shown| shown.sender.borrow().clone());
        live.or_else(|| self.ended(id))
    }

    fn unkept(&self) -> MutexGuard<'_, Vec<R>> {
        self.unkept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that has ended. What the disk has of one that it did not take later is out of date.
    fn ended(&self, id: &R::Id) -> Option<R> {
        let unkept = self.unkept().iter().find(|report| report.id() == id).cloned();
        unkept.or_else(|| self.read(&self.path(id)))
    }

    /// All reports, newest first.
    pub fn reports(&self) -> Vec<R> {
        let mut all: Vec<R> = self.live().values().map(|shown| shown.sender.borrow().clone()).collect();
        let unkept: Vec<R> = self.unkept().iter().filter(|r| all.iter().all(|l| l.id() != r.id())).cloned().collect();
        all.extend(unkept);
        let live: Vec<R::Id> = all.iter().map(|r| r.id().clone()).collect();
        // What is under way may be kept, too.
        all.extend(self.files().iter().filter_map(|path| self.read(path)).filter(|r| !live.contains(r.id())));
        all.sort_by_key(|r| std::cmp::Reverse(r.started_unix_ms()));
        all
    }

    /// Whether the history has its most reports, so that older ones may have been removed.
    pub fn is_full(&self) -> bool {
        self.files().len() >= HISTORY
    }

    fn path(&self, id: &R::Id) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    fn read(&self, path: &Path) -> Option<R> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect()
    }

    fn write(&self, report: &R) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.directory)?;
        write_whole(&self.path(report.id()), &serde_json::to_vec_pretty(report)?)
    }

    fn keep(&self, report: &R) {
        let written = self.write(report);
        let mut unkept = self.unkept();
        unkept.retain(|other| other.id() != report.id());
        if let Err(error) = written {
            tracing::warn!(%error, id = %report.id(), "the report cannot be kept in the history");
            unkept.push(report.clone());
            let over = unkept.len().saturating_sub(UNKEPT);
            unkept.drain(..over);
        }
        drop(unkept);
        let mut files = self.files();
        if files.len() > HISTORY {
            files.sort_by_key(|p| p.metadata().and_then(|m| m.modified()).ok());
            for old in &files[..files.len() - HISTORY] {
                for file in [old.clone(), old.with_extension("dump.log"), old.with_extension("restore.log")] {
                    let _ = std::fs::remove_file(file);
                }
            }
        }
    }
}

impl<R: Watched> Live<R> {
    fn changing(&self) -> MutexGuard<'_, ()> {
        self.shown.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the report; who watches sees it.
    pub fn change(&self, change: impl FnOnce(&mut R)) {
        let _changing = self.changing();
        self.shown.sender.send_modify(change);
    }

    /// The report as it stands.
    pub fn read(&self) -> R {
        self.shown.sender.borrow().clone()
    }

    /// Keeps the report as it stands on disk, for an agent that follows this one.
    pub fn save(&self) -> std::io::Result<()> {
        // Not in the place of the last change.
        let _changing = self.changing();
        self.registry.write(&self.read())
    }

    /// The last change: the report goes to the history, and who watches learns that it has ended. What becomes known of it
    /// later may follow.
    pub fn end(&self, change: impl FnOnce(&mut R)) {
        let _changing = self.changing();
        let mut report = self.read();
        change(&mut report);
        self.registry.keep(&report);
        self.shown.sender.send_replace(report);
        self.registry.live().remove(&self.id);
    }
}
/// Writes a file as a whole, or leaves the one that is there.
///
/// # Errors
/// The system's.
pub fn write_whole(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let nascent = path.with_extension("nascent");
    std::fs::write(&nascent, content)?;
    std::fs::rename(nascent, path)
}
