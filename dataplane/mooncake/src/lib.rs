//! The control half of speaking with Mooncake engines: segment descriptors, the handshake daemon and its callers, and
//! the stores where engines publish what they serve.
//!
//! * [`descriptor`]: the JSON that describes a segment, with a key of ours for peers that speak our own protocol.
//! * [`Daemon`], [`Local`], [`PublishedEngine`]: answer peers that ask for our descriptor, probe us or notify us.
//! * [`RdmaHandshake`], [`Connector`]: how RDMA connections with stock engines come about.
//! * [`Caller`]: asks the daemons of others.
//! * [`Metadata`], [`MetadataStore`], [`keys`]: central metadata in HTTP servers, redis and etcd.
//! * [`names`], [`Environment`]: names of peers and the variables that Mooncake's users set.
//!
//! The formats are Mooncake's and have no authentication: what listens here listens on loopback unless the operator
//! says otherwise. Nothing here moves data or decides where it goes.

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
    Buffer, Descriptor, DescriptorError, Matrix, Native, NativeDevice, NativePlace, NativeRails, Protocol, RdmaDevice,
    RdmaKey, RdmaSegment,
};
pub use environment::{Environment, VariableError};
pub use metadata::{ConnectionError, Metadata, MetadataStore, StoreError, keys};
pub use notice::{MalformedNotice, Notice};
pub use published::{Connector, Local, NoticeLimits, NoticesFull, PublishedEngine};
pub use rdma_handshake::{
    GidBytes, MalformedHandshake, RdmaHandshake, gid_from_text, gid_to_text, nic_path, split_nic_path,
};
pub use timed::{Stage, resolve};
