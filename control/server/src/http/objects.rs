//! Objects as the control plane reaches them: it holds none and knows none, so whoever starts it may give it a way to
//! ask the nodes, as any client does.

use std::fmt;
use std::sync::Arc;

/// A way to the objects. Its calls block; they are made on threads that may.
pub trait Objects: Send + Sync {
    /// The keys of a tenant, as text; at most `most`, and whether there are more.
    ///
    /// # Errors
    /// Why nobody could be asked.
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), String>;

    /// Removes a tenant's objects, or without one everybody's; how many.
    ///
    /// # Errors
    /// Why not all could be removed.
    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, String>;
}

/// What a control plane was given.
#[derive(Clone, Default)]
pub struct ObjectsAccess(pub Option<Arc<dyn Objects>>);

impl fmt::Debug for ObjectsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ObjectsAccess" } else { "no ObjectsAccess" })
    }
}
