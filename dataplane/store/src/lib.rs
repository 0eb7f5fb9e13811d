//! State of one shard: the objects that it holds, their extents in the pool, their pins, and their eviction.
//!
//! Pure and single-threaded: nothing here opens a file, reads a clock or touches the pool's memory. The pool is a range
//! of offsets; the host owns the registered region behind it and moves the bytes. After [`store::Store::new`] no
//! operation of the store allocates memory: every table is reserved in full from [`config::StoreConfig`].
//!
//! * [`allocator`]: offsets in the pool, two-level segregated fit.
//! * [`entry`] and [`index`]: the metadata of each object, and the index from digests to it.
//! * [`eviction`]: the eviction policies.
//! * `order`: eviction across tenants, pins and groups.
//! * [`store`]: the operations: get with pins, put as reserve and commit, remove.
//! * [`image`]: the record of the objects in memory that outlives a process.
//! * [`put_session`]: objects that are written in ranges.
//! * [`service`]: the server side: requests of peers become operations, replies and extents of payloads.

#![forbid(unsafe_code)]

pub mod allocator;
pub mod config;
pub mod entry;
pub mod errors;
pub mod events;
pub mod eviction;
mod generational;
pub mod image;
pub mod index;
mod order;
pub mod put_session;
pub mod service;
pub mod store;
mod tail_pages;

pub use config::StoreConfig;
pub use entry::{ACCOUNTS, Copies, Keep, Replica, Reserve, TAIL_BYTES_MOST};
pub use errors::{CommitError, GetError, ReserveError, StalePin, StaleReservation};
pub use order::{TenantUse, Tenants};
pub use store::{
    DetachedReplicas, DevicePoolStats, Extent, FarPoolStats, KeptCounters, KeptObjects, NoMove, ObjectPins,
    ObjectTable, ObjectView, PinError, Pool, PoolCopies, PoolMove, PoolMoves, PoolSums, SIZE_CLASSES, Store,
    StoreStats, TailMove, TakeBackError, far_pool_stats, former_objects, open_far_pool,
};
