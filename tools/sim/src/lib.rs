//! Simulated cluster: prefill and decode instances with caches and NICs, scheduled by the production Conductor.
//!
//! A discrete-event simulation over a trace. The Conductor is the production code, with any policy; it receives from
//! the simulated cluster what it would from a real one: cache events, optionally late or lost, and reports. A cache is
//! the production store with its eviction, but without memory for the bytes. Only time is modelled: prefills by the
//! polynomial fitted to the paper, transfers by NICs that serve one transfer after the other, decodes by steps whose
//! length follows from the batch.
//!
//! The simulation is deterministic: the same inputs give the same outcome on every machine.

#![forbid(unsafe_code)]

mod bounds;
mod cache;
mod config;
mod copies;
mod decode;
mod events;
mod groups;
mod outcome;
mod policies;
mod sessions;
mod world;

pub use bounds::{Order, bound};
pub use config::{Faults, SimConfig, SimGroups, Work};
pub use outcome::{Outcome, ReplicaSample, RequestOutcome, RequestStatus};
pub use policies::{Algorithm1, DynamoLike, RejectingAlgorithm1, Rejection, SglangLike, side_by_side};
pub use sessions::name_sessions;
pub use world::run;
