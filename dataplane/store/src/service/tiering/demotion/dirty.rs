//! Dirty objects: in memory, and not on the SSD yet.

use kvplane_proto::Digest;
use kvplane_proto::ids::{PinId, Version};
use kvplane_proto::message::PutAck;

use crate::service::shard::deferrals::DeferredItem;

/// Object that is pinned until it is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirtyObject {
    pub(super) pin: PinId,
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) bytes: u64,
    /// Account that it is charged to.
    pub(super) account: u16,
    /// Number of the tenant.
    pub(super) tenant: u32,
    pub(super) since_ns: u64,
    /// Reply that waits for the write.
    pub(super) told: Option<DeferredItem>,
    /// Acknowledgement level of its put, if the put named one.
    pub(super) ack: Option<PutAck>,
    /// Replication flag of its record, once that was passed to the tier.
    pub(super) copied: bool,
    /// Number of retries of its write.
    pub(super) tries: u8,
}
