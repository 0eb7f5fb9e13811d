//! What went wrong, in words that say what to do.

use core::fmt;

use rustls::{AlertDescription, CertificateError, Error};

/// Why a connection cannot be sealed, or not any longer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsError(String);

impl TlsError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn alert(alert: AlertDescription) -> Self {
        Self(format!("the peer ended TLS: {}", alert_text(alert)))
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
            Error::NoCertificatesPresented => "the peer showed no certificate; it needs one of this cluster, from \
                                               kvplane ctl cert issue"
                .to_owned(),
            Error::AlertReceived(alert) => return Self::alert(*alert),
            Error::InvalidMessage(_)
            | Error::InappropriateMessage { .. }
            | Error::InappropriateHandshakeMessage { .. } => {
                format!("the peer sent what is not TLS as it should be: {error}")
            }
            Error::PeerIncompatible(_) => {
                format!("the peer speaks no TLS that is spoken here (TLS 1.3): {error}")
            }
            Error::DecryptError => "a record was changed on its way, or sealed with other keys".to_owned(),
            _ => format!("TLS failed: {error}"),
        };
        Self(text)
    }
}

fn certificate_text(reason: &CertificateError) -> String {
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the peer's certificate has ended: issue a new one with kvplane ctl cert issue, or set its clock or ours"
                .to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the peer's certificate is not valid yet: look at its clock and ours".to_owned()
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the peer's certificate is not from this cluster's authority: it is self-made, of another cluster, or its \
             authority is retired"
                .to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the peer's certificate is not for what it does: who serves data needs one of its role in this cluster, \
             see kvplane ctl cert issue"
                .to_owned()
        }
        other => format!("the peer's certificate is of no use: {other}"),
    }
}

fn alert_text(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateExpired => {
            "it finds that our certificate has ended, or is not valid yet: issue a new one with kvplane ctl cert issue"
                .to_owned()
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "our certificate is not from its cluster's authority: take an identity of that cluster".to_owned()
        }
        AlertDescription::CertificateRequired => {
            "it wants a certificate and we have shown none: give this process an identity of the cluster".to_owned()
        }
        AlertDescription::BadCertificate | AlertDescription::AccessDenied => {
            "it does not take our certificate: it is of no role in its cluster".to_owned()
        }
        AlertDescription::BadRecordMac => "it received a record that was changed on its way".to_owned(),
        AlertDescription::ProtocolVersion => "it speaks no TLS 1.3".to_owned(),
        other => format!("it says {other:?}"),
    }
}
