//! Host for the tier in tests: model device, memory, and a record of acknowledgements.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod calls;
pub(crate) mod device;
pub(crate) mod model;
pub(crate) mod world;

use kvplane_proto::ids::{NodeId, ShardId};
use kvplane_tier::{Identity, OpenOptions, TierConfig};

pub(crate) const UUID: u128 = 0x1111_2222_3333_4444_5555_6666_7777_8888;

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        identity: Identity { cluster: 7, node: NodeId(3), shard: ShardId(1) },
        expected_uuid: None,
        format_blank: Some(UUID),
        tenant_of,
    }
}

/// Names one of four tenants by the last byte of a key.
pub(crate) fn tenant_of(key: &[u8]) -> u32 {
    key.last().map_or(0, |byte| u32::from(byte % 4))
}

/// Returns limits of a device small enough to be filled many times over.
pub(crate) fn small(block_bytes: u32) -> TierConfig {
    TierConfig {
        block_bytes,
        segment_bytes: 256 << 10,
        segments: 8,
        footer_page_bytes: 4096,
        chunk_bytes: 64 << 10,
        max_object_bytes: 100 << 10,
        max_key_bytes: 40,
        memory_align_bytes: 64,
        extent_bytes: 6000,
        footer_pages: 4,
        max_records: 200,
        hash_seed: 5,
        group_bytes: 12 << 10,
        group_delay_ns: 1000,
        groups: 4,
        sync_interval_ns: 20_000,
        durable_writes: false,
        max_reads: 4,
        max_waiters: 24,
        max_op_bytes: 16 << 10,
        ops_in_flight: [4, 3, 1, 2],
        scan_bytes: 12 << 10,
        scan_buffers: 3,
        copy_bytes: 128 << 10,
        max_moves: 3,
        reinsert_percent: 50,
        hot_hits: 2,
        free_segments_low: 3,
        max_bad_segments: 3,
    }
}
