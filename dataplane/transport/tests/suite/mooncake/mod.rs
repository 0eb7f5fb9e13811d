//! Mooncake's data protocol over loopback sockets: a raw peer against our server, our lanes against a raw peer.
//!
//! The scenarios are those of the stock engine's own tests for the visibility of writes, and additional ones:
//!
//! | situation | scenario |
//! |---|---|
//! | a completed write is visible to the next read | `server::a_completed_write_*`, `client::a_write_*` |
//! | a rejected write fails | `server::a_rejected_write_*`, `client::a_rejected_write_*` |
//! | a large rejected write quiesces its source first | `server::a_large_*`, `client::a_large_*` |
//! | version 2 reads: round trip, rejected | `server::reads_*`, `client::reads_*` |
//! | a version 1 initiator and the present server, pooled | `server::version_1_*` |
//! | a stale version 2 descriptor and a version 1 server | `client::version_1_server_announced_as_version_2_*` |
//! | order of answers, many requests at a time | `server::requests_are_answered_in_order`, `client::answers_*` |
//! | reconnects | `client::*_goes_over_a_new_connection`, `client::connection_to_a_closed_port_is_refused` |
//! | everything completes exactly once, also at the end | `client::closing_*`, and the counting of each bed |
//!
//! Queue bounds, deadlines and shutdown are the client's machinery, tested with it and in the engine's tests.

mod bed;
mod client;
mod raw;
mod server;
