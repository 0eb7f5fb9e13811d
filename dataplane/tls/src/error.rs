//! Errors of TLS, with the next step for the operator.

use core::fmt;

use rustls::{AlertDescription, CertificateError, ContentType, Error};

use crate::session::HEADER_BYTES;

/// Certificate, key or setting of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsPart {
    /// Certificate of the cluster's authority.
    Authority,
    /// Certificate of this process.
    Certificate,
    /// Key of that certificate.
    Key,
    /// Certificate and key, which do not belong together or are of an unknown kind.
    Pair,
    /// Version 1.3 of the protocol.
    Version,
}

/// Reason why a TLS connection cannot be established or continued.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum TlsError {
    /// The peer's handshake or one of its records was rejected.
    Rejected(Error),
    /// The peer has rejected ours.
    Alert(AlertDescription),
    /// The peer closed TLS with an alert of another length.
    MalformedAlert,
    /// The peer's certificate is of the cluster's authority, and of no role.
    NoRole,
    /// A certificate, key or setting of this process cannot be used.
    Unusable {
        /// Part that cannot be used.
        part: TlsPart,
        /// Reason.
        detail: String,
    },
    /// The name of the cluster cannot be in a certificate.
    ClusterName {
        /// Name.
        cluster: String,
        /// Reason.
        detail: String,
    },
    /// This process has no certificate for data connections yet.
    NoCertificate,
    /// The peer's bytes are no TLS record.
    NotTls {
        /// First bytes.
        header: [u8; HEADER_BYTES],
    },
    /// The peer's handshake takes more than this.
    LongHandshake {
        /// Largest number of records.
        records: usize,
        /// Largest number of bytes.
        bytes: usize,
    },
    /// The peers did not negotiate TLS 1.3.
    OtherVersion,
    /// The peers negotiated a cipher that is unknown here.
    UnknownCipher,
    /// The peer sent a record that is not encrypted.
    Unencrypted,
    /// The peer sent a record of this type where none may be.
    UnexpectedRecord(ContentType),
    /// The peer sent a handshake message that is not allowed after the handshake.
    UnexpectedHandshake,
}

impl fmt::Display for TlsPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Authority => "the authority's certificate",
            Self::Certificate => "our certificate",
            Self::Key => "the key of our certificate",
            Self::Pair => "our certificate with its key",
            Self::Version => "TLS 1.3",
        })
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Rejected(error) => return f.write_str(&rejection_text(error)),
            Self::Alert(alert) => return write!(f, "the peer closed TLS: {}", alert_text(*alert)),
            Self::Unusable { part, detail } => return write!(f, "{part} cannot be used for TLS: {detail}"),
            Self::ClusterName { cluster, detail } => return write!(f, "{cluster:?} cannot name a cluster: {detail}"),
            Self::NotTls { header } => {
                return write!(f, "the peer sent no TLS record: its bytes begin with {header:02x?}");
            }
            Self::LongHandshake { records, bytes } => {
                return write!(f, "the peer's handshake is over {records} records or {bytes} bytes");
            }
            Self::UnexpectedRecord(typ) => return write!(f, "the peer sent a record of the unexpected type {typ:?}"),
            Self::MalformedAlert => "the peer closed TLS with a malformed alert",
            Self::NoRole => "the peer's certificate has no role in this cluster",
            Self::NoCertificate => "this process has no certificate for data connections yet",
            Self::OtherVersion => "the peers did not negotiate TLS 1.3",
            Self::UnknownCipher => "the peers negotiated an unknown cipher",
            Self::Unencrypted => "the peer sent an unencrypted record after the handshake",
            Self::UnexpectedHandshake => "the peer sent a handshake message that is not allowed after the handshake",
        };
        f.write_str(text)
    }
}

impl std::error::Error for TlsError {}

impl From<Error> for TlsError {
    fn from(error: Error) -> Self {
        match error {
            Error::AlertReceived(alert) => Self::Alert(alert),
            other => Self::Rejected(other),
        }
    }
}

fn rejection_text(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(reason) => certificate_text(reason),
        Error::NoCertificatesPresented => "the peer presented no certificate; it needs one of this cluster, from \
                                           kvplane ctl cert issue"
            .to_owned(),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => {
            format!("the peer violated the TLS protocol: {error}")
        }
        Error::PeerIncompatible(_) => {
            format!("the peer does not support TLS 1.3 with the ciphers used here: {error}")
        }
        Error::DecryptError => "a record was changed in transit, or encrypted with other keys".to_owned(),
        _ => format!("TLS failed: {error}"),
    }
}

fn certificate_text(reason: &CertificateError) -> String {
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the peer's certificate has expired: issue a new one with kvplane ctl cert issue, or set its clock or ours"
                .to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the peer's certificate is not valid yet: check its clock and ours".to_owned()
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the peer's certificate is not from this cluster's authority: it is self-signed or of another cluster, or \
             its authority is retired"
                .to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the peer's certificate is not for its role: a server of data needs one of that role in this cluster, \
             see kvplane ctl cert issue"
                .to_owned()
        }
        other => format!("the peer's certificate is invalid: {other}"),
    }
}

fn alert_text(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateExpired => {
            "our certificate has expired, or is not valid yet: issue a new one with kvplane ctl cert issue".to_owned()
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "our certificate is not from its cluster's authority: take an identity of that cluster".to_owned()
        }
        AlertDescription::CertificateRequired => {
            "it requires a certificate and we presented none: give this process an identity of the cluster".to_owned()
        }
        AlertDescription::BadCertificate | AlertDescription::AccessDenied => {
            "it rejects our certificate, which has no role in its cluster".to_owned()
        }
        AlertDescription::BadRecordMac => "it received a record that was changed in transit".to_owned(),
        AlertDescription::ProtocolVersion => "it does not support TLS 1.3".to_owned(),
        other => format!("alert {other:?}"),
    }
}
