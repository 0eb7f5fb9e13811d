//! Members of the cluster: the control plane, nodes with their agents and the incarnations of their shards, and the
//! migration and replication between them.

pub(crate) mod agent;
pub(crate) mod control;
pub(crate) mod copies;
pub(crate) mod departures;
pub(crate) mod exports;
pub(crate) mod fetch;
pub(crate) mod handover;
pub(crate) mod joins;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod quotas;
pub(crate) mod tickets;
