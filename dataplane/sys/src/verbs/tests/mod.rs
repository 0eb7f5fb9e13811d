//! Tests of what only this crate sees of verbs.

mod errors;
mod layout;
mod queues;
