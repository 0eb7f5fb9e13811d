//! The facts of one request.

use kvplane_proto::frame::{COPY, Header, KNOWS_COPIES};
use kvplane_proto::ids::Epoch;
use kvplane_proto::message::Operation;

use super::session::Session;
use super::types::PeerKey;

/// Facts of one request about its peer and its map. They travel as an argument to all code that carries it out.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestContext {
    pub(super) peer: PeerKey,
    /// The epoch of the map by which the request was routed.
    pub(super) epoch: Epoch,
    /// The only tenant whose objects the peer may use; none where its ticket is for all.
    pub(super) tenant: Option<u32>,
    /// The peer is the new owner of slots that this shard had, and fetches what is in them.
    pub(super) fetches: bool,
    /// The request is about copies: a first owner's that brings or drops them, or a client's that reads them.
    pub(super) copies: bool,
    /// The answer may say that an object has a copy.
    pub(super) knows_copies: bool,
}

impl RequestContext {
    pub(super) fn new(peer: PeerKey, session: &Session, operation: Operation, header: &Header) -> Self {
        let reads = matches!(operation, Operation::Get | Operation::GetRange | Operation::Lookup);
        Self {
            peer,
            epoch: Epoch(header.argument & !COPY),
            tenant: session.pass.tenant,
            fetches: session.fetches,
            copies: header.argument & COPY != 0,
            knows_copies: reads && header.payload_checksum & KNOWS_COPIES != 0,
        }
    }
}
