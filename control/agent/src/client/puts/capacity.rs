//! Capacity of the cluster: the pools and SSDs of all shards together, as the control plane knows them.
//!
//! An object longer than the capacity never fits, whatever is evicted for it, so it is rejected before its first stripe
//! evicts anything. The client requests the capacity from the control plane when it puts a long object under a new map,
//! and once more before it rejects an object. While the control plane does not answer, or does not know the size of
//! some shard yet, no object is rejected.

use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_rpc::message::GetRoom;

use crate::error::Error;
use crate::link::ControlLink;

/// Longest wait for the control plane's reply; puts then proceed without it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Backoff before the next request: after no reply, and after a reply without a capacity.
const PAUSES: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(1)];
/// Bytes of an object that are put between two checks while the capacity is unknown.
const WAVE_BYTES: u64 = 1 << 30;

/// Capacity as last reported by the control plane.
#[derive(Default)]
pub(super) struct Capacity {
    /// Generation of the map, and the capacity in bytes under that map.
    known: Option<(u64, u64)>,
    /// Time before which no further request is sent.
    until: Option<Instant>,
}

impl Capacity {
    /// Rejects an object that is longer than the capacity of the cluster.
    pub(super) fn check(&mut self, bytes: u64, link: &ControlLink) -> Result<(), Error> {
        let fits = |room: Option<u64>| room.is_none_or(|room| bytes <= room);
        if fits(self.bytes(link)) {
            return Ok(());
        }
        let room = self.learn(link);
        if fits(room) {
            return Ok(());
        }
        let room = room.unwrap_or_default();
        let what = format!("put of {bytes} bytes into a cluster whose pools and SSDs together have {room}");
        Err(Error::Status { what, status: Status::TooLarge, cause: None })
    }

    /// Returns the bytes of a long object that are put before the client checks that the first stripes still exist: a
    /// quarter of the capacity, so that most objects go in a single wave.
    pub(super) fn wave_bytes(&mut self, link: &ControlLink) -> u64 {
        self.bytes(link).map_or(WAVE_BYTES, |room| room / 4)
    }

    /// Returns the capacity of the cluster in bytes, if it is known.
    fn bytes(&mut self, link: &ControlLink) -> Option<u64> {
        match self.known {
            Some((generation, bytes)) if generation == link.map_generation() => Some(bytes),
            _ => self.learn(link),
        }
    }

    /// Requests the capacity from the control plane.
    fn learn(&mut self, link: &ControlLink) -> Option<u64> {
        if self.until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let generation = link.map_generation();
        let answer = link.call_within(GetRoom, PATIENCE);
        let pause = answer.as_ref().map_or(Some(PAUSES[0]), |room| room.bytes.is_none().then_some(PAUSES[1]));
        self.until = pause.map(|pause| Instant::now() + pause);
        self.known = answer.ok().and_then(|room| room.bytes).map(|bytes| (generation, bytes));
        self.known.map(|(_, bytes)| bytes)
    }
}
