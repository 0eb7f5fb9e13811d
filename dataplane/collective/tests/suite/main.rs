//! Members on a network in memory.

mod collectives;
mod host;
mod simulation;
