//! Tests of certificates, tickets and tenants, and of peers and input that are not to be trusted.

pub(crate) mod certificates;
pub(crate) mod data_tls;
pub(crate) mod fuzz;
pub(crate) mod peers;
pub(crate) mod tenants;
pub(crate) mod unauthenticated;
