//! Location of a buffer, for clients that read some of its bytes and do not become members.

use bincode::{Decode, Encode};

/// Member that has all of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlace {
    /// Number of the member.
    pub member: u64,
    /// Segment in which the member serves the buffer.
    pub segment: String,
    /// Address of the buffer in that segment.
    pub address: u64,
    /// Distance: 0 for the same host, 1 for the same rack, 2 for elsewhere.
    pub distance: u8,
}
