//! Tests of process groups: scenarios with exact expectations, and simulations with random faults.

mod scenarios;
mod simulation;
