//! What moves have left on this node that no move owns any more.
//!
//! Agents that were killed leave nothing for long: the next one finds the journal, and finishes or undoes. What is looked for here
//! is left where the journal was lost, or where something could not be removed and was forgotten. Each migration has a
//! journal from before its first action until after its last, so the journals tell what is owned: they are read before the
//! search and after it, so that a move which begins or ends meanwhile is not taken for a leftover.
//!
//! It is removed in an order in which nothing is deleted that something else still uses: a migration's processes, mounts and
//! directory; then what an engine knows of a copy that was never let go; then the network namespace.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tranship_api::{Leftover, LeftoverKind};
use tranship_coordinator::{Failure, Journal, Record};
use tranship_criu::front;
use tranship_engine::{Container, Engine, EngineError, Mark, State, Summary};
use tranship_memory::pager::{self, PagerHandle};
use tranship_network::cni::HeldReservation;
use tranship_network::{Gate, cni};
use tranship_storage::carried::Target;
use tranship_sys::process;
use tranship_types::{MigrationId, Side};

use crate::arrivals::Context;
use crate::damaged::DamagedMove;
use crate::destination;
use crate::held::{self, StrayHolder};
use crate::layout::{Layout, Role};
use crate::node::{Node, failed};
use crate::paths;
use crate::trees::Note;
use crate::wrapper;

/// Where named network namespaces are.
const NAMESPACES: &str = "/run/netns";
/// How long a dump or restore that nobody waits for may take to end.
const END: Duration = Duration::from_secs(60);
/// How long a pager may take to say how it stands.
const ANSWER: Duration = Duration::from_secs(2);

/// What there is, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Thing {
    /// Of this migration, damaged.
    Journal(MigrationId),
    Migration(MigrationId),
    /// On the container of this id, for a migration.
    Mark(String, PathBuf),
    /// What was copied for a migration.
    Copy(MigrationId),
    /// Of the container of this name.
    Bundle(String),
    Namespace(PathBuf),
    /// Of this container's namespace.
    Gate(String, PathBuf),
    Frozen(String),
    /// Of which there is no record.
    Held(HeldReservation),
    /// The same in an engine.
    Holder(StrayHolder),
    /// The VXLAN device of this number, of which there is no record.
    Path(u32),
    /// In a process of the container of this name, under this number.
    Userfaultfd {
        container: String,
        pid: u32,
        number: i32,
    },
}

impl Thing {
    fn kind(&self) -> LeftoverKind {
        match self {
            Self::Journal(_) => LeftoverKind::Journal,
            Self::Migration(_) => LeftoverKind::Migration,
            Self::Mark(..) => LeftoverKind::Mark,
            Self::Copy(_) => LeftoverKind::Copy,
            Self::Bundle(_) => LeftoverKind::Bundle,
            Self::Namespace(_) => LeftoverKind::Namespace,
            Self::Gate(..) => LeftoverKind::Gate,
            Self::Frozen(_) => LeftoverKind::Container,
            Self::Held(_) | Self::Holder(_) => LeftoverKind::Address,
            Self::Path(_) => LeftoverKind::Path,
            Self::Userfaultfd { .. } => LeftoverKind::Userfaultfd,
        }
    }

    fn name(&self, node: &Node) -> String {
        match self {
            Self::Journal(id) => {
                let of = |damaged: &DamagedMove| match damaged.container() {
                    Some(container) => format!("{id} (container {container})"),
                    None => damaged.path().display().to_string(),
                };
                node.damaged.get(id).map_or(id.to_string(), |damaged| of(&damaged))
            }
            Self::Migration(id) => Layout::new(&node.config.run_dir, id).root().display().to_string(),
            Self::Copy(id) => {
                let targets = Note::read(node, id).unwrap_or_default();
                let copies = targets.iter().filter_map(Target::staging).map(|path| path.display().to_string());
                Some(copies.collect::<Vec<_>>().join(", ")).filter(|all| !all.is_empty()).unwrap_or(id.to_string())
            }
            Self::Bundle(name) => node.bundle(name).display().to_string(),
            Self::Namespace(path) => path.display().to_string(),
            Self::Mark(name, _) | Self::Gate(name, _) | Self::Frozen(name) => name.clone(),
            Self::Held(HeldReservation { network, address, container }) => {
                format!("{address} in CNI's network {network}, held for {container}")
            }
            Self::Holder(StrayHolder { engine, name, container, .. }) => {
                format!("container {name} of {engine}, which holds addresses for {container}")
            }
            Self::Path(id) => tranship_network::vxlan_name(*id),
            Self::Userfaultfd { container, pid, number } => {
                format!("descriptor {number} of process {pid} of container {container}")
            }
        }
    }

    /// Why it cannot be removed without somebody who knows more.
    fn obstacle(&self, node: &Node) -> Option<String> {
        match self {
            Self::Journal(id) => node.damaged.get(id).map(|damaged| damaged.explanation()),
            Self::Migration(id) => {
                let layout = Layout::new(&node.config.run_dir, id);
                serves(&layout)
                    .then(|| "its pager still supplies a running container with its memory; wait for it".to_owned())
            }
            Self::Namespace(path) => {
                let pids = tranship_network::processes(path).unwrap_or_default();
                let pid = pids.first()?;
                Some(format!("process {pid} is in it; end it, then run this again"))
            }
            Self::Frozen(name) => Some(format!(
                "nobody here knows whether {name} runs elsewhere by now: if it does, delete it (`runc delete --force`), else \
                 resume it (`runc resume`) and run this again"
            )),
            Self::Copy(id) => {
                let targets = Note::read(node, id).ok()?;
                let replaced = |target: &&Target| target.is_placed() && target.staging().is_some_and(Path::exists);
                let target = targets.iter().find(replaced)?;
                let (path, before) = (target.path().display(), target.staging()?.display());
                Some(format!(
                    "{path} has the files that came with a move, and {before} those from before it; nobody here knows whether it was \
                     decided: remove {before}, or remove {path} and give {before} its name; then run this again"
                ))
            }
            Self::Bundle(name) => {
                let text = std::fs::read(node.bundle(name).join("config.json")).ok()?;
                let config = serde_json::from_slice(&text).ok()?;
                node.engines().any(|engine| engine.occupied(&config)).then(|| {
                    format!(
                        "processes are in the cgroup of {name}, which no engine knows; end them, then run this again"
                    )
                })
            }
            Self::Userfaultfd { container, pid, number } => Some(format!(
                "it stands in the way of every move of {container}: restart the container, or have the process close it (`gdb -p {pid} -batch \
                 -ex 'call (int) close({number})'`)"
            )),
            Self::Mark(..) | Self::Gate(..) | Self::Held(_) | Self::Holder(_) | Self::Path(_) => None,
        }
    }

    fn remove(&self, node: &Node) -> Result<(), Failure> {
        match self {
            Self::Migration(id) => {
                let layout = Layout::new(&node.config.run_dir, id);
                for role in [Role::Restore, Role::Dump] {
                    layout.end_front(role, END)?;
                }
                if let Ok(pager) = PagerHandle::connect(layout.root()) {
                    pager.quit().map_err(failed)?;
                }
                layout.remove()
            }
            Self::Mark(id, _) => {
                Mark::take_off(id);
                Ok(())
            }
            Self::Copy(id) => {
                Note::read(node, id)?.iter().try_for_each(Target::discard).map_err(failed)?;
                Note::remove(node, id)
            }
            Self::Bundle(name) => {
                let bundle = node.bundle(name);
                for engine in node.engines() {
                    destination::sweep(&**engine, name, &bundle)?;
                    engine.discard(name, &bundle).map_err(failed)?;
                }
                tranship_storage::remove_tree(&bundle).map_err(failed)
            }
            Self::Namespace(path) => {
                // A move gives it the container's name or another one of its own; its reservations come and go with it.
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                cni::attachments(&name, path).and_then(|attached| cni::detach(path, &attached)).map_err(failed)?;
                tranship_network::remove(path).map_err(failed)
            }
            Self::Held(HeldReservation { network, address, container }) => {
                cni::release_held(container, network, *address).map_err(failed)
            }
            Self::Holder(stray) => held::remove_stray(node, stray),
            Self::Path(id) => paths::remove_stray(node, *id),
            Self::Gate(_, path) => Gate::prepare(path, &[]).and_then(|mut gate| gate.open()).map_err(failed),
            Self::Journal(_) | Self::Frozen(_) | Self::Userfaultfd { .. } => Ok(()),
        }
    }
}

/// Whether a migration's pager has let tasks go that still wait for pages.
fn serves(layout: &Layout) -> bool {
    let status = PagerHandle::connect(layout.root()).and_then(|pager| pager.status(ANSWER));
    let runs = || front::resumed_init(&layout.front_socket(Role::Restore)).is_some();
    status.is_ok_and(|status: pager::Status| !status.drained && (status.restored || runs()))
}

/// What the journals say is in use.
#[derive(Default)]
struct Owned {
    ids: HashSet<String>,
    containers: HashSet<String>,
    namespaces: HashSet<PathBuf>,
    /// There is a journal that does not say which container it is about.
    unknown: bool,
}

impl Owned {
    fn add_all(&mut self, node: &Node) {
        for path in Journal::list(&node.journals()) {
            self.ids.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
            let first = match Journal::read(&path) {
                Ok(records) => records.into_iter().next(),
                Err(damaged) => damaged.begin,
            };
            match first {
                Some(Record::Begin { side, container, context, .. }) => self.add(node, side, container, &context),
                // Its members have journals of their own.
                Some(Record::Group { .. }) => {}
                // One that is just being made, or has just gone, owns nothing yet, or no more.
                _ => self.unknown |= path.exists(),
            }
        }
        for damaged in node.damaged.all() {
            self.ids.insert(damaged.id().to_string());
            match damaged.first() {
                Some((side, container, context)) => self.add(node, side, container.to_owned(), context),
                None => self.unknown = true,
            }
        }
    }

    fn add(&mut self, node: &Node, side: Side, container: String, context: &serde_json::Value) {
        for engine in node.engines() {
            self.namespaces.extend(engine.inspect(&container).ok().and_then(|c| c.network_namespace()));
            if side == Side::Destination
                && let Ok(Context { offer, .. }) = Context::deserialize(context)
                && let Some((path, _)) = offer.network
            {
                self.namespaces.insert(destination::place_network(&**engine, &container, &path));
            }
        }
        self.containers.insert(container);
    }

    fn has(&self, thing: &Thing) -> bool {
        match thing {
            Thing::Journal(_) | Thing::Held(_) | Thing::Holder(_) | Thing::Path(_) => false,
            Thing::Migration(id) | Thing::Copy(id) => self.ids.contains(id.as_str()),
            Thing::Mark(_, directory) => {
                directory.file_name().is_some_and(|name| self.ids.contains(&*name.to_string_lossy()))
            }
            Thing::Bundle(name) | Thing::Frozen(name) => self.unknown || self.containers.contains(name),
            Thing::Userfaultfd { container, .. } => self.unknown || self.containers.contains(container),
            Thing::Gate(name, path) => self.unknown || self.containers.contains(name) || self.namespaces.contains(path),
            Thing::Namespace(path) => self.unknown || self.namespaces.contains(path),
        }
    }
}

/// Whether somebody has closed the gate of a namespace, wholly or in part. One that cannot be looked at has none.
fn gated(namespace: &Path) -> bool {
    Gate::prepare(namespace, &[]).and_then(|mut gate| gate.is_there()).unwrap_or(false)
}

/// A program that opens a userfaultfd agrees with the kernel on its version next (UFFDIO_API). One with which that was not done was opened for
/// a move by an agent that could not close it again.
fn stray_userfaultfds(container: &Container) -> Vec<Thing> {
    /// An agent that looks at a running container has one open for less.
    const MOMENT: Duration = Duration::from_millis(100);
    let look = || -> HashSet<Thing> {
        let strays = |pid: u32| {
            let numbers = entries(Path::new(&format!("/proc/{pid}/fd"))).filter_map(|name| name.parse().ok());
            let container = container.name.clone();
            numbers
                .filter(move |number| process::is_unused_userfaultfd(pid, *number))
                .map(move |number| Thing::Userfaultfd { container: container.clone(), pid, number })
        };
        container.processes().unwrap_or_default().into_iter().flat_map(strays).collect()
    };
    let mut found = look();
    if !found.is_empty() {
        std::thread::sleep(MOMENT);
        let still = look();
        found.retain(|thing| still.contains(thing));
    }
    found.into_iter().collect()
}

fn entries(directory: &Path) -> impl Iterator<Item = String> + use<> {
    std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
}

/// Everything of a kind that a move makes, whoever owns it.
fn everything(node: &Node) -> Result<Vec<Thing>, EngineError> {
    let run_dir = &node.config.run_dir;
    let mut all: Vec<Thing> =
        entries(&run_dir.join("migrations")).filter_map(|name| Some(Thing::Migration(name.parse().ok()?))).collect();
    all.extend(node.damaged.all().iter().map(|damaged| Thing::Journal(damaged.id().clone())));
    let directory = |mark: &Mark| mark.images().images.parent().map(Path::to_owned).unwrap_or_default();
    all.extend(Mark::all().into_iter().map(|(id, mark)| Thing::Mark(id, directory(&mark))));
    all.extend(Note::all(node).into_iter().map(Thing::Copy));
    all.extend(held::unrecorded(node).into_iter().map(Thing::Held));
    all.extend(held::strays(node).into_iter().map(Thing::Holder));
    all.extend(paths::strays(node).into_iter().map(Thing::Path));
    let mut known = Vec::new();
    for engine in node.engines() {
        // One that its engine takes for one that was never started may run.
        let there = |summary: Summary| {
            let container = engine.inspect(&summary.name).ok()?;
            (summary.state != State::Created || container.state == State::Running).then_some(container)
        };
        known.extend(engine.list()?.into_iter().filter_map(there));
    }
    let bundles = entries(&run_dir.join("bundles"));
    all.extend(bundles.filter(|name| known.iter().all(|c| c.name != *name)).map(Thing::Bundle));
    all.extend(known.iter().flat_map(stray_userfaultfds));
    let mut inhabited = HashSet::new();
    for container in known.iter().filter(|container| container.init != 0) {
        let Some(namespace) = container.network_namespace() else { continue };
        if gated(&namespace) {
            all.push(match container.freezer.is_frozen() {
                Ok(true) => Thing::Frozen(container.name.clone()),
                _ => Thing::Gate(container.name.clone(), namespace.clone()),
            });
        }
        inhabited.insert(namespace);
    }
    let namespaces = entries(Path::new(NAMESPACES)).map(|name| Path::new(NAMESPACES).join(name));
    // Those of holders are there while these are started.
    let namespaces = namespaces.filter(|path| !tranship_engine::is_holder_namespace(path));
    all.extend(namespaces.filter(|path| !inhabited.contains(path) && gated(path)).map(Thing::Namespace));
    Ok(all)
}

/// What no move owns, in the order in which it is removed.
fn unowned(node: &Node) -> Result<Vec<Thing>, EngineError> {
    let mut owned = Owned::default();
    owned.add_all(node);
    let mut things = everything(node)?;
    owned.add_all(node);
    things.retain(|thing| !owned.has(thing) && !is_swept(node, thing));
    things.sort_by_key(Thing::kind);
    Ok(things)
}

/// Removes what the agent has kept beside a container that came to an engine with records of its own, once the user has
/// removed that container there: nothing that a user would have to look after. Volumes and networks that were made for
/// it stay. Whether it did.
fn is_swept(node: &Node, thing: &Thing) -> bool {
    let Thing::Bundle(name) = thing else { return false };
    let is_unknown =
        |engine: &Arc<dyn Engine>| matches!(engine.inspect(name), Err(EngineError::NoSuchContainer { .. }));
    wrapper::is_of_engine(&node.bundle(name))
        && node.engines().all(is_unknown)
        && thing.obstacle(node).is_none()
        && tranship_engine::keep_what_was_made(&node.bundle(name)).is_ok()
        && thing.remove(node).is_ok()
}

fn leftover(thing: &Thing, name: String, removed: bool, note: Option<String>) -> Leftover {
    Leftover { kind: thing.kind(), name, removed, warning: false, note: note.unwrap_or_default() }
}

/// What moves have left on this node.
///
/// # Errors
/// An engine that does not say which containers there are.
pub fn leftovers(node: &Node) -> Result<Vec<Leftover>, EngineError> {
    Ok(unowned(node)?.iter().map(|thing| leftover(thing, thing.name(node), false, thing.obstacle(node))).collect())
}

/// Removes what moves have left; all that was found, with what became of it.
///
/// # Errors
/// As [`leftovers`].
pub fn remove_leftovers(node: &Node) -> Result<Vec<Leftover>, EngineError> {
    let (mut seen, mut all) = (HashSet::new(), Vec::new());
    // What is left may change with each that is removed: a held copy ends with its front, and its bundle is nobody's then.
    while let Some(thing) = unowned(node)?.into_iter().find(|thing| !seen.contains(thing)) {
        // While it is there to be asked.
        let name = thing.name(node);
        let note = thing.obstacle(node).or_else(|| thing.remove(node).err().map(|failure| failure.message));
        tracing::info!(?thing, ?note, "a leftover");
        let stuck = note.is_some() && thing.kind() == LeftoverKind::Migration;
        all.push(leftover(&thing, name, note.is_none(), note));
        seen.insert(thing);
        if stuck {
            // Whatever else there is may belong to its processes.
            break;
        }
    }
    Ok(all)
}
