//! Sans-IO core of the Conductor: the location of every block, the cost of a placement, and the choice of instances.
//!
//! * [`index`]: prefix index: the holders of each prefix of blocks.
//! * [`cost`]: durations of prefills, decodes and transfers, refitted from reports.
//! * [`policy`]: placement policies: choose the prefill and decode instances and the fetches, or reject a request.
//! * [`scheduler`]: scheduler of one model's instances: `schedule`, `commit`, `poll`, `update`, `release`.
//! * [`hot`], [`copies`]: the hottest prefixes, and when another replica of one pays off.
//! * [`engine`]: decoders of the cache events that engines publish.
//! * [`fallback`]: placement by a client while the Conductor is unreachable.
//! * [`conductor`]: names, incarnations, ids and leases: the part that a server hosts.

#![forbid(unsafe_code)]

pub mod conductor;
pub mod copies;
pub mod cost;
pub mod engine;
pub mod fallback;
pub mod hot;
pub mod index;
pub mod policy;
pub mod scheduler;
