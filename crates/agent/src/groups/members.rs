//! Who belongs to a group: named by the request, or found by a label.

use std::collections::{BTreeMap, BTreeSet};

use tranship_api::{ErrorKind, GroupContainer, GroupRequest, Label, ServiceError};
use tranship_engine::State;
use tranship_types::NodeName;

use crate::node::Node;

type Members = BTreeMap<String, GroupContainer>;

/// All members by name, with what they depend on.
pub fn find(node: &Node, request: &GroupRequest) -> Result<Members, ServiceError> {
    let mut members = request.containers.clone();
    if let Some(label) = &request.label {
        let labelled = labelled(node, label)?;
        if labelled.is_empty() {
            let message =
                format!("no running container on node {} has {}={}", node.config.node, label.key, label.value);
            return Err(ServiceError::new(
                ErrorKind::NotFound,
                message,
                "see the labels in the containers' configuration",
            ));
        }
        for (name, depends_on) in composed(&labelled) {
            members.entry(name).or_default().depends_on.extend(depends_on);
        }
    }
    match request.map.keys().find(|name| !members.contains_key(*name)) {
        Some(stranger) => Err(ServiceError::new(
            ErrorKind::Invalid,
            format!("a destination is given for {stranger}, which is not in the group"),
            "add it to the group, or leave the destination out",
        )),
        None => Ok(members),
    }
}

/// Where a member is to go.
pub fn destination(request: &GroupRequest, name: &str, member: &GroupContainer) -> Result<NodeName, ServiceError> {
    let to = request.map.get(name).or(member.to.as_ref()).or(request.to.as_ref());
    to.cloned().ok_or_else(|| {
        let message = format!("{name} has no destination");
        ServiceError::new(
            ErrorKind::Invalid,
            message,
            "give --to NODE for all, --map NAME=NODE for it, or `to: NODE` in the group file",
        )
    })
}

type Labels = BTreeMap<String, String>;

/// The labels of each running container that has a label.
fn labelled(node: &Node, label: &Label) -> Result<BTreeMap<String, Labels>, ServiceError> {
    let mut found = BTreeMap::new();
    for engine in node.engines() {
        let list = engine.list().map_err(|error| {
            let text = error.to_string();
            let (cause, remedy) = text.split_once("; ").unwrap_or((&text, ""));
            ServiceError::new(ErrorKind::Unusable, cause, remedy)
        })?;
        let running = list.into_iter().filter(|summary| summary.state == State::Running);
        // One that has gone meanwhile is none of the group.
        let labels = running.filter_map(|s| Some((s.name.clone(), engine.inspect(&s.name).ok()?.labels())));
        found.extend(labels.filter(|(_, labels)| labels.get(&label.key) == Some(&label.value)));
    }
    Ok(found)
}

/// What each container depends on by the labels that Compose has given to it: of containers of its own project, those of
/// the services that its service depends on.
fn composed(labelled: &BTreeMap<String, Labels>) -> BTreeMap<String, BTreeSet<String>> {
    let get = |labels: &Labels, key: &str| labels.get(key).cloned().unwrap_or_default();
    let depends_on = |labels: &Labels| -> BTreeSet<String> {
        let services = get(labels, Label::COMPOSE_DEPENDS_ON);
        // `db:service_healthy:true,cache:service_started:false`
        let services: BTreeSet<&str> = services
            .split(',')
            .filter_map(|one| one.split(':').next())
            .map(str::trim)
            .filter(|s| !s.is_empty())
            .collect();
        let project = get(labels, Label::COMPOSE_PROJECT);
        let is_one = |other: &&Labels| {
            get(other, Label::COMPOSE_PROJECT) == project
                && services.contains(get(other, Label::COMPOSE_SERVICE).as_str())
        };
        labelled.iter().filter(|(_, other)| is_one(other)).map(|(name, _)| name.clone()).collect()
    };
    labelled.iter().map(|(name, labels)| (name.clone(), depends_on(labels))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn composes_services_become_containers() {
        let container = |service: &str, project: &str, depends_on: &str| -> Labels {
            [
                (Label::COMPOSE_PROJECT, project),
                (Label::COMPOSE_SERVICE, service),
                (Label::COMPOSE_DEPENDS_ON, depends_on),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
        };
        let labelled = BTreeMap::from([
            ("shop-db-1".to_owned(), container("db", "shop", "")),
            ("shop-app-1".to_owned(), container("app", "shop", "db:service_healthy:true")),
            ("shop-app-2".to_owned(), container("app", "shop", "db:service_healthy:true")),
            ("shop-web-1".to_owned(), container("web", "shop", "app:service_started:false,db:service_started:false")),
            ("blog-db-1".to_owned(), container("db", "blog", "")),
            ("plain".to_owned(), Labels::new()),
        ]);
        let found = composed(&labelled);
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(found["shop-web-1"], names(&["shop-app-1", "shop-app-2", "shop-db-1"]));
        assert_eq!(found["shop-app-2"], names(&["shop-db-1"]));
        assert!(["shop-db-1", "blog-db-1", "plain"].iter().all(|name| found[*name].is_empty()));
    }
}
