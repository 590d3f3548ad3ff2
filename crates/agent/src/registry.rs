//! What is known of migrations: those under way, watched live, and those that ended, on disk.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tranship_types::{MigrationId, Outcome, Report};

/// Reports kept on disk.
const HISTORY: usize = 500;

/// All reports of this node.
#[derive(Debug)]
pub struct Registry {
    live: Mutex<HashMap<MigrationId, watch::Sender<Report>>>,
    directory: PathBuf,
}

/// One migration's report while it changes.
#[derive(Debug, Clone)]
pub struct LiveReport {
    registry: Arc<Registry>,
    sender: watch::Sender<Report>,
    id: MigrationId,
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl Registry {
    /// A registry whose history is below `state_dir`.
    pub fn new(state_dir: &Path) -> Arc<Self> {
        Arc::new(Self { live: Mutex::default(), directory: state_dir.join("history") })
    }

    fn live(&self) -> std::sync::MutexGuard<'_, HashMap<MigrationId, watch::Sender<Report>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a report known from now on. One that has ended already stays in the history.
    pub fn begin(self: &Arc<Self>, report: Report) -> LiveReport {
        let id = report.id.clone();
        let under_way = report.outcome == Outcome::Running;
        let (sender, _) = watch::channel(report);
        if under_way {
            self.live().insert(id.clone(), sender.clone());
        }
        LiveReport { registry: Arc::clone(self), sender, id }
    }

    /// Follows a migration; one that has ended gives its last report only.
    pub fn watch(&self, id: &MigrationId) -> Option<watch::Receiver<Report>> {
        if let Some(sender) = self.live().get(id) {
            return Some(sender.subscribe());
        }
        Some(watch::channel(self.read(&self.path(id))?).1)
    }

    /// One report.
    pub fn report(&self, id: &MigrationId) -> Option<Report> {
        let live = self.live().get(id).map(|s| s.borrow().clone());
        live.or_else(|| self.read(&self.path(id)))
    }

    /// All reports, newest first.
    pub fn reports(&self) -> Vec<Report> {
        let mut all: Vec<Report> = self.live().values().map(|s| s.borrow().clone()).collect();
        all.extend(self.files().iter().filter_map(|path| self.read(path)));
        all.sort_by_key(|r| std::cmp::Reverse(r.started_unix_ms));
        all
    }

    fn path(&self, id: &MigrationId) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    fn read(&self, path: &Path) -> Option<Report> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect()
    }

    fn keep(&self, report: &Report) {
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.directory)?;
            let nascent = self.path(&report.id).with_extension("nascent");
            std::fs::write(&nascent, serde_json::to_vec_pretty(report)?)?;
            std::fs::rename(nascent, self.path(&report.id))
        };
        if let Err(error) = write() {
            tracing::warn!(%error, id = %report.id, "the report cannot be kept in the history");
        }
        let mut files = self.files();
        if files.len() > HISTORY {
            files.sort_by_key(|p| p.metadata().and_then(|m| m.modified()).ok());
            for old in &files[..files.len() - HISTORY] {
                let _ = std::fs::remove_file(old);
            }
        }
    }
}

impl LiveReport {
    /// Changes the report; who watches sees it.
    pub fn change(&self, change: impl FnOnce(&mut Report)) {
        self.sender.send_modify(change);
    }

    /// The report as it stands.
    pub fn read(&self) -> Report {
        self.sender.borrow().clone()
    }

    /// The last change: the report goes to the history, and who watches learns that it has ended. What becomes known of it
    /// later may follow.
    pub fn end(&self, change: impl FnOnce(&mut Report)) {
        let mut report = self.read();
        change(&mut report);
        self.registry.keep(&report);
        self.sender.send_replace(report);
        self.registry.live().remove(&self.id);
    }
}
