//! What the tests of the engine start from: a shard on loopback with nothing to spare.

use kvplane_engine::{HostConfig, Listen, Pacing, ShardConfig};
use kvplane_proto::Version;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_store::service::Identity;

/// Who the shard is.
pub(crate) fn identity() -> Identity {
    Identity {
        cluster: "test".to_owned(),
        node: NodeId(1),
        incarnation: Incarnation(7),
        shard: ShardId(0),
        segment_name: "segment".to_owned(),
    }
}

/// A shard that parks when it has nothing to do, on a free port of loopback, without a store.
#[allow(dead_code, reason = "some tests drive a host themselves")]
pub(crate) fn config() -> ShardConfig {
    ShardConfig {
        identity: identity(),
        core: None,
        pacing: Pacing::Park,
        listen: Listen { tcp: ([127, 0, 0, 1], 0).into(), shm: None, mooncake: None },
        pool: None,
        store: None,
        first_version: Version(1),
        host: HostConfig::default(),
    }
}
