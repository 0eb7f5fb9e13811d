//! Batches: validation, cutting, sending and completion.

mod asks;
mod bulk;
mod gather;
mod intake;
mod put_sessions;
mod validation;
