//! Pods: containers that share namespaces which a further container holds.
//!
//! That container, the infra container, is made anew on the destination. What the namespaces and the `/dev/shm` hold that it shares with the others is brought
//! by one of these, which brings the pod: the others are restored when it is there.
//!
//! ```text
//!   pod         infra container started ─▶ /dev/shm mounted there
//!   its bringer ─ files in /dev/shm complete ─▶ criu: IPC objects made ─▶ its tasks …
//!   the others                                          └─▶ criu: objects found ─▶ their tasks …
//! ```

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tranship_criu::preflight;
use tranship_engine::{Container, Pod};
use tranship_sys::{process, shared_namespaces};
use tranship_types::{Blocker, BlockerKind};

/// The kinds of namespaces that members of a unit may share: those of a pod, or of containers that share a network.
pub fn shared_kinds(pod: Option<&Pod>) -> &'static [&'static str] {
    match pod {
        Some(_) => &["network", "IPC", "UTS"],
        None => &["network"],
    }
}

/// The other containers of a container's pod that would not move with it: `others` would.
pub fn incomplete(pod: &Pod, name: &str, others: &[String]) -> Option<Blocker> {
    if !pod.members.iter().any(|member| member == name) {
        let cause =
            format!("container {name} holds the namespaces of pod {}, and is made anew where that goes", pod.name);
        let remedy =
            format!("move the containers of the pod ({}; `tranship move-group --atomic`)", pod.members.join(", "));
        return Some(Blocker::new(BlockerKind::Engine, cause, remedy));
    }
    let stays = |member: &&String| member.as_str() != name && !others.contains(member);
    let stay: Vec<&str> = pod.members.iter().filter(stays).map(String::as_str).collect();
    if stay.is_empty() {
        return None;
    }
    let cause =
        format!("container {name} belongs to pod {}, which moves as a whole: with it {}", pod.name, stay.join(", "));
    let remedy = "move all of them together (`tranship move-group --atomic`)";
    Some(Blocker::new(BlockerKind::Engine, cause, remedy))
}

/// What stands in the way of a pod's move, seen from one of its containers that runs.
pub fn obstacles(pod: &Pod, container: &Container, others: &[Container]) -> Vec<Blocker> {
    let mut found = pod.obstacles.clone();
    let host_name = shared_namespaces::host_name(container.init);
    if container.joins_namespace("uts") && host_name.as_ref().is_ok_and(|name| *name != pod.host_name) {
        let cause = format!(
            "the host name of pod {} was changed to {}, and would be {} again",
            pod.name,
            host_name.unwrap_or_default().escape_default(),
            pod.host_name
        );
        found.push(Blocker::new(BlockerKind::Process, cause, "set it back"));
    }
    found.extend(left_behind(Some(pod), container));
    found.extend(removed_files(pod, container, others));
    found.extend(renamed_files(pod, container, others));
    found
}

/// What a container has in an IPC namespace that it has joined, and does not move with it: outside of a pod System V objects, too.
pub fn left_behind(pod: Option<&Pod>, container: &Container) -> Option<Blocker> {
    if !container.joins_namespace("ipc") {
        return None;
    }
    let name = &container.name;
    let queues = format!("/proc/{}/root/dev/mqueue", container.init);
    let has_queues = preflight::has_message_queues(Path::new(&queues));
    let objects = match pod {
        Some(_) => Ok(Vec::new()),
        None => shared_namespaces::ipc_objects(container.init),
    };
    let what = match objects {
        Ok(found) if found.is_empty() && !has_queues => return None,
        Ok(found) => {
            found.into_iter().chain(has_queues.then_some("POSIX message queues")).collect::<Vec<_>>().join(", ")
        }
        Err(error) => format!("objects that cannot be listed ({error})"),
    };
    let cause =
        format!("the IPC namespace that container {name} shares with others has {what}, which do not move with it");
    let remedy = match pod {
        Some(_) => "remove them (in /dev/mqueue), or make the pod without a shared IPC namespace (`--share net,uts`)",
        None => "end the programs that use them, or give the container an IPC namespace of its own",
    };
    Some(Blocker::new(BlockerKind::Process, cause, remedy))
}

/// Files in the `/dev/shm` of a pod that are removed and that processes of several containers have. CRIU restores each container by itself, and would give
/// each a file of its own.
pub fn removed_files(pod: &Pod, container: &Container, others: &[Container]) -> Option<Blocker> {
    let place = pod.shared_memory(container)?;
    let device = device_of(container, &place)?;
    let removed = |container: &Container| nameless_of(container, device).removed;
    let own = removed(container);
    let with = others.iter().find(|other| !removed(other).is_disjoint(&own))?;
    let cause = format!(
        "processes of the containers {} and {} share a file in {} that has been removed",
        container.name,
        with.name,
        place.display()
    );
    Some(Blocker::new(BlockerKind::Mount, cause, "remove it when nobody uses it any more"))
}

/// A file in the `/dev/shm` of a pod of several containers that is used by a name that is gone while it has another
/// one. CRIU makes a name of its own for it there in each dump, which may come after the files have been sent.
fn renamed_files(pod: &Pod, container: &Container, others: &[Container]) -> Option<Blocker> {
    let place = pod.shared_memory(container)?;
    let is_used = !others.is_empty() && nameless_of(container, device_of(container, &place)?).is_renamed;
    is_used.then(|| {
        let (name, place) = (&container.name, place.display());
        let cause = format!("container {name} uses a file in {place} by a name that is gone, as after sem_open");
        let remedy =
            "give the container a /dev/shm of its own (`--tmpfs /dev/shm`), if the others do not need the file";
        Blocker::new(BlockerKind::Mount, cause, remedy)
    })
}

/// The device of the filesystem that is mounted at a path in a container.
fn device_of(container: &Container, place: &Path) -> Option<u64> {
    Some(std::fs::metadata(format!("/proc/{}/root{}", container.init, place.display())).ok()?.dev())
}

/// The files of a filesystem that a container's processes have open or mapped by a name that is gone.
#[derive(Default)]
struct Nameless {
    /// Inodes of those that have no name any more.
    removed: HashSet<u64>,
    /// Whether there are others, which have another name.
    is_renamed: bool,
}

fn nameless_of(container: &Container, device: u64) -> Nameless {
    let mut found = Nameless::default();
    let mut add = |path: PathBuf| match std::fs::metadata(path) {
        Ok(file) if (file.dev(), file.nlink()) == (device, 0) => drop(found.removed.insert(file.ino())),
        Ok(file) => found.is_renamed |= file.dev() == device,
        Err(_) => {}
    };
    for pid in container.processes().unwrap_or_default() {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let is_gone = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|name| name.as_os_str().as_bytes().ends_with(b" (deleted)"))
        };
        open.map(|entry| entry.path()).filter(is_gone).for_each(&mut add);
        let mapped = process::mappings(pid).into_iter().flatten().flatten().filter(|line| line.ends_with(" (deleted)"));
        for line in mapped {
            let range = line.split(' ').next().unwrap_or_default();
            add(format!("/proc/{pid}/map_files/{range}").into());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_moves_as_a_whole() {
        let pod = Pod::for_test("p", &["web", "db"]);
        assert!(incomplete(&pod, "web", &["db".into()]).is_none());
        let said = incomplete(&pod, "web", &[]).unwrap().to_string();
        let of_infra = incomplete(&pod, "p-infra", &[]).unwrap().to_string();
        assert!(
            of_infra.contains("p-infra holds the namespaces of pod p") && of_infra.contains("web, db"),
            "{of_infra}"
        );
        assert!(said.contains("container web belongs to pod p") && said.contains("with it db;"), "{said}");
    }
}
