//! Errors of TLS, with the next step for the operator.

use core::fmt;

use rustls::{AlertDescription, CertificateError, Error};

/// Reason why a TLS connection cannot be established or continued.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsError(String);

impl TlsError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn alert(alert: AlertDescription) -> Self {
        Self(format!("the peer closed TLS: {}", alert_text(alert)))
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

impl From<Error> for TlsError {
    fn from(error: Error) -> Self {
        let text = match &error {
            Error::InvalidCertificate(reason) => certificate_text(reason),
            Error::NoCertificatesPresented => "the peer presented no certificate; it needs one of this cluster, from \
                                               kvplane ctl cert issue"
                .to_owned(),
            Error::AlertReceived(alert) => return Self::alert(*alert),
            Error::InvalidMessage(_)
            | Error::InappropriateMessage { .. }
            | Error::InappropriateHandshakeMessage { .. } => {
                format!("the peer violated the TLS protocol: {error}")
            }
            Error::PeerIncompatible(_) => {
                format!("the peer does not support TLS 1.3 with the ciphers used here: {error}")
            }
            Error::DecryptError => "a record was changed in transit, or encrypted with other keys".to_owned(),
            _ => format!("TLS failed: {error}"),
        };
        Self(text)
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
