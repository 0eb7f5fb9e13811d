//! HTTP server with limits: of connections, of the bytes of a head, of the time of a request.
//!
//! * [`serve`]: accepts connections and passes each request to a [`Service`].
//! * [`MetricsServer`]: serves `/metrics` on loopback, for processes without another HTTP server.

#![forbid(unsafe_code)]

mod connections;
mod metrics_server;
mod server;

pub use connections::ConnectionLimits;
pub use metrics_server::MetricsServer;
pub use server::{Limits, PROMETHEUS, Service, TEXT, response, serve};
