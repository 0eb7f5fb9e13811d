//! Who has all of a buffer: for those who read some of its bytes, and do not become members.

/// Where a buffer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLocation {
    /// The member's number.
    pub member: u64,
    /// Where it serves.
    pub segment: String,
    /// Where the buffer begins there.
    pub address: u64,
    /// 0 for the same host, 1 for the same rack, 2 for elsewhere.
    pub distance: u8,
}
