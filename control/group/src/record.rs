//! Durable records of groups.

use bincode::{Decode, Encode};

use crate::group::{GroupId, GroupSpec, View};

/// Durable record of a group, by its id. What a flush in progress has collected is not in it: fenced members report
/// their progress again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GroupRecord {
    /// Name of the world.
    pub world: String,
    /// The group.
    pub group: GroupId,
    /// Name, members and rules, joiners included.
    pub spec: GroupSpec,
    /// Number of members that found it: the first ones.
    pub founders: u8,
    /// The newest view.
    pub view: View,
    /// Addresses of the active members' processes, by rank, at which a restarted control plane expects them.
    pub addresses: Vec<Option<String>>,
}
