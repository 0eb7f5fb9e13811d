//! A shard's index, allocator, eviction, pins and object operations: the pure store core.
