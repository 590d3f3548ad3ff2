//! Pods: containers that share namespaces which a further container holds.
//!
//! That container, the infra container, is made anew on the destination. What the shared namespaces hold but the network does not move.

use std::path::Path;

use tranship_engine::{Container, Pod};
use tranship_sys::shared_namespaces;
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
pub fn obstacles(pod: &Pod, container: &Container) -> Vec<Blocker> {
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
    found.extend(left_behind(container));
    found
}

/// What a container has in an IPC namespace that it has joined. CRIU restores it into a namespace that is there already, and that has none of this.
pub fn left_behind(container: &Container) -> Option<Blocker> {
    if !container.joins_namespace("ipc") {
        return None;
    }
    let name = &container.name;
    let queues = format!("/proc/{}/root/dev/mqueue", container.init);
    let has_queues = std::fs::read_dir(Path::new(&queues)).is_ok_and(|mut queues| queues.next().is_some());
    let what = match shared_namespaces::ipc_objects(container.init) {
        Ok(found) if found.is_empty() && !has_queues => return None,
        Ok(found) => {
            found.into_iter().chain(has_queues.then_some("POSIX message queues")).collect::<Vec<_>>().join(", ")
        }
        Err(error) => format!("objects that cannot be listed ({error})"),
    };
    let cause =
        format!("the IPC namespace that container {name} shares with others has {what}, which do not move with it");
    let remedy = "end the programs that use them, or make the pod without a shared IPC namespace (`--share net,uts`)";
    Some(Blocker::new(BlockerKind::Process, cause, remedy))
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
