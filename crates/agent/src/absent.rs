//! What is said of a container that is not on this node: where it went, or what its name may have been meant to be.

use tranship_types::{Blocker, BlockerKind, NodeName, Outcome, Report};

use crate::node::Node;

/// Names that are proposed, at most.
const PROPOSED: usize = 3;

/// The blocker for a container that none of the engines (`place` says which) has.
pub fn no_such_container(node: &Node, name: &str, place: &str) -> Blocker {
    let here = &node.config.node;
    let cause = format!("there is no container {name:?} in {place} on node {here}");
    if let Some(report) = moved_away(&node.registry.reports(), name, here) {
        let to = &report.destination;
        let cause = format!("{cause}: it was moved to node {to} ({})", report.id);
        return Blocker::new(BlockerKind::NoSuchContainer, cause, format!("run this on node {to}"));
    }
    let names: Vec<String> =
        node.engines().filter_map(|engine| engine.list().ok()).flatten().map(|summary| summary.name).collect();
    let remedy = match near(name, &names).join(" or ") {
        none if none.is_empty() => "`tranship ls` shows those that there are".to_owned(),
        some => format!("did you mean {some}? `tranship ls` shows all that there are"),
    };
    Blocker::new(BlockerKind::NoSuchContainer, cause, remedy)
}

/// The move by which a container has left this node, if nothing has happened to it since that this node knows of.
fn moved_away<'r>(newest_first: &'r [Report], name: &str, here: &NodeName) -> Option<&'r Report> {
    let moved = |report: &&Report| report.container == name && report.outcome == Outcome::Moved;
    newest_first.iter().find(moved).filter(|report| report.source == *here)
}

/// The names that look most like this one, the likeliest first.
fn near<'n>(name: &str, names: &'n [String]) -> Vec<&'n str> {
    // A typing error for each three letters; or a part of a longer name, as Compose makes them.
    let errors = (name.chars().count() / 3).max(1);
    let part = |other: &str| name.len() >= 3 && other.contains(name);
    let distance = |other: &str| strsim::osa_distance(&name.to_lowercase(), &other.to_lowercase());
    let mut near: Vec<_> = names
        .iter()
        .map(|other| (distance(other), other.as_str()))
        .filter(|(distance, other)| *distance <= errors || part(other))
        .collect();
    near.sort_unstable();
    near.dedup();
    near.into_iter().take(PROPOSED).map(|(_, other)| other).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::Mode;

    #[test]
    fn names_that_are_nearly_right_are_proposed() {
        let names = ["redis", "redis-2", "shop-db-1", "web"].map(str::to_owned);
        assert_eq!(near("redsi", &names), ["redis"]);
        assert_eq!(near("Redis", &names), ["redis", "redis-2"][..1]);
        assert_eq!(near("redis2", &names), ["redis", "redis-2"]);
        assert_eq!(near("shop", &names), ["shop-db-1"]);
        assert_eq!(near("wbe", &names), ["web"]);
        assert!(near("postgres", &names).is_empty() && near("x", &names).is_empty());
    }

    #[test]
    fn it_is_said_where_a_container_went_unless_it_came_back_since() {
        let (a, b): (NodeName, NodeName) = ("a".parse().unwrap(), "b".parse().unwrap());
        let report = |id: &str, from: &NodeName, to: &NodeName, outcome| Report {
            outcome,
            ..Report::new(id.parse().unwrap(), "kv".to_owned(), from.clone(), to.clone(), Mode::Auto, 0)
        };
        let left = report("m-1", &a, &b, Outcome::Moved);
        let came = report("m-2", &b, &a, Outcome::Moved);
        let failed = report("m-3", &b, &a, Outcome::Failed);
        let found = |reports: &[Report]| moved_away(reports, "kv", &a).map(|report| report.id.to_string());
        assert_eq!(found(std::slice::from_ref(&left)), Some("m-1".to_owned()));
        assert_eq!(found(&[failed, left.clone()]), Some("m-1".to_owned()));
        assert_eq!(found(&[came, left.clone()]), None);
        assert!(moved_away(&[left], "web", &a).is_none());
    }
}
