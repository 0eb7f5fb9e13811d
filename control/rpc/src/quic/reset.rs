//! Stateless resets (RFC 9000, section 10.3): a restarted control plane ends the connections of its predecessor.
//!
//! A restarted control plane does not know the connections of its predecessor. It answers a packet of such a connection
//! with a reset, and the client reconnects at once; otherwise the client would wait until a call is overdue. A client
//! accepts a reset only under the key of the control plane that it connected to, so that key survives the process: it
//! derives from a private key on disk, and from the address, so that of two control planes with the same private key
//! one cannot end the other's connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::EndpointConfig;
use quinn_proto::HashedConnectionIdGenerator;
use ring::hmac;

/// Least time between two resets. After a restart every client of the predecessor needs one.
const BETWEEN_RESETS: Duration = Duration::from_millis(1);

/// Secret that the keys of stateless resets derive from: [`crate::Authority::reset_secret`] if the control plane has
/// the authority's key, otherwise [`crate::Identity::reset_secret`].
#[derive(Clone)]
pub struct ResetSecret(hmac::Key);

impl ResetSecret {
    pub(crate) fn of_key(private_key_der: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, private_key_der))
    }

    /// Returns the configuration of an endpoint that listens on `address`.
    pub(crate) fn endpoint(&self, address: SocketAddr) -> EndpointConfig {
        let derived = |what: &str| hmac::sign(&self.0, format!("kvplane {what} {address}").as_bytes());
        let reset_key = hmac::Key::new(hmac::HMAC_SHA256, derived("stateless resets").as_ref());
        let mut ids_key = [0; 8];
        ids_key.copy_from_slice(&derived("connection ids").as_ref()[..8]);
        let ids_key = u64::from_le_bytes(ids_key);
        let mut config = EndpointConfig::new(Arc::new(reset_key));
        config
            // With another key than the predecessor's, packets of former connections would be dropped as noise.
            .cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(ids_key)))
            .min_reset_interval(BETWEEN_RESETS);
        config
    }
}

impl fmt::Debug for ResetSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResetSecret")
    }
}
