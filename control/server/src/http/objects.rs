//! Client access of the control plane to objects: the control plane holds none itself, so the process that starts it
//! may provide a client of the nodes.

use std::fmt;
use std::sync::Arc;

/// Access to the objects. Calls block; they are made on threads that may block.
pub trait Objects: Send + Sync {
    /// Returns the keys of a tenant, as text; at most `most`, and whether there are more.
    ///
    /// # Errors
    /// When no node could be asked.
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), String>;

    /// Removes a tenant's objects, or without a tenant all objects; returns their number.
    ///
    /// # Errors
    /// When not all objects could be removed.
    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, String>;
}

/// Client access that a control plane was started with, if any.
#[derive(Clone, Default)]
pub struct ObjectsAccess(pub Option<Arc<dyn Objects>>);

impl fmt::Debug for ObjectsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ObjectsAccess" } else { "no ObjectsAccess" })
    }
}
