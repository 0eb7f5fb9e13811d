//! Order of a shard: the peer that it is to be fetched from.

use kvplane_rpc::p2p::FetchOrder;

/// Order to fetch one shard from one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::p2p) struct ShardOrder {
    pub(in crate::p2p) shard: u32,
    /// Member number of the peer.
    pub(in crate::p2p) source: u64,
    /// Name of the peer's segment.
    pub(in crate::p2p) segment: String,
    /// Address of the shard in the segment.
    pub(in crate::p2p) address: u64,
}

impl From<FetchOrder> for ShardOrder {
    fn from(order: FetchOrder) -> Self {
        let FetchOrder { shard, source, segment, address, .. } = order;
        Self { shard, source, segment: segment.to_string(), address }
    }
}
