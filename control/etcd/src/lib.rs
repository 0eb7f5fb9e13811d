//! Client of etcd: ranges and transactions through the JSON gateway that every etcd of version 3 serves beside gRPC,
//! and the HTTP client below it.
//!
//! * [`Gateway`]: client of an etcd cluster. Endpoints are tried in turn; a request may have been carried out even if
//!   the call returns an error.
//! * [`Http`]: HTTP client with a deadline and limits; other crates use it for plain requests too.
//!
//! Calls block their thread until their deadline at the latest; any thread may make them.

#![forbid(unsafe_code)]

mod gateway;
mod http;

pub use gateway::{Compare, Entry, Gateway, GatewayError, Operation, Outcome, Range, RangeResult};
pub use http::{Certificates, CertificatesError, Http, HttpError, Method};
