//! What makes a link one with a stock engine.

use kvplane_sys::verbs::QueuePair;

/// The part of a link that only one with a stock engine has.
pub(in crate::rdma) struct Foreign {
    /// The further queue pairs: nothing is posted on them.
    pub(in crate::rdma) spares: Vec<QueuePair>,
    /// The engine that asks us on it; none where we ask.
    pub(in crate::rdma) asker: Option<Asker>,
    /// The order of connections.
    pub(in crate::rdma) age: u64,
}

/// A stock engine that asks us.
pub(in crate::rdma) struct Asker {
    /// Its name for the device that it asks from.
    pub(in crate::rdma) path: String,
    /// Its queue pairs.
    pub(in crate::rdma) queue_pairs: Vec<u32>,
}
