//! Queries of a shard for the handshakes of stock Mooncake engines: its devices, the keys of its memory, connections.
//!
//! Callable from any thread. The shard answers within a time that a handshake can bear, or the call fails.

use std::time::Duration;

use kvplane_proto::SegmentId;
use kvplane_transport::{ForeignDevice, ForeignHalf};

use super::error::ShardError;
use super::handle::ShardHandle;

/// Deadline of a handshake's query to a shard. The waiting thread serves no other peer meanwhile.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(2);

/// Local and remote key of a buffer on each device; `None` for a device that refused it.
pub type StockKeys = Vec<Option<(u32, u32)>>;

impl ShardHandle {
    /// Returns its RDMA devices, by index.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn stock_devices(&self) -> Result<Vec<ForeignDevice>, ShardError> {
        self.ask(HANDSHAKE_DEADLINE, |host| host.rdma().foreign_devices())
    }

    /// Returns the keys of each of these segments, on each device by index.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn stock_keys(&self, segments: Vec<SegmentId>) -> Result<Vec<StockKeys>, ShardError> {
        self.ask(HANDSHAKE_DEADLINE, move |host| {
            segments.into_iter().map(|segment| host.rdma().foreign_keys(segment)).collect()
        })
    }

    /// Connects a stock engine's device of this name to a device of ours.
    ///
    /// # Errors
    /// [`ShardError::Rdma`] if the device fails; any other error if the shard does not answer.
    pub fn accept_stock(&self, device: &str, from: &str, half: &ForeignHalf) -> Result<ForeignHalf, ShardError> {
        let (device, from, half) = (device.to_owned(), from.to_owned(), half.clone());
        let accepted = self.ask(HANDSHAKE_DEADLINE, move |host| host.rdma().accept_foreign(&device, &from, &half))?;
        accepted.map_err(ShardError::Rdma)
    }

    /// Returns true if a stock engine is connected from its device of this name with these queue pairs.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn has_stock(&self, device: &str, from: &str, queue_pairs: &[u32]) -> Result<bool, ShardError> {
        let (device, from, queue_pairs) = (device.to_owned(), from.to_owned(), queue_pairs.to_vec());
        self.ask(HANDSHAKE_DEADLINE, move |host| host.rdma().has_foreign(&device, &from, &queue_pairs))
    }
}
