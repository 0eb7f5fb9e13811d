//! What could be stored at all: the pools and SSDs of all shards, as the control plane knows them.
//!
//! An object that is longer than that never fits, whatever is evicted for it. So it is refused before its first stripe
//! takes the place of anything. The control plane is asked when a long object is put and the map is a new one, and
//! before an object is refused. While it does not answer, or knows of a shard only that it is there, none is refused.

use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_rpc::message::GetRoom;

use super::Client;
use crate::error::Error;

/// How long an answer is waited for; puts go on without.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long nobody is asked again after there was no answer, and after one that says nothing.
const PAUSES: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(1)];
/// Bytes that are put at a time of an object where nothing is known.
const WAVE_BYTES: u64 = 1 << 30;

/// What is known of it.
#[derive(Default)]
pub(super) struct Capacity {
    /// Of the map of this generation, in bytes.
    known: Option<(u64, u64)>,
    /// Until when nobody is asked.
    until: Option<Instant>,
}

impl Client {
    /// Asks the control plane.
    fn learn_capacity(&mut self) -> Option<u64> {
        if self.capacity.until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let generation = self.link.map_generation();
        let answer = self.link.call_within(GetRoom, PATIENCE);
        let pause = answer.as_ref().map_or(Some(PAUSES[0]), |room| room.bytes.is_none().then_some(PAUSES[1]));
        self.capacity.until = pause.map(|pause| Instant::now() + pause);
        self.capacity.known = answer.ok().and_then(|room| room.bytes).map(|bytes| (generation, bytes));
        self.capacity.known.map(|(_, bytes)| bytes)
    }

    /// Bytes that the cluster could hold, if that is known.
    fn capacity(&mut self) -> Option<u64> {
        match self.capacity.known {
            Some((generation, bytes)) if generation == self.link.map_generation() => Some(bytes),
            _ => self.learn_capacity(),
        }
    }

    /// Refuses an object that is longer than all there is.
    pub(super) fn check_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        let fits = |room: Option<u64>| room.is_none_or(|room| bytes <= room);
        if fits(self.capacity()) {
            return Ok(());
        }
        let room = self.learn_capacity();
        if fits(room) {
            return Ok(());
        }
        let room = room.unwrap_or_default();
        let what = format!("put of {bytes} bytes into a cluster whose pools and SSDs together have {room}");
        Err(self.problem(what, Status::TooLarge))
    }

    /// How much of a long object is put before it is looked whether its first bytes are still there: a quarter of all
    /// that there is, so that most go at once.
    pub(super) fn wave_bytes(&mut self) -> u64 {
        self.capacity().map_or(WAVE_BYTES, |room| room / 4)
    }
}
