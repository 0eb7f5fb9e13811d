//! The Conductor's pure core: where every block is, what a placement costs, and who should serve a request.
//!
//! * [`index`]: who holds which beginnings of prompts.
//! * [`cost`]: how long prefills, decodes and transfers take, fitted again from reports.
//! * [`policy`]: who prefills, who decodes, what is fetched, who is refused: ours, the paper's, and other routers'.
//! * [`scheduler`]: the scheduler of one model's instances: `schedule`, `commit`, `poll`, `update`, `release`.
//! * [`hot`], [`copies`]: what is asked for most, and when it is worth another copy.
//! * [`engine`]: what engines publish of their caches, read.
//! * [`fallback`]: where a client sends requests while it cannot ask.
//! * [`conductor`]: names, incarnations, ids, leases: what a server hosts.

#![forbid(unsafe_code)]

pub mod conductor;
pub mod copies;
pub mod cost;
pub mod engine;
pub mod fallback;
pub mod hot;
pub mod index;
pub mod policy;
pub mod scheduler;
