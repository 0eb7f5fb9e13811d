//! Outcomes of puts and gets.

use kvplane_proto::Version;

/// A successful get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Got {
    /// Length of the object.
    pub bytes: u64,
    /// Version that the put of this object was given.
    pub version: Version,
}

/// A successful put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The object is stored.
    Stored(Version),
    /// An object under this key exists already; it is left unchanged.
    Exists,
}
