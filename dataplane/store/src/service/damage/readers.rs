//! Gets that wait until the bytes of their object are good.

use kvplane_proto::{Digest, Status};

use crate::service::local::LocalStore;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::Timing;

/// Readers that wait for an object.
pub(super) type Readers = Vec<(Reader, Timing)>;

/// Most readers that wait for one object.
pub(super) const READERS_MOST: usize = 1024;

/// Answers readers with the object, if it is in memory.
pub(super) fn serve(local: &mut LocalStore, digest: Digest, readers: Readers) {
    for (reader, timing) in readers {
        local.shard.answers.outputs.late(timing, digest);
        local.serve(digest, reader);
    }
}

/// Answers readers with a status.
pub(super) fn turn_away(local: &mut LocalStore, digest: Digest, readers: Readers, status: Status) {
    for (reader, timing) in readers {
        local.shard.answers.outputs.late(timing, digest);
        local.shard.turn_away(reader, status);
    }
}
