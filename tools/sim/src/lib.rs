//! A simulated cluster: prefill and decode instances with caches and NICs, scheduled by the real Conductor.
//!
//! Discrete events over a trace. The Conductor is the code that serves, with whichever policy; it learns of the
//! cluster what it would learn of a real one: events of caches, late or lost if so configured, and reports. Caches are
//! the store itself, with its eviction, without bytes behind it. What is modelled is time: prefills by the polynomial
//! fitted to the paper, transfers by NICs that serve one transfer after the other, decodes by steps whose length
//! follows from the batch.
//!
//! The same inputs give the same outcome, everywhere.

#![forbid(unsafe_code)]

mod bounds;
mod cache;
mod config;
mod copies;
mod decode;
mod events;
mod outcome;
mod policies;
mod world;

pub use bounds::{Order, bound};
pub use config::{Faults, SimConfig, Work};
pub use outcome::{Fate, Outcome, ReplicaSample, RequestOutcome};
pub use policies::{RejectingAlgorithm1, Rejection, side_by_side};
pub use world::run;
