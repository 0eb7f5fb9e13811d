//! Integration tests of the client, in one binary: a module for each subject.

mod exactly_once;
mod late_writes;
mod scheduling;
