//! Tests of verbs internals that are not visible outside this crate.

mod errors;
mod layout;
mod queues;
