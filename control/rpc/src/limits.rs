//! Limits of the control protocol, and the relations between them.
//!
//! Both ends take a [`Limits`]; the defaults suit a control plane of a few hundred nodes. The relations that must hold
//! for the protocol to work are asserted at compile time for the defaults, and by [`Limits::check`] for an operator's
//! settings.

use std::fmt;
use std::time::Duration;

use kvplane_proto::map::codec::MAX_MAP_BYTES;

/// Largest body of an ordinary message, in bytes.
pub const SMALL_BODY_BYTES: usize = 64 << 10;

/// Largest body of a message that carries the cluster map, the segment list or the status, in bytes. Only a control
/// plane sends such messages, and every valid map fits.
pub const LARGE_BODY_BYTES: usize = 16 << 20;

/// Largest body of a request of a large kind, in bytes: a prompt's hashes, a batch of events.
pub const LARGE_REQUEST_BYTES: usize = 1 << 20;

/// Longest text of an error on the wire, in bytes.
pub const REASON_BYTES: usize = 512;

/// Most segments in one page of a listing.
pub const PAGE_SEGMENTS: usize = 4096;

/// Limits of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most open connections of a server; further ones are rejected.
    pub connections: usize,
    /// Most calls and watches in progress on one connection; further ones wait at the caller.
    pub calls_per_connection: u32,
    /// Deadline of one call, connecting included.
    pub call_deadline: Duration,
    /// Deadline of the TLS handshake and the first exchange.
    pub connect_deadline: Duration,
    /// Time without a packet after which a connection is dead.
    pub idle_timeout: Duration,
    /// Interval of a client's keep-alive packets.
    pub keep_alive_interval: Duration,
    /// Interval at which a server verifies the certificates of its open connections again.
    pub recheck_interval: Duration,
    /// First backoff before a reconnection; doubles up to `backoff_max`, each with jitter.
    pub backoff_min: Duration,
    /// Longest backoff before a reconnection.
    pub backoff_max: Duration,
}

impl Limits {
    /// The default limits.
    pub const DEFAULT: Self = Self {
        connections: 1024,
        calls_per_connection: 64,
        call_deadline: Duration::from_secs(5),
        connect_deadline: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(10),
        keep_alive_interval: Duration::from_secs(3),
        recheck_interval: Duration::from_secs(60),
        backoff_min: Duration::from_millis(50),
        backoff_max: Duration::from_secs(5),
    };

    /// Round trip that is assumed before one was measured. A lost first packet, as to a control plane that is not
    /// running yet, is retransmitted after three times this, then after twice that and so on: with QUIC's 333 ms (RFC
    /// 9002, section 6.2.2), which is meant for the Internet, a control plane that starts 3 s later would be reached
    /// after 7 s.
    pub(crate) const FIRST_RTT: Duration = Duration::from_millis(50);
    /// Bytes of datagrams that may wait on one connection; the oldest are dropped.
    pub(crate) const DATAGRAM_BYTES: usize = 64 << 10;
    /// Bytes that a peer may send on one stream before it must wait for flow control.
    pub(crate) const STREAM_WINDOW_BYTES: u32 = 1 << 20;
    /// Bytes that a peer may send on all streams of a connection before it must wait for flow control.
    pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

    /// Checks that the limits can work together.
    ///
    /// # Errors
    /// The first relation that does not hold.
    pub fn check(&self) -> Result<(), LimitsError> {
        let relations = [
            (self.connections > 0, "connections must be above 0"),
            (self.calls_per_connection > 1, "calls_per_connection must be above 1: a watch takes one permanently"),
            (!self.call_deadline.is_zero(), "call_deadline must be above 0"),
            (!self.recheck_interval.is_zero(), "recheck_interval must be above 0"),
            (!self.connect_deadline.is_zero(), "connect_deadline must be above 0"),
            (
                self.keep_alive_interval.saturating_mul(2) < self.idle_timeout,
                "idle_timeout must be above twice keep_alive_interval: one lost packet must not end a connection",
            ),
            (self.idle_timeout <= Duration::from_secs(3600), "idle_timeout must be at most one hour"),
            (
                !self.backoff_min.is_zero() && self.backoff_min <= self.backoff_max,
                "backoff_min must be above 0 and at most backoff_max",
            ),
        ];
        match relations.iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, what)) => Err(LimitsError { what }),
        }
    }
}

const _: () = {
    assert!(SMALL_BODY_BYTES < Limits::STREAM_WINDOW_BYTES as usize, "a request fits the window");
    assert!(LARGE_REQUEST_BYTES > SMALL_BODY_BYTES && LARGE_REQUEST_BYTES < LARGE_BODY_BYTES);
    assert!(MAX_MAP_BYTES + 16 <= LARGE_BODY_BYTES, "every valid map fits a large body");
    // Name and the fixed fields; the decoder counts memory, which is less than twice their bytes.
    assert!(PAGE_SEGMENTS * 512 <= LARGE_BODY_BYTES, "a full page fits a large body");
    assert!(REASON_BYTES < SMALL_BODY_BYTES);
};

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Limits that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitsError {
    what: &'static str,
}

impl fmt::Display for LimitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limits of the control connection: {}", self.what)
    }
}

impl std::error::Error for LimitsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limits_are_consistent() {
        assert_eq!(Limits::default().check(), Ok(()));
    }

    #[test]
    fn a_keep_alive_that_is_too_slow_is_refused() {
        let limits = Limits { keep_alive_interval: Duration::from_secs(5), ..Limits::DEFAULT };
        let error = limits.check().expect_err("5 s of 10 s is too slow");
        assert!(error.to_string().contains("idle_timeout"), "{error}");
    }
}
