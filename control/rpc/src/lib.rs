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

pub mod client;
pub mod codec;
pub mod error;
pub mod identity;
pub mod limits;
pub mod local;
pub mod message;
mod quic;
pub mod rights;
pub mod server;
pub mod service;
pub mod stream;
pub mod watch;

pub use client::{Client, ClientConfig, ConnectError};
pub use error::{CallError, Refusal, RefusalCode};
pub use identity::authority::{Authority, Grant};
pub use identity::role::{ClusterName, Role, Scope};
pub use identity::{Identity, IdentityError, Trust};
pub use limits::Limits;
pub use local::{LocalCluster, LocalError, Publication, RuntimeDirectory};
pub use message::tickets::random_bytes;
pub use message::{conductor, p2p, placement};
pub use quic::reset::ResetSecret;
pub use quic::tls::{PROTOCOL_NAME, TlsError};
pub use server::{ServeError, Server, ServerConfig};
pub use service::{Caller, Event, ItemFrame, MapFrame, Rejection, Service, ServiceState, item_frame};
pub use stream::ItemStream;
pub use watch::{MapWatch, WatchState};
