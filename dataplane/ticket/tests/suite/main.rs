//! Integration tests of tickets, in one binary: a module for each subject.

mod tickets;
mod time;
