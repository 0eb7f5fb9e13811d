//! Context of one request.

use kvplane_proto::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::Epoch;
use kvplane_proto::message::{Kind, Operation};

use super::sessions::Session;
use crate::service::types::PeerKey;

/// Facts of one request about its peer and its map, passed to all code that carries it out.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct RequestContext {
    pub(in crate::service) peer: PeerKey,
    /// Epoch of the map by which the request was routed.
    pub(in crate::service) epoch: Epoch,
    /// Only tenant whose objects the peer may use; `None` if its ticket is for all.
    pub(in crate::service) tenant: Option<u32>,
    /// True if the peer is the new owner of slots that this shard had, and fetches their objects.
    pub(in crate::service) fetches: bool,
    /// Flags of its frame, without those that do not apply to its operation: a replica owner only answers reads.
    pub(in crate::service) flags: FrameFlags,
}

impl RequestContext {
    /// Returns true if the peer is another owner of the object's slot, whose copy is damaged, and gets the bytes to
    /// repair it.
    pub(in crate::service) const fn repairs(&self) -> bool {
        self.fetches && self.flags.has(FrameFlags::READ_REPLICA)
    }

    pub(in crate::service) fn new(peer: PeerKey, session: &Session, header: &Header) -> Self {
        let of_reads = FrameFlags::READ_REPLICA | FrameFlags::REPLICA_LEASE;
        let reads = matches!(
            header.kind,
            Kind::Request(
                Operation::Get
                    | Operation::GetRange
                    | Operation::Lookup
                    | Operation::Exists
                    | Operation::Size
                    | Operation::List
            )
        );
        Self {
            peer,
            epoch: Epoch(header.argument),
            tenant: session.pass.tenant,
            fetches: session.greeting.fetches,
            flags: if reads { header.flags } else { header.flags.without(of_reads) },
        }
    }
}
