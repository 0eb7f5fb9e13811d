//! Tests of tickets from outside, in one binary: a module for each subject.

mod tickets;
mod time;
