//! Members on a network in memory.

mod collectives;
mod failures;
mod host;
mod simulation;
