//! Control plane of Mooncake compatibility: segment descriptors, the handshake daemon and its callers, and the metadata
//! stores where engines publish their segments.
//!
//! * [`descriptor`]: the JSON that describes a segment, with a key of ours for peers that use our own protocol.
//! * [`Daemon`], [`Local`], [`PublishedEngine`]: serve peers that request our descriptor, probe us or send notices.
//! * [`RdmaHandshake`], [`Connector`]: establish RDMA connections with stock engines.
//! * [`Caller`]: calls the daemons of other engines.
//! * [`Metadata`], [`MetadataStore`], [`keys`]: central metadata in HTTP servers, redis and etcd.
//! * [`names`], [`Environment`]: names of peers and the environment variables of Mooncake.
//!
//! The formats are Mooncake's and have no authentication: servers listen on loopback unless the operator configures
//! another address. This crate neither moves data nor chooses paths.

#![forbid(unsafe_code)]

mod caller;
mod connection;
mod daemon;
pub mod descriptor;
mod environment;
pub mod frame;
mod metadata;
pub mod names;
mod notice;
mod published;
mod rdma_handshake;
mod timed;

pub use caller::{CallError, Caller};
pub use daemon::{Counts, Daemon, DaemonConfig, Listening, StartError, StopError};
pub use descriptor::{
    Buffer, Descriptor, DescriptorError, MalformedMatrix, Matrix, Native, NativeDevice, NativePlace, NativeRails,
    Protocol, RdmaDevice, RdmaKey, RdmaSegment,
};
pub use environment::{Environment, VariableError};
pub use metadata::{ConnectionError, Metadata, MetadataStore, StoreError, keys};
pub use notice::{MalformedNotice, Notice};
pub use published::{Connector, Local, NoticeLimits, NoticesFull, PublishedEngine};
pub use rdma_handshake::{
    GidBytes, MalformedHandshake, RdmaHandshake, gid_from_text, gid_to_text, nic_path, split_nic_path,
};
pub use timed::{Stage, resolve};
