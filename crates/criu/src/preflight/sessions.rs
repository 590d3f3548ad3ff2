//! Sessions and process groups that CRIU cannot restore.
//!
//! A process cannot enter a session: it leads one of its own or has that in which it was born. CRIU therefore has each process fork its
//! children before or after it begins its session (pstree.c, `prepare_pstree_ids`; cr-restore.c, `create_children_and_session`):
//!
//! 1. Children of the first process that are in another session are forked by a helper, which ends, so that the first process inherits
//!    them: a child of the leader, or, where the leader has ended, one that takes its place.
//! 2. Of any other process in another session than its parent, an ancestor must lead that session. Those in between are born in it.
//!
//! Here the same is done with numbers. What does not end up in its session was inherited by another process than the first one
//! (`PR_SET_CHILD_SUBREAPER`).

use std::collections::{BTreeMap, BTreeSet};

/// A process in the eyes of the rules; its number is the key in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub parent: u32,
    pub session: u32,
    pub group: u32,
}

/// Why a process cannot be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Obstacle {
    /// It would be born in another session than its own.
    Session,
    /// The process that its group is named after has gone to another group: CRIU waits for it to lead its group for ever.
    Group,
}

#[derive(Debug)]
struct Node {
    parent: Option<u32>,
    session: u32,
    /// The session in which it must be forked, where that is not its own.
    born: Option<u32>,
    helper: bool,
}

/// The processes that cannot be restored, by their numbers. A process whose parent is unknown counts as a child of `first`.
pub(super) fn obstacles(first: u32, processes: &BTreeMap<u32, Process>) -> BTreeMap<u32, Obstacle> {
    let mut found = BTreeMap::new();
    for (pid, process) in processes {
        let leader = processes.get(&process.group).filter(|_| process.group != *pid);
        if leader.is_some_and(|leader| leader.group != process.group) {
            found.insert(*pid, Obstacle::Group);
        }
    }
    let (mut nodes, apart) = with_helpers(first, processes);
    let mut conflicts = Vec::new();
    for pid in processes.keys().filter(|pid| **pid != first && !apart.contains(pid)) {
        if !mark_ancestors(&mut nodes, *pid) {
            conflicts.push(*pid);
        }
    }
    found.extend(conflicts.into_iter().map(|pid| (pid, Obstacle::Session)));
    for pid in processes.keys().filter(|pid| **pid != first) {
        let node = &nodes[pid];
        if node.session != *pid && birth(&nodes, *pid) != Some(node.session) {
            found.entry(*pid).or_insert(Obstacle::Session);
        }
    }
    found
}

/// The tree with the helpers, and those who are not connected to it yet when CRIU looks for leaders: descendants of helpers that take the
/// place of a leader.
fn with_helpers(first: u32, processes: &BTreeMap<u32, Process>) -> (BTreeMap<u32, Node>, BTreeSet<u32>) {
    let of_first = processes[&first].session;
    let parent = |pid: u32, process: &Process| {
        (pid != first).then(|| if processes.contains_key(&process.parent) { process.parent } else { first })
    };
    let mut nodes: BTreeMap<u32, Node> = processes
        .iter()
        .map(|(pid, process)| {
            let node = Node { parent: parent(*pid, process), session: process.session, born: None, helper: false };
            (*pid, node)
        })
        .collect();
    let mut free = processes.iter().flat_map(|(pid, process)| [*pid, process.session]).max().unwrap_or(0);
    let mut helpers: BTreeMap<u32, u32> = BTreeMap::new();
    let orphans: Vec<(u32, u32)> = processes
        .iter()
        .filter(|(pid, process)| nodes[pid].parent == Some(first) && ![of_first, **pid].contains(&process.session))
        .map(|(pid, process)| (*pid, process.session))
        .collect();
    for (pid, session) in orphans {
        let helper = *helpers.entry(session).or_insert_with(|| {
            let (helper, parent) = match processes.contains_key(&session) {
                true => {
                    free += 1;
                    (free, session)
                }
                false => (session, first),
            };
            nodes.insert(helper, Node { parent: Some(parent), session, born: None, helper: true });
            helper
        });
        if let Some(node) = nodes.get_mut(&pid) {
            node.parent = Some(helper);
        }
    }
    let is_apart = |pid: u32| {
        let ancestors = std::iter::successors(Some(pid), |pid| nodes[pid].parent);
        ancestors.take(nodes.len()).any(|pid| nodes[&pid].helper && nodes[&pid].session == pid)
    };
    let apart = processes.keys().copied().filter(|pid| is_apart(*pid)).collect();
    (nodes, apart)
}

/// Has the ancestors of a process that is in another session than its parent be born in that, up to the one that leads it. `false` if none
/// does, or if one of them must be born in another session already.
fn mark_ancestors(nodes: &mut BTreeMap<u32, Node>, pid: u32) -> bool {
    let session = nodes[&pid].session;
    let parent = nodes[&pid].parent;
    if session == pid || parent.is_some_and(|parent| nodes[&parent].session == session) {
        return true;
    }
    let ancestors = std::iter::successors(parent, |pid| nodes[pid].parent).take(nodes.len());
    let between: Vec<u32> = ancestors.take_while(|pid| *pid != session).collect();
    let is_led = between.last().is_some_and(|last| nodes[last].parent == Some(session));
    let is_free = |pid: &u32| nodes[pid].born.is_none_or(|born| born == session);
    if !is_led || !between.iter().all(is_free) {
        return false;
    }
    for pid in between {
        nodes.entry(pid).and_modify(|node| node.born = Some(session));
    }
    true
}

/// The session in which a process is forked.
fn birth(nodes: &BTreeMap<u32, Node>, pid: u32) -> Option<u32> {
    let mut child = &nodes[&pid];
    // Up to the ancestor that forks its child in its own session.
    for _ in 0..nodes.len() {
        let parent = &nodes[&child.parent?];
        if parent.born != Some(child.born.unwrap_or(child.session)) {
            return Some(parent.session);
        }
        child = parent;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of rows of a process's number, its parent, session and group.
    fn rejected(rows: &[[u32; 4]]) -> Vec<(u32, Obstacle)> {
        let row = |[pid, parent, session, group]: &[u32; 4]| {
            (*pid, Process { parent: *parent, session: *session, group: *group })
        };
        obstacles(1, &rows.iter().map(row).collect()).into_iter().collect()
    }

    const FIRST: [u32; 4] = [1, 0, 1, 1];

    #[test]
    fn children_of_the_first_process_may_be_in_any_session() {
        assert_eq!(rejected(&[FIRST, [2, 1, 1, 1], [3, 1, 3, 3], [4, 1, 3, 3], [5, 1, 9, 9], [6, 5, 9, 6]]), []);
    }

    #[test]
    fn processes_that_were_born_before_their_parents_began_a_session_are_restored() {
        assert_eq!(rejected(&[FIRST, [2, 1, 2, 2], [3, 2, 1, 1], [4, 3, 4, 4], [5, 4, 1, 1]]), []);
        // The same below a leader that a helper stands in for.
        assert_eq!(rejected(&[FIRST, [2, 1, 2, 2], [3, 1, 2, 2], [4, 3, 4, 4], [5, 4, 2, 2]]), []);
    }

    #[test]
    fn what_another_process_has_inherited_needs_a_leader_among_its_ancestors() {
        // The leader, 9, has ended; or is none of the ancestors.
        assert_eq!(rejected(&[FIRST, [2, 1, 2, 2], [3, 2, 9, 9]]), [(3, Obstacle::Session)]);
        assert_eq!(rejected(&[FIRST, [2, 1, 2, 2], [3, 1, 3, 3], [4, 2, 3, 3]]), [(4, Obstacle::Session)]);
        // Its parent has not been in its session.
        let kept = [FIRST, [2, 1, 2, 2], [3, 2, 1, 1], [4, 3, 2, 2]];
        assert!(!rejected(&kept).is_empty());
    }

    #[test]
    fn a_parent_is_not_born_in_two_sessions() {
        let rows = [FIRST, [2, 1, 2, 2], [3, 2, 3, 3], [4, 3, 1, 1], [5, 3, 2, 2]];
        assert_eq!(rejected(&rows), [(5, Obstacle::Session)]);
    }

    #[test]
    fn below_a_helper_in_place_of_a_leader_nothing_is_born_before_a_session() {
        // 9 has ended; 4 was forked by 3 before 3 began its session.
        assert_eq!(rejected(&[FIRST, [2, 1, 9, 9], [3, 2, 3, 3], [4, 3, 9, 9]]), [(4, Obstacle::Session)]);
        assert_eq!(rejected(&[FIRST, [2, 1, 9, 9], [3, 2, 9, 9], [4, 3, 4, 4], [5, 4, 4, 5]]), []);
    }

    #[test]
    fn the_process_that_a_group_is_named_after_leads_it_or_has_ended() {
        assert_eq!(rejected(&[FIRST, [2, 1, 1, 2], [3, 1, 1, 2], [4, 1, 1, 8]]), []);
        assert_eq!(rejected(&[FIRST, [2, 1, 1, 1], [3, 1, 1, 2]]), [(3, Obstacle::Group)]);
    }

    #[test]
    fn a_circle_ends() {
        let _ = rejected(&[FIRST, [2, 3, 9, 9], [3, 2, 2, 2]]);
    }
}
