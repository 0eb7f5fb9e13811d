//! Direct names, which contain the address of an engine, for engines without handshakes:
//! `kvplane://ADDRESS/INCARNATION/HOST/SOCKET`.
//!
//! `ADDRESS` is the data port, `INCARNATION` the number that the engine drew at its start, `HOST` the identity of its
//! host, and `SOCKET` the path of its Unix socket, where it has one. A peer that opens such a name connects to the
//! address over the native protocol, and proves a ticket; a wrong name leads to no engine.

use std::net::SocketAddr;

use kvplane_mooncake::{Descriptor, Native};

use crate::error::{DirectNameError, Error, PublishedError};

/// Prefix of direct names.
pub(crate) const SCHEME: &str = "kvplane://";

pub(crate) fn is_direct(name: &str) -> bool {
    name.starts_with(SCHEME)
}

/// Returns the direct name of an engine.
pub(crate) fn name_of(native: &Native) -> String {
    let address = native.tcp.map(|address| address.to_string()).unwrap_or_default();
    // The path begins with the slash that separates it.
    format!("{SCHEME}{address}/{:016x}/{}{}", native.incarnation, native.host, native.shm)
}

/// Parses a direct name into a descriptor.
///
/// # Errors
/// When it is no direct name.
pub(crate) fn descriptor_of(name: &str) -> Result<Descriptor, Error> {
    let wrong = |why| Error::Malformed(PublishedError::DirectName { name: name.to_owned(), why });
    let rest = name.strip_prefix(SCHEME).ok_or_else(|| wrong(DirectNameError::Scheme))?;
    let mut parts = rest.splitn(3, '/');
    let (address, incarnation, host) = (parts.next(), parts.next(), parts.next());
    let (Some(address), Some(incarnation), Some(host)) = (address, incarnation, host) else {
        return Err(wrong(DirectNameError::Parts));
    };
    let address: SocketAddr = address.parse().map_err(|_| wrong(DirectNameError::Address))?;
    let incarnation = u64::from_str_radix(incarnation, 16).map_err(|_| wrong(DirectNameError::Incarnation))?;
    let (host, shm) = host.find('/').map_or((host, ""), |slash| host.split_at(slash));
    let mut descriptor = Descriptor::tcp(name, &address.ip().to_string(), 0);
    descriptor.native = Some(Native {
        tcp: Some(address),
        shm: shm.to_owned(),
        host: host.to_owned(),
        pid: 0,
        incarnation,
        regions: Vec::new(),
        rails: None,
        other: serde_json::Map::new(),
    });
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direct_name_carries_the_descriptor() {
        for (shm, address) in [("", "10.0.0.1:7501"), ("/run/user/0/kvplane/segment-7501.shm", "[fe80::1]:9")] {
            let native = Native {
                tcp: Some(address.parse().expect("an address")),
                shm: shm.to_owned(),
                host: "6b7d-11".to_owned(),
                pid: 0,
                incarnation: u64::MAX - 5,
                regions: Vec::new(),
                rails: None,
                other: serde_json::Map::new(),
            };
            let name = name_of(&native);
            assert_eq!(descriptor_of(&name).expect("it was made here").native, Some(native), "{name}");
        }
        for wrong in
            ["", "x", "1.2.3.4:5", "kvplane://", "kvplane://1.2.3.4:5", "kvplane://a/1/h", "kvplane://1.2.3.4:5/x/h"]
        {
            assert!(descriptor_of(wrong).is_err(), "{wrong}");
        }
    }
}
