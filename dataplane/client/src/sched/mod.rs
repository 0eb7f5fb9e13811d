//! Scheduling decisions without effects: which rail, whose turn, how large a piece, and whether to try again.
//!
//! Everything here is data in, decision out. A caller asks ([`pick`]), books ([`Rail::book`]) and reports
//! ([`Rail::done`], [`Rail::failed`]) in separate steps; nothing here knows a connection, a frame or a clock.

mod budget;
mod classes;
mod cuts;
mod pick;
mod rail;
mod rate;
mod tail;

pub use budget::RetryBudget;
pub use classes::{ClassQueue, Kinds, Next, Priority, Ticket};
pub(crate) use cuts::LEAST_BYTES;
pub use cuts::{Cuts, cut_bytes};
pub use pick::{Candidate, Choice, pick};
pub use rail::{Health, HealthEvent, Rail, share_behind};
pub use rate::Rate;
pub use tail::Tail;

#[cfg(test)]
mod tests;
