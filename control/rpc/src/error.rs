//! Errors of the control protocol: refusals by the control plane, and the errors that a call can end with.
//!
//! A refusal travels as a stable number and a text. A caller's own failures (no reply, connection lost) have numbers
//! from 100 on that never travel. Numbers are append-only: operators and bindings of other languages match on them.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bincode::{Decode, Encode};
use quinn::{ConnectionError, VarInt};

use crate::codec::{CodecError, Message};
use crate::limits::REASON_BYTES;
use crate::quic::tls::PROTOCOL_NAME;

/// Least time between two attempts of a call that was refused as not ready.
const LEAST_WAIT: Duration = Duration::from_millis(20);

macro_rules! refusal_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal),+ $(,)?) => {
        /// Reason for which the control plane refused a call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum RefusalCode { $($(#[$doc])* $name = $number),+ }

        impl RefusalCode {
            /// All codes, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];
        }
    };
}

refusal_codes! {
    /// The request is well-formed but its contents are invalid.
    BadRequest = 1,
    /// The caller's role may not do this.
    NotPermitted = 2,
    /// The node is not, or no longer, a member: join again.
    UnknownMember = 3,
    /// A later incarnation of the node has joined.
    StaleIncarnation = 4,
    /// A table of the control plane is full.
    LimitReached = 5,
    /// No item has the name.
    NotFound = 6,
    /// Another item has the name.
    AlreadyExists = 7,
    /// The state could not be written; the change did not happen.
    Storage = 8,
    /// The control plane is shutting down.
    ShuttingDown = 9,
    /// The reply is above its size limit.
    TooLarge = 10,
    /// This incarnation of the node or process was declared dead, or has left: a node drops its objects and joins with
    /// a greater incarnation, a process registers as another one.
    IncarnationEnded = 11,
    /// This incarnation has joined before with another description: join with a greater incarnation.
    IncarnationReused = 12,
    /// Another live node has this id: choose another id, or retry later if that node was stopped.
    NodeIdInUse = 13,
    /// The client has no segment, or its segments expired; or the process is not registered: register again.
    UnknownClient = 14,
    /// The control plane waits for members of a state that it may have lost: retry a little later.
    NotReady = 15,
}

/// A refused call, as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Refusal {
    /// A [`RefusalCode`], or a number that a newer control plane knows.
    pub code: u16,
    /// The reason, with its numbers; at most [`REASON_BYTES`].
    pub reason: String,
    /// Time from now after which a retry may succeed, in nanoseconds; none when waiting does not help.
    pub retry_after_ns: Option<u64>,
}

impl Message for Refusal {
    const KIND: u16 = 0xffff;
    const LARGE: bool = false;
}

impl Refusal {
    /// Creates a refusal; truncates a reason above [`REASON_BYTES`].
    #[must_use]
    pub fn new(code: RefusalCode, reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        Self { code: code as u16, reason, retry_after_ns: None }
    }

    /// Returns the code if this side knows it.
    #[must_use]
    pub fn known_code(&self) -> Option<RefusalCode> {
        RefusalCode::ALL.iter().copied().find(|code| *code as u16 == self.code)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.reason, self.code)
    }
}

/// Error that a call ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum CallError {
    /// The control plane refused the call. A retry does not help unless the code advises one.
    Refused(Refusal),
    /// TLS failed, or the control plane rejected this caller: a matter of certificates or versions.
    Rejected {
        address: SocketAddr,
        /// The reason, and the next step for the operator.
        reason: String,
    },
    /// No connection could be made. The next attempt backs off for longer.
    Unreachable { address: SocketAddr, reason: String },
    /// The reply did not arrive in time; whether the call took effect is unknown.
    Deadline { address: SocketAddr, waited: Duration },
    /// The connection broke after the request was sent; whether the call took effect is unknown.
    Lost { address: SocketAddr, reason: String },
    /// The reply is not a valid message of the expected kind.
    BadReply { address: SocketAddr, error: CodecError },
    /// The request is above its size limit and was not sent.
    BadRequest(CodecError),
}

impl CallError {
    /// Returns a stable number: below 100 a code of the control plane, from 100 on a failure that this side found.
    #[must_use]
    pub fn code(&self) -> u16 {
        match self {
            Self::Refused(refusal) => refusal.code,
            Self::Rejected { .. } => 100,
            Self::Unreachable { .. } => 101,
            Self::Deadline { .. } => 102,
            Self::Lost { .. } => 103,
            Self::BadReply { .. } => 104,
            Self::BadRequest(_) => 105,
        }
    }

    /// Returns the time to wait before a retry, if the control plane refused the call as not ready.
    pub(crate) fn not_ready(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) if refusal.known_code() == Some(RefusalCode::NotReady) => {
                Some(Duration::from_nanos(refusal.retry_after_ns.unwrap_or(0)).max(LEAST_WAIT))
            }
            _ => None,
        }
    }

    /// Returns the refusal code, if the control plane refused with a code that this side knows.
    #[must_use]
    pub fn refusal(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(refusal) => refusal.known_code(),
            _ => None,
        }
    }

    /// Returns the time after which a retry may succeed, if the control plane's refusal carries one.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) => refusal.retry_after_ns.map(Duration::from_nanos),
            _ => None,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "the control plane refused: {refusal}"),
            Self::Rejected { address, reason } => {
                write!(f, "the control plane at {address} refused: {reason}")
            }
            Self::Unreachable { address, reason } => {
                write!(f, "the control plane at {address} cannot be reached: {reason}")
            }
            Self::Deadline { address, waited } => {
                write!(f, "the control plane at {address} did not answer within {:.1} s", waited.as_secs_f64())
            }
            Self::Lost { address, reason } => {
                write!(f, "the connection to the control plane at {address} broke: {reason}")
            }
            Self::BadReply { address, error } => {
                write!(f, "the control plane at {address} sent an invalid reply: {error}")
            }
            Self::BadRequest(error) => write!(f, "the request cannot be sent: {error}"),
        }
    }
}

impl std::error::Error for CallError {}

/// Reason for which a connection is closed, as it travels in QUIC's close frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseCode {
    /// The side that closes has no further requests.
    Done = 0,
    /// A frame is not of this protocol.
    BadFrame = 1,
    /// The certificate is good but names no role in this cluster.
    NoRole = 2,
    /// The control plane is shutting down.
    ShuttingDown = 3,
    /// A reply did not arrive in time.
    Deadline = 4,
    /// The certificate has expired, or is not trusted any more.
    Expired = 5,
    /// This control plane is a standby: another one leads.
    StandingBy = 6,
}

impl CloseCode {
    pub(crate) fn wire(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }
}

/// TLS alerts (RFC 8446 §6) as QUIC transport errors (RFC 9001 §4.8) that an operator can act on.
const CRYPTO_ERROR: u64 = 0x100;
const ALERT_BAD_CERTIFICATE: u64 = CRYPTO_ERROR + 42;
const ALERT_UNSUPPORTED_CERTIFICATE: u64 = CRYPTO_ERROR + 43;
/// The certificate is not valid yet, or not any more.
const ALERT_CERTIFICATE_EXPIRED: u64 = CRYPTO_ERROR + 45;
const ALERT_CERTIFICATE_UNKNOWN: u64 = CRYPTO_ERROR + 46;
const ALERT_UNKNOWN_CA: u64 = CRYPTO_ERROR + 48;
/// The signature does not verify: the usual sign of another authority with the same name.
const ALERT_DECRYPT_ERROR: u64 = CRYPTO_ERROR + 51;
pub(crate) const ALERT_CERTIFICATE_REQUIRED: u64 = CRYPTO_ERROR + 116;
pub(crate) const ALERT_NO_APPLICATION_PROTOCOL: u64 = CRYPTO_ERROR + 120;

/// Returns true if a transport-level failure is about a presented certificate.
pub(crate) fn is_bad_certificate(code: u64) -> bool {
    matches!(
        code,
        ALERT_BAD_CERTIFICATE
            | ALERT_UNSUPPORTED_CERTIFICATE
            | ALERT_CERTIFICATE_EXPIRED
            | ALERT_CERTIFICATE_UNKNOWN
            | ALERT_UNKNOWN_CA
            | ALERT_DECRYPT_ERROR
    )
}

/// Returns the close code of a transport-level failure, whichever side found it.
pub(crate) fn transport_code(error: &ConnectionError) -> Option<u64> {
    match error {
        ConnectionError::TransportError(error) => Some(u64::from(error.code)),
        ConnectionError::ConnectionClosed(frame) => Some(u64::from(frame.error_code)),
        _ => None,
    }
}

/// Converts the close of a connection, before (`established` false) or after the first exchange, to a call's error.
pub(crate) fn from_connection(address: SocketAddr, error: &ConnectionError, established: bool) -> CallError {
    let ours = matches!(error, ConnectionError::TransportError(_));
    let advice = match transport_code(error) {
        Some(ALERT_NO_APPLICATION_PROTOCOL) => {
            Some(format!("it speaks another version of the protocol than {PROTOCOL_NAME}"))
        }
        Some(ALERT_CERTIFICATE_REQUIRED) => Some("it requires a certificate and none was presented".to_owned()),
        Some(ALERT_CERTIFICATE_EXPIRED) => {
            let whose = if ours { "its" } else { "our" };
            Some(format!(
                "{whose} certificate is not valid any more, or not yet: issue another with kvplane ctl cert, and look \
                 at the clocks of both hosts"
            ))
        }
        Some(code) if is_bad_certificate(code) && ours => {
            Some("its certificate is not from this cluster's authority: check ca.pem and the cluster name".to_owned())
        }
        Some(code) if is_bad_certificate(code) => Some(
            "our certificate is not from its authority: it belongs to another cluster, or its authority was recreated"
                .to_owned(),
        ),
        _ => None,
    };
    let reason = match (&advice, error) {
        (Some(advice), _) => format!("{advice} ({error})"),
        (None, ConnectionError::ApplicationClosed(frame)) => {
            String::from_utf8_lossy(&frame.reason).chars().take(REASON_BYTES).collect()
        }
        (None, ConnectionError::TimedOut) => "no answer: check that it is running and reachable over UDP".to_owned(),
        (None, _) => error.to_string(),
    };
    match error {
        _ if advice.is_some() => CallError::Rejected { address, reason },
        ConnectionError::ApplicationClosed(frame)
            if [CloseCode::NoRole, CloseCode::BadFrame].iter().any(|code| frame.error_code == code.wire()) =>
        {
            CallError::Rejected { address, reason }
        }
        _ if established => CallError::Lost { address, reason },
        _ => CallError::Unreachable { address, reason },
    }
}
