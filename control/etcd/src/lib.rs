//! etcd, as far as this project needs it: ranges and transactions through the JSON gateway that every etcd of version 3
//! serves beside gRPC, and the HTTP client under it.
//!
//! * [`Gateway`]: an etcd cluster. Endpoints are tried in turn; what was sent may have been carried out even where the
//!   answer is an error.
//! * [`Http`]: HTTP with a deadline and limits; others who need a plain request use it too.
//!
//! Calls block their thread until their deadline at the latest; any thread may make them.

#![forbid(unsafe_code)]

mod gateway;
mod http;

pub use gateway::{Compare, Entry, Gateway, GatewayError, Operation, Outcome, Range, RangeResult};
pub use http::{Certificates, CertificatesError, Http, HttpError, Method};
