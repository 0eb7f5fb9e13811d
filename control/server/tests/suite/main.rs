//! External tests of the control plane process, in one binary: a module for each subject.

mod conductor;
mod conductor_kill;
mod conductor_restart;
mod control;
mod durable;
mod engines;
mod groups;
mod masters;
mod metadata;
mod schemes;
mod shims;
mod status;
mod support;
mod web;
mod zeromq;
