//! Scheduling decisions without effects: which rail, whose turn, how large a piece, and whether to try again.
//!
//! Everything here is data in, decision out. A caller asks ([`pick`]), books ([`Rail::book`]) and reports
//! ([`Rail::done`], [`Rail::failed`]) in separate steps; nothing here knows a connection, a frame or a clock.

mod budget;
mod classes;
mod histogram;
mod merge;
mod pick;
mod rail;
mod rate;

pub use budget::RetryBudget;
pub use classes::{ClassQueue, Kinds, Next, Priority, Ticket};
pub use histogram::Histogram;
pub use merge::{Cuts, cut_bytes, merge_runs};
pub use pick::{Candidate, Choice, pick};
pub use rail::{Health, HealthEvent, Rail};
pub use rate::Rate;

#[cfg(test)]
mod tests;
