//! Claims on containers: of the migrations and plans of a node, one at a time has a container.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use tranship_types::MigrationId;

use crate::sync::{Mutex, MutexGuard};

/// What has a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    Migration(MigrationId),
    Plan,
}

/// The containers that are claimed, by their names.
#[derive(Default)]
pub struct Claims(Mutex<HashMap<String, Holder>>);

/// A container's being taken by a migration or a plan; given back on drop.
pub struct Claim {
    claims: Arc<Claims>,
    container: String,
}

impl Claims {
    fn map(&self) -> MutexGuard<'_, HashMap<String, Holder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a container.
    ///
    /// # Errors
    /// The holder that has it.
    pub fn take(self: &Arc<Self>, container: &str, holder: Holder) -> Result<Claim, Holder> {
        let mut map = self.map();
        if let Some(other) = map.get(container) {
            return Err(other.clone());
        }
        map.insert(container.to_owned(), holder);
        Ok(Claim { claims: Arc::clone(self), container: container.to_owned() })
    }

    /// The holder of a container, if it is claimed.
    pub fn holder(&self, container: &str) -> Option<Holder> {
        self.map().get(container).cloned()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.map().remove(&self.container);
    }
}
