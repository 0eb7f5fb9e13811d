//! Tests that need `unsafe` from outside, in one binary: a module for each subject.

mod device;
mod device_libraries;
mod npu;
mod process_memory;
mod two_processes;
mod verbs;
