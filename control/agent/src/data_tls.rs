//! Identity for TLS on data connections: the certificate of the control link, kept up to date when it is replaced.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvplane_rpc::Role;
use kvplane_tls::{DataTls, Keychain, Material, TlsError};

use crate::error::Error;
use crate::link::ControlLink;
use crate::which::Control;

/// Interval at which the certificate files are checked for changes.
pub(crate) const LOOK: Duration = Duration::from_secs(5);

/// Identity of a process, and the keychain of its data connections, if it has one.
pub(crate) struct DataTlsIdentity {
    control: Control,
    role: Role,
    keychain: OnceLock<Arc<Keychain>>,
}

impl DataTlsIdentity {
    pub(crate) const fn new(control: Control, role: Role) -> Self {
        Self { control, role, keychain: OnceLock::new() }
    }

    /// Returns true if there is a keychain to keep up to date.
    pub(crate) fn is_wanted(&self) -> bool {
        self.keychain.get().is_some()
    }

    /// Loads the present certificate. If it cannot be read or used, the former one stays in use: the files may be in
    /// the middle of being written.
    pub(crate) fn look(&self) {
        let Some(keychain) = self.keychain.get() else { return };
        match self.material().and_then(|material| set(keychain, material)) {
            Ok(true) => tracing::info!("data connections use a new certificate from now on"),
            Ok(false) => {}
            Err(error) => tracing::debug!("cannot load a new certificate for data connections: {error}"),
        }
    }

    fn material(&self) -> Result<Material, Error> {
        let config = self.control.resolve(self.role)?.swap_remove(0);
        Ok(Material {
            cluster: config.cluster.as_str().to_owned(),
            certificate_pem: config.identity.certificate_pem().to_owned(),
            key_pem: config.identity.key_pem().to_owned(),
            trust_pem: config.trust.pem().to_owned(),
        })
    }

    fn keychain(&self, mode: DataTls, peers: Role) -> Result<Option<Arc<Keychain>>, Error> {
        if mode == DataTls::Off {
            return Ok(None);
        }
        let keychain = self.keychain.get_or_init(|| Arc::new(Keychain::new(mode, peers.name())));
        if keychain.mode() != mode {
            return Err(DataTlsError::Mode { earlier: keychain.mode(), now: mode }.into());
        }
        match self.material().and_then(|material| set(keychain, material)) {
            // Where TLS is optional, an unusable certificate is reported when a peer requires TLS.
            Err(error) if mode == DataTls::Require => Err(error),
            Ok(_) | Err(_) => Ok(Some(Arc::clone(keychain))),
        }
    }
}

fn set(keychain: &Keychain, material: Material) -> Result<bool, Error> {
    keychain.set(material).map_err(|error| DataTlsError::Certificate(error).into())
}

/// Reason why data connections cannot use TLS.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum DataTlsError {
    /// The control link, which has one keychain, was used with another mode before.
    Mode {
        /// Mode of the earlier use.
        earlier: DataTls,
        /// Mode that is requested now.
        now: DataTls,
    },
    /// The certificate or the key cannot be used.
    Certificate(TlsError),
}

impl fmt::Display for DataTlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mode { earlier, now } => write!(
                f,
                "data TLS is {earlier} in an earlier use of this control link, and {now} now: pass the same mode, or \
                 connect a separate link"
            ),
            Self::Certificate(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for DataTlsError {}

impl ControlLink {
    /// Returns the keychain of data connections, kept up to date while the control link lives; `None` if TLS is off.
    ///
    /// # Errors
    /// When TLS is required and the certificate cannot be used, or the control link was used with another mode.
    pub(crate) fn keychain(&self, mode: DataTls) -> Result<Option<Arc<Keychain>>, Error> {
        self.sealing().keychain(mode, Role::Node)
    }

    /// Returns the keychain of connections between processes of this process's own role, as [`Self::keychain`] does. A
    /// control link has a keychain for one of both.
    pub(crate) fn keychain_among_peers(&self, mode: DataTls) -> Result<Option<Arc<Keychain>>, Error> {
        self.sealing().keychain(mode, self.sealing().role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_both_modes_and_what_to_do() {
        let error = DataTlsError::Mode { earlier: DataTls::Off, now: DataTls::Require };
        assert_eq!(
            error.to_string(),
            "data TLS is off in an earlier use of this control link, and require now: pass the same mode, or connect \
             a separate link"
        );
    }
}
