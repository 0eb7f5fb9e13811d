//! Common setup of the engine's tests: a shard on loopback with minimal resources.

use kvplane_engine::{HostConfig, Listen, Pacing, ShardConfig};
use kvplane_proto::Version;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_store::service::Identity;

/// Returns the identity of the shard.
pub(crate) fn identity() -> Identity {
    Identity {
        cluster: "test".to_owned(),
        node: NodeId(1),
        incarnation: Incarnation(7),
        shard: ShardId(0),
        segment_name: "segment".to_owned(),
    }
}

/// Returns the settings of a shard that parks when it is idle, on a free port of loopback, without a store.
#[allow(dead_code, reason = "some tests drive a host themselves")]
pub(crate) fn config() -> ShardConfig {
    ShardConfig {
        identity: identity(),
        core: None,
        pacing: Pacing::Park,
        listen: Listen { tcp: ([127, 0, 0, 1], 0).into(), shm: None, mooncake: None, handed: None },
        pool: None,
        store: None,
        first_version: Version(1),
        host: HostConfig::default(),
    }
}
