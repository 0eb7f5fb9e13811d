//! Client access of the control plane to objects: the control plane holds none itself, so the process that starts it
//! may provide a client of the nodes.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Reason why objects cannot be accessed.
#[derive(Debug)]
pub enum ObjectsError {
    /// The control plane's address is not known yet.
    NotListening,
    /// The client cannot connect, or its call failed: its own error.
    Client(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for ObjectsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotListening => f.write_str("the control plane does not listen yet: retry the request"),
            Self::Client(error) => error.fmt(f),
        }
    }
}

impl Error for ObjectsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotListening => None,
            // Its text is the error's own.
            Self::Client(error) => error.source(),
        }
    }
}

/// Access to the objects. Calls block; they are made on threads that may block.
pub trait Objects: Send + Sync {
    /// Returns the keys of a tenant, as text; at most `most`, and whether there are more.
    ///
    /// # Errors
    /// When no node could be asked.
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), ObjectsError>;

    /// Removes a tenant's objects, or without a tenant all objects; returns their number.
    ///
    /// # Errors
    /// When not all objects could be removed.
    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, ObjectsError>;
}

/// Client access that a control plane was started with, if any.
#[derive(Clone, Default)]
pub struct ObjectsAccess(pub Option<Arc<dyn Objects>>);

impl fmt::Debug for ObjectsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ObjectsAccess" } else { "no ObjectsAccess" })
    }
}
