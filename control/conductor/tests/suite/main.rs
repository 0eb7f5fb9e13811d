//! Tests of the Conductor through its public interface, in one binary: a module for each subject.

mod away;
mod books;
mod conductor;
mod copies;
mod decode;
mod durable;
mod engine;
mod groups;
mod hot;
mod index;
mod kept_index;
mod queue;
mod service;
mod support;
mod tokens;
