//! The control protocol: QUIC with certificates on both sides, one call per stream. quinn, TLS identities and the
//! message codec live here and nowhere else.
//!
//! * [`Authority`], [`identity`], [`Role`]: who may speak; a certificate names its role and its cluster.
//! * [`local`]: how processes of one user on one machine find their control plane without configuration.
//! * [`codec`], [`message`], [`conductor`], [`placement`], [`p2p`]: frames and what is in them.
//! * [`server`]: accepts, checks, calls a [`Service`].
//! * [`client`], [`watch`]: calls with deadlines over a connection that is remade; the cluster map, kept current.
//!
//! Nothing here decides about members or maps; that is `kvplane-cluster`, hosted by `kvplane-server`. Bulk data never
//! travels here: QUIC moves a few hundred megabytes a second, which is what the data plane is for.

#![forbid(unsafe_code)]

mod authority;
mod call;
pub mod client;
pub mod codec;
pub mod conductor;
mod convert;
pub mod error;
mod events;
mod hot;
pub mod identity;
mod instance_table;
pub mod limits;
pub mod local;
pub mod message;
mod moves;
pub mod p2p;
pub mod placement;
mod reset;
pub mod rights;
mod role;
mod segments;
pub mod server;
pub mod service;
mod shards;
mod silence;
mod socket;
pub mod stream;
mod tasks;
mod tenants;
mod tickets;
mod tier;
mod tls;
pub mod watch;

pub use authority::{Authority, Grant};
pub use client::{Client, ClientConfig, ConnectError};
pub use error::{CallError, Refusal, RefusalCode};
pub use identity::{Identity, IdentityError, Trust};
pub use limits::Limits;
pub use local::{LocalCluster, LocalError, Publication, RuntimeDirectory};
pub use reset::ResetSecret;
pub use role::{ClusterName, Role, Scope};
pub use server::{ServeError, Server, ServerConfig};
pub use service::{Caller, Event, ItemFrame, MapFrame, Rejection, Service, ServiceState, item_frame};
pub use stream::ItemStream;
pub use tickets::random_bytes;
pub use tls::{PROTOCOL_NAME, TlsError};
pub use watch::{MapWatch, WatchState};
