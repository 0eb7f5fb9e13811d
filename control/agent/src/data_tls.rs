//! What data connections are sealed with: the certificate of the line to the control plane, and whatever replaces it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvplane_rpc::Role;
use kvplane_tls::{DataTls, Keychain, Material};

use crate::error::Error;
use crate::link::ControlLink;
use crate::which::Control;

/// How often it is looked whether there is another certificate.
pub(crate) const LOOK: Duration = Duration::from_secs(5);

/// Who a process is, and the keychain of its data connections, if it has one.
pub(crate) struct DataTlsIdentity {
    control: Control,
    role: Role,
    keychain: OnceLock<Arc<Keychain>>,
}

impl DataTlsIdentity {
    pub(crate) const fn new(control: Control, role: Role) -> Self {
        Self { control, role, keychain: OnceLock::new() }
    }

    /// Whether there is a keychain to keep up to date.
    pub(crate) fn is_wanted(&self) -> bool {
        self.keychain.get().is_some()
    }

    /// Takes the certificate that is there now. What cannot be read or used leaves the one before it: somebody may be
    /// writing it.
    pub(crate) fn look(&self) {
        let Some(keychain) = self.keychain.get() else { return };
        match self.material().and_then(|material| set(keychain, material)) {
            Ok(true) => tracing::info!("data connections take another certificate from now on"),
            Ok(false) => {}
            Err(error) => tracing::debug!("no other certificate for data connections: {error}"),
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

    fn keychain(&self, mode: DataTls) -> Result<Option<Arc<Keychain>>, Error> {
        if mode == DataTls::Off {
            return Ok(None);
        }
        let keychain = self.keychain.get_or_init(|| Arc::new(Keychain::new(mode, Role::Node.name())));
        if keychain.mode() != mode {
            return Err(Error::Argument(format!(
                "data TLS is {} where this line to the control plane was used first, and {mode} now: say the same, or \
                 use a line of its own",
                keychain.mode()
            )));
        }
        match self.material().and_then(|material| set(keychain, material)) {
            // Where nobody may want it, a certificate that is of no use is said when somebody does.
            Err(error) if mode == DataTls::Require => Err(error),
            Ok(_) | Err(_) => Ok(Some(Arc::clone(keychain))),
        }
    }
}

fn set(keychain: &Keychain, material: Material) -> Result<bool, Error> {
    keychain.set(material).map_err(|error| Error::Argument(error.to_string()))
}

impl ControlLink {
    /// What data connections are sealed with, kept up to date as long as the line lives; none where they are not.
    ///
    /// # Errors
    /// When TLS is required and our certificate cannot be used, or the line was used with another mode.
    pub(crate) fn keychain(&self, mode: DataTls) -> Result<Option<Arc<Keychain>>, Error> {
        self.sealing().keychain(mode)
    }
}
