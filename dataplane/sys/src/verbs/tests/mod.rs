//! Tests of verbs internals that are not visible outside this crate.

pub(super) mod bare;
mod errors;
mod layout;
mod queues;
