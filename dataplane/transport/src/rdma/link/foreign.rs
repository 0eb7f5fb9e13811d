//! State of a link with a stock Mooncake engine.

use kvplane_sys::verbs::QueuePair;

/// Part of a link's state that only a link with a stock engine has.
pub(in crate::rdma) struct Foreign {
    /// Additional queue pairs: no request is posted on them.
    pub(in crate::rdma) spares: Vec<QueuePair>,
    /// Engine that made the connection; `None` if we made it.
    pub(in crate::rdma) asker: Option<Asker>,
    /// Sequence number of the connection, to find the oldest.
    pub(in crate::rdma) age: u64,
}

/// A stock engine that connected to us.
pub(in crate::rdma) struct Asker {
    /// The engine's name of its device.
    pub(in crate::rdma) path: String,
    /// Numbers of its queue pairs.
    pub(in crate::rdma) queue_pairs: Vec<u32>,
}
