//! Batches: what is taken in, how it is cut, sent together, and ended.

mod asks;
mod bulk;
mod gather;
mod intake;
mod put_sessions;
mod validation;
