//! Client access of the control plane to objects: the control plane holds none itself, so the process that starts it
//! may provide a client of the nodes.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::message::ObjectPriority;

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

/// Pin of a tenant's objects, the end of one, or their priority.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Pin {
    /// Soft pins of objects; without a duration their end.
    Soft { keys: Vec<String>, ttl: Option<Duration> },
    /// Objects join a retention.
    Retain { retention: u64, keys: Vec<String>, ttl: Duration },
    /// The objects of a group join the retention of its number.
    Group { group: u64, ttl: Duration },
    /// A retention lasts longer.
    Renew { retention: u64, ttl: Duration },
    /// A retention ends.
    Release { retention: u64 },
    /// Priority of objects from now on.
    Priority { keys: Vec<String>, priority: ObjectPriority },
}

/// Outcome of a pin for one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinResult {
    /// It is done.
    Yes,
    /// The object is not in memory.
    NotFound,
    /// It failed: a limit of pins, or its owner does not answer.
    Failed(String),
}

/// Outcome of a [`Pin`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinOutcome {
    /// Number of objects of the group or of the retention.
    Count(u64),
    /// Outcome for each key, in the order of the keys.
    Each(Vec<(String, PinResult)>),
    /// A limit of pins does not allow it.
    Full(String),
    /// A key or the duration is invalid.
    Wrong(String),
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

    /// Pins a tenant's objects, or ends a pin.
    ///
    /// # Errors
    /// When no node could be asked.
    fn pin(&self, tenant: &str, pin: &Pin) -> Result<PinOutcome, ObjectsError>;
}

/// Client access that a control plane was started with, if any.
#[derive(Clone, Default)]
pub struct ObjectsAccess(pub Option<Arc<dyn Objects>>);

impl fmt::Debug for ObjectsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ObjectsAccess" } else { "no ObjectsAccess" })
    }
}
