//! Errors of the control protocol: what a peer refuses, and what a call can end with.
//!
//! A refusal travels as a stable number and a text. A caller's own failures (no answer, connection lost) have numbers
//! from 100 on that never travel. Numbers are append-only: operators and other languages match on them.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bincode::{Decode, Encode};
use quinn::{ConnectionError, VarInt};

use crate::codec::{CodecError, Message};
use crate::limits::REASON_BYTES;
use crate::quic::tls::PROTOCOL_NAME;

/// Least time between two tries of a call for which the control plane is not ready.
const LEAST_WAIT: Duration = Duration::from_millis(20);

macro_rules! refusal_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal),+ $(,)?) => {
        /// Why the control plane refused a call.
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
    /// The request is well-formed but senseless.
    BadRequest = 1,
    /// The caller's role may not do this.
    NotPermitted = 2,
    /// The node is not, or no longer, a member: join again.
    UnknownMember = 3,
    /// A later incarnation of the node has joined.
    StaleIncarnation = 4,
    /// A table is full.
    LimitReached = 5,
    /// Nothing has that name.
    NotFound = 6,
    /// Something else has that name.
    AlreadyExists = 7,
    /// The state could not be written; the change did not happen.
    Storage = 8,
    /// The control plane is going down.
    ShuttingDown = 9,
    /// The answer is above its size limit.
    TooLarge = 10,
    /// This incarnation of the node was declared over: drop what it holds and join with a greater incarnation.
    IncarnationEnded = 11,
    /// This incarnation has joined before with another description: join with a greater incarnation.
    IncarnationReused = 12,
    /// Another live node has this id: choose another, or try again later if that one was stopped.
    NodeIdInUse = 13,
    /// The client has no segment, or they expired: register again.
    UnknownClient = 14,
    /// The control plane waits for members of a state that it may have lost: try again a little later.
    NotReady = 15,
}

/// A refused call, as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Refusal {
    /// A [`RefusalCode`], or a number that a newer control plane knows.
    pub code: u16,
    /// The reason, with its numbers; at most [`REASON_BYTES`].
    pub reason: String,
    /// When it may make sense to try again, in nanoseconds from now; none when waiting does not help.
    pub retry_after_ns: Option<u64>,
}

impl Message for Refusal {
    const KIND: u16 = 0xffff;
    const LARGE: bool = false;
}

impl Refusal {
    /// A refusal; a longer reason is cut.
    #[must_use]
    pub fn new(code: RefusalCode, reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        Self { code: code as u16, reason, retry_after_ns: None }
    }

    /// The code, when this side knows it.
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

/// How a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The control plane answered with a refusal. Repeating the call will not help unless the code says so.
    Refused(Refusal),
    /// TLS failed, or the control plane does not want this caller: a matter of certificates or versions.
    Rejected {
        /// Who rejected whom.
        address: SocketAddr,
        /// Why, and what to do.
        reason: String,
    },
    /// No connection could be made. The next attempt waits longer.
    Unreachable {
        /// Which control plane.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The answer did not come in time; whether the call took effect is unknown.
    Deadline {
        /// Which control plane.
        address: SocketAddr,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection broke after the request was sent; whether the call took effect is unknown.
    Lost {
        /// Which control plane.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The answer makes no sense.
    BadReply {
        /// Which control plane.
        address: SocketAddr,
        /// What is wrong with it.
        error: CodecError,
    },
    /// The request is above its size limit and was not sent.
    BadRequest(CodecError),
}

impl CallError {
    /// A stable number: below 100 what the control plane said, from 100 on what this side found.
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

    /// How long to wait before the call is made again, where the control plane is not ready for it yet.
    pub(crate) fn not_ready(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) if refusal.known_code() == Some(RefusalCode::NotReady) => {
                Some(Duration::from_nanos(refusal.retry_after_ns.unwrap_or(0)).max(LEAST_WAIT))
            }
            _ => None,
        }
    }

    /// The refusal code, when the control plane refused with one that this side knows.
    #[must_use]
    pub fn refusal(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(refusal) => refusal.known_code(),
            _ => None,
        }
    }

    /// When it may make sense to try again, where the control plane refused and said so.
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
                write!(f, "the control plane at {address} answered nonsense: {error}")
            }
            Self::BadRequest(error) => write!(f, "the request cannot be sent: {error}"),
        }
    }
}

impl std::error::Error for CallError {}

/// Why a connection is closed, as it travels in QUIC's close frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseCode {
    /// Nothing more to say.
    Done = 0,
    /// A frame that is not of this protocol.
    BadFrame = 1,
    /// The certificate is good but names no role in this cluster.
    NoRole = 2,
    /// The control plane goes down.
    ShuttingDown = 3,
    /// An answer did not come in time.
    Deadline = 4,
    /// The certificate was good and is not any more.
    Expired = 5,
    /// Another control plane leads.
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
/// Not valid yet, or not any more.
const ALERT_CERTIFICATE_EXPIRED: u64 = CRYPTO_ERROR + 45;
const ALERT_CERTIFICATE_UNKNOWN: u64 = CRYPTO_ERROR + 46;
const ALERT_UNKNOWN_CA: u64 = CRYPTO_ERROR + 48;
/// A signature that does not check: what another authority of the same name leads to.
const ALERT_DECRYPT_ERROR: u64 = CRYPTO_ERROR + 51;
pub(crate) const ALERT_CERTIFICATE_REQUIRED: u64 = CRYPTO_ERROR + 116;
pub(crate) const ALERT_NO_APPLICATION_PROTOCOL: u64 = CRYPTO_ERROR + 120;

/// Whether a transport-level failure is about a certificate that was presented.
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

/// The close code of a transport-level failure, whichever side found it.
pub(crate) fn transport_code(error: &ConnectionError) -> Option<u64> {
    match error {
        ConnectionError::TransportError(error) => Some(u64::from(error.code)),
        ConnectionError::ConnectionClosed(frame) => Some(u64::from(frame.error_code)),
        _ => None,
    }
}

/// Turns the end of a connection, before (`established` false) or after the first exchange, into a call's error.
pub(crate) fn from_connection(address: SocketAddr, error: &ConnectionError, established: bool) -> CallError {
    let ours = matches!(error, ConnectionError::TransportError(_));
    let advice = match transport_code(error) {
        Some(ALERT_NO_APPLICATION_PROTOCOL) => {
            Some(format!("it speaks another version of the protocol than {PROTOCOL_NAME}"))
        }
        Some(ALERT_CERTIFICATE_REQUIRED) => Some("it wants a certificate and none was presented".to_owned()),
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
            "our certificate is not from its authority: it is another cluster, or its authority was made anew"
                .to_owned(),
        ),
        _ => None,
    };
    let reason = match (&advice, error) {
        (Some(advice), _) => format!("{advice} ({error})"),
        (None, ConnectionError::ApplicationClosed(frame)) => {
            String::from_utf8_lossy(&frame.reason).chars().take(REASON_BYTES).collect()
        }
        (None, ConnectionError::TimedOut) => "no answer: is it running, and is UDP let through?".to_owned(),
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
