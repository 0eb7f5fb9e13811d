//! Addresses of an engine, listened on and announced, from the host name that a user gives.
//!
//! A user may name an address that no interface of this machine has: that of a NAT gateway, of a container's host or of
//! a Kubernetes service. Such an address is announced, and the engine listens on all addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

/// Addresses of an engine, from the host name that its user gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnAddress {
    /// Address to listen on.
    pub listen: IpAddr,
    /// Address to announce to peers, where it differs.
    pub announce: Option<IpAddr>,
    /// Port in the name, if any.
    pub port: Option<u16>,
}

impl OwnAddress {
    /// Resolves `name`: a host name, an IPv4 or IPv6 address, each with or without a port. An IPv6 address may be in
    /// brackets, must be if a port follows, and may have a scope (`fe80::1%eth0`). An empty name is the loopback
    /// address. `bind` is the address to listen on, if it is known otherwise.
    ///
    /// If an interface has the address, the engine listens on that address only. Otherwise the engine listens on all
    /// addresses, and a line on standard error reports it; for a name that does not resolve, or an unspecified address,
    /// it announces the address from which this machine reaches others.
    #[must_use]
    pub fn resolve(name: &str, bind: Option<IpAddr>) -> Self {
        let (host, port) = split(name);
        if let Some(listen) = bind {
            let announce = listen.is_unspecified().then(|| announced(host).unwrap_or_else(|| outward(listen)));
            return Self { listen, announce, port };
        }
        match announced(host) {
            Some(ip) if has_interface(ip) => Self { listen: ip, announce: None, port },
            found => {
                let any = any_of(found.or_else(|| host.parse().ok()));
                let announce = found.unwrap_or_else(|| outward(any));
                eprintln!(
                    "kvplane: no interface of this machine has the address {host}: the engine listens on {any}, and \
                     announces the address {announce}"
                );
                Self { listen: any, announce: Some(announce), port }
            }
        }
    }
}

/// Splits a name into host and port.
pub(crate) fn split(name: &str) -> (&str, Option<u16>) {
    let (host, port) = match name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        // More than one colon without brackets is an IPv6 address, whose last group is no port.
        None => match name.split_once(':') {
            Some((host, port)) if !port.contains(':') => (host, Some(port)),
            _ => (name, None),
        },
    };
    (host, port.and_then(|port| port.parse().ok()))
}

/// Returns the address that a host name stands for, unless peers could not use it.
fn announced(host: &str) -> Option<IpAddr> {
    if host.is_empty() || host == "localhost" {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    let bare = host.split_once('%').map_or(host, |(bare, _)| bare);
    let literal = bare.parse().ok();
    let found = literal.or_else(|| (host, 0).to_socket_addrs().ok()?.next().map(|address| address.ip()));
    found.filter(|ip| !ip.is_unspecified())
}

fn any_of(ip: Option<IpAddr>) -> IpAddr {
    if ip.is_some_and(|ip| ip.is_ipv6()) { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// Returns true if an interface of this machine has the address. Link-local addresses that need a scope count as
/// remote.
fn has_interface(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Returns the address from which this machine reaches others; the loopback address where there is no route.
fn outward(any: IpAddr) -> IpAddr {
    // No packet is sent: connecting a UDP socket only looks up the route. Both addresses are for documentation.
    let (far, loopback): (IpAddr, IpAddr) = if any.is_ipv4() {
        (Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::LOCALHOST.into())
    } else {
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(), Ipv6Addr::LOCALHOST.into())
    };
    let found = UdpSocket::bind(SocketAddr::new(any, 0)).and_then(|socket| {
        socket.connect((far, 9))?;
        socket.local_addr()
    });
    found.map_or(loopback, |address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_are_split() {
        for (name, host, port) in [
            ("", "", None),
            ("host", "host", None),
            ("host:12345", "host", Some(12345)),
            ("10.0.0.1:80", "10.0.0.1", Some(80)),
            ("::1", "::1", None),
            ("fd00::1234", "fd00::1234", None),
            ("2001:db8::102", "2001:db8::102", None),
            ("fe80::1%eth0", "fe80::1%eth0", None),
            ("[::1]", "::1", None),
            ("[fd00::1234]:15000", "fd00::1234", Some(15000)),
            ("[fe80::1%eth0]:7", "fe80::1%eth0", Some(7)),
            ("::", "::", None),
        ] {
            assert_eq!(split(name), (host, port), "{name}");
        }
    }

    #[test]
    fn an_address_of_this_machine_is_the_only_one_listened_on() {
        let loopback: IpAddr = Ipv4Addr::LOCALHOST.into();
        for (name, port) in [("", None), ("localhost:5", Some(5)), ("127.0.0.1", None), ("127.0.0.1:0", Some(0))] {
            assert_eq!(
                OwnAddress::resolve(name, None),
                OwnAddress { listen: loopback, announce: None, port },
                "{name}"
            );
        }
        let other = OwnAddress::resolve("203.0.113.7:5", Some(loopback));
        assert_eq!(other, OwnAddress { listen: loopback, announce: None, port: Some(5) });
    }

    #[test]
    fn a_foreign_address_is_announced_and_all_are_listened_on() {
        let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        for name in ["203.0.113.7", "203.0.113.7:12345"] {
            let made = OwnAddress::resolve(name, None);
            assert_eq!((made.listen, made.announce), (any, "203.0.113.7".parse().ok()), "{name}");
        }
        let made = OwnAddress::resolve("2001:db8::102", None);
        assert_eq!((made.listen, made.announce), (Ipv6Addr::UNSPECIFIED.into(), "2001:db8::102".parse().ok()));
        for name in ["0.0.0.0", "no-such-host.invalid", "no-such-host.invalid:7"] {
            let made = OwnAddress::resolve(name, None);
            assert_eq!(made.listen, any, "{name}");
            assert!(made.announce.is_some_and(|ip| ip.is_ipv4() && !ip.is_unspecified()), "{name}: {made:?}");
        }
        let made = OwnAddress::resolve("203.0.113.7", Some(any));
        assert_eq!((made.listen, made.announce), (any, "203.0.113.7".parse().ok()));
        let made = OwnAddress::resolve("::", None);
        assert_eq!(made.listen, IpAddr::from(Ipv6Addr::UNSPECIFIED));
        assert!(made.announce.is_some_and(|ip| ip.is_ipv6() && !ip.is_unspecified()), "{made:?}");
    }
}
