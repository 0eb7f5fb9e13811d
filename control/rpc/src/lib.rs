//! The control protocol: QUIC with certificates on both sides, one call per stream. quinn, TLS identities and the
//! message codec live here and nowhere else.
//!
//! * [`Authority`], [`identity`], [`Role`]: certificates and access rights; a certificate names its role and its
//!   cluster.
//! * [`local`]: discovery of the control plane without configuration, for processes of one user on one machine.
//! * [`codec`], [`message`], [`conductor`], [`placement`], [`p2p`], [`groups`]: the frames and the messages in them.
//! * [`server`]: accepts connections, checks certificates and rights, calls a [`Service`].
//! * [`client`], [`watch`]: calls with deadlines over a connection that reconnects; a copy of the cluster map that
//!   follows every new epoch.
//!
//! This crate makes no decision about members or maps; those are made in `kvplane-cluster`, which `kvplane-server`
//! hosts. Bulk data never travels here: QUIC moves a few hundred megabytes a second, and the data plane exists to move
//! more.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss, clippy::cast_lossless)
)]

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
pub use local::{FormatError, LocalCluster, LocalError, Publication, RuntimeDirectory};
pub use message::tickets::random_bytes;
pub use message::{conductor, groups, p2p, placement};
pub use quic::reset::ResetSecret;
pub use quic::tls::{PROTOCOL_NAME, TlsError};
pub use server::{ServeError, Server, ServerConfig};
pub use service::{Caller, Event, ItemFrame, MapFrame, Rejection, Service, ServiceState, item_frame};
pub use stream::ItemStream;
pub use watch::{MapWatch, WatchState};
