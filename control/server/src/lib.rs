//! The control process: services, state store, HTTP.
