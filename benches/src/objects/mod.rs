//! Objects of a node: the cost and the latency of puts, gets and lookups.

pub(crate) mod ahead;
pub(crate) mod asked;
pub(crate) mod hedged;
pub(crate) mod keys;
pub(crate) mod killed;
pub(crate) mod tails;
