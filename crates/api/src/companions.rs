use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Containers of a node that belong together: whoever empties the node moves them to one and the same other node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Companions {
    /// The names of all of them.
    pub containers: Vec<String>,
    /// Those among them that move as a whole: each set shares namespaces, belongs to one pod, or has open connections with each
    /// other over a network that ends at the node.
    pub as_a_whole: Vec<Vec<String>>,
    /// Those among them that hold a pod's namespaces: they do not move, but are made anew where the pod goes.
    pub made_anew: Vec<String>,
}
