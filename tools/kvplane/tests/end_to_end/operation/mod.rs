//! Tests of commands, settings and views for operators.

pub(crate) mod admin;
pub(crate) mod arguments;
pub(crate) mod commands;
pub(crate) mod conductor;
pub(crate) mod config_files;
pub(crate) mod counted;
pub(crate) mod deploy;
pub(crate) mod groups;
pub(crate) mod logs;
pub(crate) mod reference;
pub(crate) mod topology;
