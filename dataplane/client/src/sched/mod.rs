//! Scheduling decisions: choice of a rail, order of a queue, size of slices, and retry budgets.
//!
//! Pure functions and state machines: data in, decision out. A caller chooses ([`pick`]), books ([`Rail::book`]) and
//! reports ([`Rail::done`], [`Rail::failed`]) in separate steps. The module knows no connections, frames or clocks.

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
