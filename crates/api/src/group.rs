use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tranship_types::{Blocker, GroupOrder, MoveOptions, NodeName};
use utoipa::ToSchema;

use crate::Plan;

/// A container of a group, as it is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupContainer {
    /// Where to; absent where it is the group's own destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<NodeName>,
    /// The containers of the group that are to move before it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(required = false)]
    pub depends_on: BTreeSet<String>,
}

/// A label that containers have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Label {
    /// Its name.
    pub key: String,
    /// Its value.
    pub value: String,
}

impl Label {
    /// The name of the label that Compose gives to the containers of a project.
    pub const COMPOSE_PROJECT: &str = "com.docker.compose.project";
    /// That of a container's service in the project.
    pub const COMPOSE_SERVICE: &str = "com.docker.compose.service";
    /// That of the services that it depends on.
    pub const COMPOSE_DEPENDS_ON: &str = "com.docker.compose.depends_on";
}

/// The wish to move several containers in the order of what they depend on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupRequest {
    /// The containers by their names on this node.
    #[serde(default)]
    #[schema(required = false)]
    pub containers: BTreeMap<String, GroupContainer>,
    /// All running containers with this label, too. What Compose's labels say of dependencies is taken over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<Label>,
    /// Where to, for those that name no other node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<NodeName>,
    /// Where to instead, by the containers' names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    pub map: BTreeMap<String, NodeName>,
    /// Names in levels, which take the place of all dependencies: nothing of a level moves before all of the one before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub levels: Vec<Vec<String>>,
    /// Names in levels in which containers are frozen, where all move or none does: nothing of a level before all of the one
    /// before it. Without them each is frozen before what it depends on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub stop_levels: Vec<Vec<String>>,
    /// How the moves follow each other.
    #[serde(default)]
    #[schema(required = false)]
    pub order: GroupOrder,
    /// How each is moved.
    #[serde(flatten)]
    pub options: MoveOptions,
}

/// What moving a group would do, found out without touching anything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GroupPlan {
    /// Where from.
    pub from: NodeName,
    /// How the moves would follow each other.
    pub order: GroupOrder,
    /// The containers, each behind those that it depends on.
    pub members: Vec<MemberPlan>,
}

/// What moving one container of a group would do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemberPlan {
    /// The container.
    pub container: String,
    /// Where to.
    pub to: NodeName,
    /// The containers of the group that would move before it.
    pub after: Vec<String>,
    /// How many levels of others it depends on.
    pub level: usize,
    /// What stands in the way; empty where its move would be tried.
    pub blockers: Vec<Blocker>,
    /// What its move would do; absent where the container could not be looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
}
