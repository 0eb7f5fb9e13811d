//! Address of a mesh, which its process publishes and its peers connect to: `kvplane-mesh://TCP/HOST/SOCKET`.
//!
//! `TCP` is the address of its TCP port, or `-` where TCP is off; `HOST` the identity of its host, and `SOCKET` the
//! path of its Unix socket, if it has one.

use core::fmt;
use core::str::FromStr;
use std::net::SocketAddr;
use std::path::PathBuf;

const SCHEME: &str = "kvplane-mesh://";

/// Error: a text is no address of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressError;

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not the address of a mesh, which has the form {SCHEME}TCP/HOST/SOCKET")
    }
}

impl std::error::Error for AddressError {}

/// Parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) tcp: Option<SocketAddr>,
    pub(crate) host: String,
    pub(crate) socket: Option<PathBuf>,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tcp = self.tcp.map_or_else(|| "-".to_owned(), |tcp| tcp.to_string());
        write!(f, "{SCHEME}{tcp}/{}", self.host)?;
        // The path begins with the slash that separates it.
        self.socket.as_ref().map_or(Ok(()), |socket| write!(f, "{}", socket.display()))
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let rest = text.strip_prefix(SCHEME).ok_or(AddressError)?;
        let (tcp, rest) = rest.split_once('/').ok_or(AddressError)?;
        let tcp = if tcp == "-" { None } else { Some(tcp.parse().map_err(|_| AddressError)?) };
        let (host, socket) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let socket = (!socket.is_empty()).then(|| PathBuf::from(socket));
        if tcp.is_none() && socket.is_none() {
            return Err(AddressError);
        }
        Ok(Self { tcp, host: host.to_owned(), socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_back() {
        for (tcp, socket, text) in [
            (Some("10.0.0.1:7501"), None, "kvplane-mesh://10.0.0.1:7501/6b7d-11"),
            (None, Some("/run/a.shm"), "kvplane-mesh://-/6b7d-11/run/a.shm"),
            (Some("[fe80::1]:9"), Some("/run/user/0/a.shm"), "kvplane-mesh://[fe80::1]:9/6b7d-11/run/user/0/a.shm"),
        ] {
            let address = Address {
                tcp: tcp.map(|tcp| tcp.parse().expect("an address")),
                host: "6b7d-11".to_owned(),
                socket: socket.map(PathBuf::from),
            };
            assert_eq!(address.to_string(), text);
            assert_eq!(text.parse(), Ok(address));
        }
        for wrong in ["", "1.2.3.4:5", "kvplane-mesh://", "kvplane-mesh://-/h", "kvplane-mesh://x/h/s"] {
            assert_eq!(wrong.parse::<Address>(), Err(AddressError), "{wrong}");
        }
    }
}
