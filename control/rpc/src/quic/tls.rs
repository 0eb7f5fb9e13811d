//! TLS and transport parameters of both ends.
//!
//! TLS 1.3 with certificates on both sides, always. ALPN carries the protocol version: a peer of another version fails
//! the handshake with a specific alert. No 0-RTT: its data could be replayed.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig};
use quinn::{IdleTimeout, TransportConfig, VarInt};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};

use crate::identity::{Identity, Trust, provider};
use crate::limits::Limits;

/// The protocol and its version, in ALPN.
pub const PROTOCOL_NAME: &str = "kvplane/1";

/// Reason why TLS cannot be set up with an identity, or with limits.
#[derive(Debug)]
#[non_exhaustive]
pub enum TlsError {
    /// TLS rejects the certificates or the key.
    Identity(rustls::Error),
    /// No verifier can be made of the trusted certificates.
    Trust(VerifierBuilderError),
    /// QUIC lacks a cipher that it needs at the start of a connection.
    Cipher(NoInitialCipherSuite),
    /// The idle timeout is longer than QUIC can transmit.
    IdleTimeout {
        /// Timeout.
        timeout: Duration,
    },
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity(error) => {
                write!(f, "TLS cannot use this identity: {error}; issue a new one with kvplane ctl cert issue")
            }
            Self::Trust(error) => {
                write!(f, "TLS cannot use the trusted certificates: {error}; take those of the cluster")
            }
            Self::Cipher(error) => write!(f, "QUIC cannot be used with these ciphers: {error}"),
            Self::IdleTimeout { timeout } => write!(f, "an idle timeout of {timeout:?} is too long for QUIC"),
        }
    }
}

impl std::error::Error for TlsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Identity(error) => Some(error),
            Self::Trust(error) => Some(error),
            Self::Cipher(error) => Some(error),
            Self::IdleTimeout { .. } => None,
        }
    }
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        Self::Identity(error)
    }
}

impl From<VerifierBuilderError> for TlsError {
    fn from(error: VerifierBuilderError) -> Self {
        Self::Trust(error)
    }
}

impl From<NoInitialCipherSuite> for TlsError {
    fn from(error: NoInitialCipherSuite) -> Self {
        Self::Cipher(error)
    }
}

fn transport(limits: &Limits, peer_calls: u32) -> Result<TransportConfig, TlsError> {
    let timeout = limits.idle_timeout;
    let idle = IdleTimeout::try_from(timeout).map_err(|_| TlsError::IdleTimeout { timeout })?;
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(peer_calls))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(Some(Limits::DATAGRAM_BYTES))
        .stream_receive_window(VarInt::from_u32(Limits::STREAM_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(Limits::CONNECTION_WINDOW_BYTES))
        .send_window(u64::from(Limits::CONNECTION_WINDOW_BYTES))
        .initial_rtt(Limits::FIRST_RTT)
        .max_idle_timeout(Some(idle));
    Ok(transport)
}

/// Verifier of callers' certificates, in the handshake and at rechecks.
pub(crate) type Verifier = Arc<dyn ClientCertVerifier>;

/// Creates a verifier that accepts certificates from `trust`.
pub(crate) fn verifier(trust: &Trust) -> Result<Verifier, TlsError> {
    let roots = Arc::new(trust.roots()?);
    Ok(WebPkiClientVerifier::builder_with_provider(roots, provider()).build()?)
}

/// Returns the reason for which this chain would be rejected now, if any.
pub(crate) fn objection(verifier: &Verifier, chain: &[CertificateDer<'_>]) -> Option<String> {
    let (first, others) = chain.split_first()?;
    verifier.verify_client_cert(first, others, UnixTime::now()).err().map(|error| error.to_string())
}

/// Creates the server's configuration: accepts only callers that `verifier` accepts.
pub(crate) fn server_config(
    identity: &Identity,
    verifier: &Verifier,
    limits: &Limits,
) -> Result<quinn::ServerConfig, TlsError> {
    let verifier = Arc::clone(verifier);
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain(), identity.key())?;
    tls.alpn_protocols = vec![PROTOCOL_NAME.as_bytes().to_vec()];
    // A resumed session is not verified again: a certificate would count after its expiry, and after its authority was
    // replaced, for as long as the caller reconnects.
    tls.send_tls13_tickets = 0;
    tls.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    let crypto = QuicServerConfig::try_from(tls)?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    config.max_incoming(limits.connections);
    config.transport_config(Arc::new(transport(limits, limits.calls_per_connection)?));
    Ok(config)
}

/// Creates a client's configuration: accepts only servers with a certificate from `trust`, and presents `identity`.
pub(crate) fn client_config(
    identity: &Identity,
    trust: &Trust,
    limits: &Limits,
) -> Result<quinn::ClientConfig, TlsError> {
    let mut tls = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(trust.roots()?)
        .with_client_auth_cert(identity.chain(), identity.key())?;
    // The server is verified at each connection.
    tls.resumption = rustls::client::Resumption::disabled();
    tls.alpn_protocols = vec![PROTOCOL_NAME.as_bytes().to_vec()];
    let crypto = QuicClientConfig::try_from(tls)?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    let mut transport = transport(limits, 0)?;
    transport.keep_alive_interval(Some(limits.keep_alive_interval));
    config.transport_config(Arc::new(transport));
    Ok(config)
}
