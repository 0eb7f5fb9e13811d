//! Parsers of flag values: accept what this build supports, refuse the rest with its name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvplane::{RdmaConfig, RdmaUse};

/// Address that an engine listens on, and the IP that it announces to peers instead, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ListenAddress {
    pub(crate) listen: SocketAddr,
    pub(crate) announce: Option<IpAddr>,
}

/// Returns the listening address of an engine that is known as `address`, the value of `flag`. A side that serves its
/// memory needs `--open_to_network` for an address beyond loopback. A side that only connects to peers is never
/// connected to: its address is announced, and without that flag it listens on loopback.
///
/// # Errors
/// Fails if the flag is missing, or if the address is unspecified and cannot be announced.
pub(crate) fn reached(
    flag: &str,
    address: SocketAddr,
    gives_memory: bool,
    open: bool,
) -> Result<ListenAddress, String> {
    if open || address.ip().is_loopback() {
        return Ok(ListenAddress { listen: address, announce: None });
    }
    // An unspecified address cannot be announced to peers: an engine with such an address serves every host.
    if gives_memory || address.ip().is_unspecified() {
        return Err(format!(
            "{flag} {address} would be open without authentication: every host that reaches it could read and write \
             all of the registered memory; give a loopback address, or --open_to_network to allow it"
        ));
    }
    let loopback: IpAddr = if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    Ok(ListenAddress { listen: SocketAddr::new(loopback, address.port()), announce: Some(address.ip()) })
}

/// Transport of a benchmark, or the best one that both sides have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    /// The best transport that both sides have.
    Any,
    /// TCP only.
    Tcp,
    /// RDMA only.
    Rdma,
    /// Shared memory only, mapped.
    Shm,
    /// CMA only: within the host, copied by the kernel between the processes.
    Cma,
    /// Files only, by io_uring.
    Uring,
    /// Within this process only.
    Local,
}

impl Transport {
    /// Returns the use of RDMA by this transport.
    pub(crate) const fn rdma(self) -> RdmaUse {
        match self {
            Self::Any => RdmaUse::Auto,
            Self::Rdma => RdmaUse::Require,
            Self::Tcp | Self::Shm | Self::Cma | Self::Uring | Self::Local => RdmaUse::Never,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Any => "",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Uring => "iouring",
            Self::Local => "local",
        }
    }
}

/// Parses a transport of `--xport_type`, `--tent_transport_hint` or `-protocol`.
pub(crate) fn transport(text: &str) -> Result<Transport, String> {
    Ok(match text {
        "" | "unspec" => Transport::Any,
        "tcp" => Transport::Tcp,
        "rdma" => Transport::Rdma,
        "shm" => Transport::Shm,
        "cma" => Transport::Cma,
        "iouring" | "io_uring" => Transport::Uring,
        "local" => Transport::Local,
        _ => {
            return Err(format!(
                "{}: use tcp, rdma, shm, cma, iouring or local",
                missing_transport(text)
                    .ok_or_else(|| format!("{text:?} is not a transport: use tcp, rdma, shm, cma, iouring or local"))?
            ));
        }
    })
}

/// Returns the reason why a transport of other engines is not available in this build.
fn missing_transport(text: &str) -> Option<String> {
    let what = match text {
        "barex" | "efa" | "hp_tcp" => "no driver of network cards that bypass the kernel, other than RDMA's",
        "mnnvl" | "nvlink" | "nvlink_intra" | "gds" | "musa" | "hip" | "mpcomm" => "no driver of GPU memory",
        "ascend" | "sunrise_link" | "ub" | "cxl" | "nvmeof" => "no driver of that device",
        _ => return None,
    };
    Some(format!("{text} is not available: this build has {what}"))
}

/// Returns the configuration of RDMA in this mode, over the devices of the flag, or all if it names none. `matrix` is
/// the affinity of devices to memory, as JSON or the path of a JSON file; empty to derive it from the machine's
/// topology.
pub(crate) fn rdma(flag: &str, mode: RdmaUse, devices: &[String], matrix: &str) -> Result<RdmaConfig, String> {
    let names = devices.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let devices: Vec<String> = names.collect();
    if mode == RdmaUse::Never && !devices.is_empty() {
        return Err(format!("{flag} {}: RDMA is disabled by the other flags", devices.join(",")));
    }
    if mode == RdmaUse::Never && !matrix.is_empty() {
        return Err("a matrix of RDMA devices is given, but RDMA is disabled by the other flags".to_owned());
    }
    let matrix = (!matrix.is_empty()).then(|| matrix.to_owned());
    Ok(RdmaConfig { devices, matrix, ..RdmaConfig::of(mode) })
}

/// Parses a type of memory; only system memory is supported.
pub(crate) fn memory(text: &str) -> Result<String, String> {
    match text.to_ascii_uppercase().as_str() {
        "DRAM" => Ok("DRAM".to_owned()),
        "VRAM" => Err("VRAM is not available: this build has no driver of GPU memory; use DRAM".to_owned()),
        _ => Err(format!("{text:?} is not a type of memory: use DRAM")),
    }
}

/// Parses types of memory, separated by commas; none for an empty text.
pub(crate) fn memories(text: &str) -> Result<Vec<String>, String> {
    text.split(',').map(str::trim).filter(|kind| !kind.is_empty()).map(memory).collect()
}

/// Parses the number of a GPU: only the values that mean none in particular.
pub(crate) fn gpu(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(number @ (-1 | 0)) => Ok(number),
        Ok(number) => {
            Err(format!("GPU {number} is not available: this build has no driver of GPU memory; use 0 or -1"))
        }
        Err(_) => Err(format!("{text:?} is not the number of a GPU")),
    }
}

/// Parses seconds above 0, also fractions.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match seconds_or_none(text)? {
        0.0 => Err("a case of 0 seconds measures nothing".to_owned()),
        seconds => Ok(seconds),
    }
}

/// Parses seconds from 0, also fractions.
pub(crate) fn seconds_or_none(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    match (0.0..=1e6).contains(&seconds) {
        true => Ok(seconds),
        false => Err(format!("{text} seconds: give from 0 to 1000000")),
    }
}

/// Parses a capacity in GB/s; 0 means unknown.
pub(crate) fn capacity(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
        _ => Err(format!("{text:?} is not a capacity: give GB/s from 0")),
    }
}

/// Builds the connection string of a metadata store from its kind and the list of its addresses.
pub(crate) fn metadata(kind: &str, list: &str) -> Result<String, String> {
    let urls: Vec<&str> = list.split(',').map(str::trim).filter(|url| !url.is_empty()).collect();
    if kind == "p2p" {
        return match urls.is_empty() {
            true => Ok("P2PHANDSHAKE".to_owned()),
            false => Err(format!("--metadata_url_list {list:?} needs --metadata_type http, etcd or redis")),
        };
    }
    let [first, rest @ ..] = urls.as_slice() else {
        return Err(format!("--metadata_type {kind} needs --metadata_url_list"));
    };
    if kind != "etcd" && !rest.is_empty() {
        return Err(format!("--metadata_url_list {list:?} has {} addresses, {kind} takes one", urls.len()));
    }
    let bare = |url: &str| url.split_once("://").map_or(url, |(_, address)| address).to_owned();
    Ok(match kind {
        "http" if first.contains("://") => (*first).to_owned(),
        "http" => format!("http://{first}"),
        // An etcd cluster is named by all of its addresses.
        "etcd" => format!("etcd://{}", urls.iter().map(|url| bare(url)).collect::<Vec<_>>().join(";")),
        _ => format!("{kind}://{}", bare(first)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serving_beyond_loopback_needs_the_flag_and_initiators_open_no_port() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let error = reached("--seg_name", at("192.0.2.7:5"), true, false).unwrap_err();
        assert!(error.contains("--seg_name 192.0.2.7:5") && error.contains("--open_to_network"), "{error}");
        let plain = |listen| Ok(ListenAddress { listen, announce: None });
        assert_eq!(reached("--seg_name", at("192.0.2.7:5"), true, true), plain(at("192.0.2.7:5")));
        assert_eq!(reached("--seg_name", at("[::1]:5"), true, false), plain(at("[::1]:5")));
        let known = |listen, as_ip: &str| Ok(ListenAddress { listen, announce: as_ip.parse().ok() });
        assert_eq!(reached("--seg_name", at("192.0.2.7:5"), false, false), known(at("127.0.0.1:5"), "192.0.2.7"));
        assert_eq!(reached("--seg_name", at("[2001:db8::7]:0"), false, false), known(at("[::1]:0"), "2001:db8::7"));
        assert!(reached("--seg_name", at("0.0.0.0:0"), false, false).is_err_and(|error| error.contains("0.0.0.0:0")));
    }

    #[test]
    fn unavailable_values_are_refused_by_name() {
        for (text, words) in [("efa", "efa is not available"), ("gds", "GPU memory"), ("pigeon", "not a transport")] {
            let error = transport(text).unwrap_err();
            assert!(error.contains(words) && error.contains("tcp"), "{error}");
        }
        for name in ["tcp", "rdma", "shm", "cma", "iouring", "local", ""] {
            assert_eq!(transport(name).unwrap().name(), name);
        }
        assert_eq!(memories("dram, DRAM").unwrap(), ["DRAM", "DRAM"]);
        assert!(memories("dram,vram").unwrap_err().contains("VRAM is not available"));
        assert!(gpu("-1").is_ok() && gpu("0").is_ok() && gpu("1").unwrap_err().contains("GPU 1"));
        assert!(seconds("0").is_err() && seconds("nan").is_err() && seconds("0.02").is_ok());
        assert!(capacity("-1").is_err() && capacity("inf").is_err() && capacity("12.5").is_ok());
    }

    #[test]
    fn devices_are_named_for_rdma_only() {
        let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let config = rdma("--x", RdmaUse::Require, &list(" mlx5_1,, mlx5_0 "), "/m").unwrap();
        assert_eq!((config.mode, config.devices), (RdmaUse::Require, list("mlx5_1,mlx5_0")));
        assert!(rdma("--x", Transport::Any.rdma(), &list(""), "").unwrap().devices.is_empty());
        let error = rdma("--x", Transport::Tcp.rdma(), &list("mlx5_0"), "").unwrap_err();
        assert!(error.contains("--x mlx5_0"), "{error}");
    }

    #[test]
    fn stores_of_metadata_are_named_as_the_engine_has_it() {
        let cases = [
            ("p2p", "", "P2PHANDSHAKE"),
            ("http", "http://127.0.0.1:8080/metadata", "http://127.0.0.1:8080/metadata"),
            ("http", "127.0.0.1:8080/metadata", "http://127.0.0.1:8080/metadata"),
            ("etcd", "10.0.0.1:2379,http://10.0.0.2:2379", "etcd://10.0.0.1:2379;10.0.0.2:2379"),
            ("redis", "127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ];
        for (kind, list, expected) in cases {
            assert_eq!(metadata(kind, list).unwrap(), expected);
        }
        assert!(metadata("p2p", "http://x").unwrap_err().contains("--metadata_url_list"));
        assert!(metadata("redis", "").unwrap_err().contains("needs --metadata_url_list"));
        assert!(metadata("redis", "a:1,b:2").unwrap_err().contains("2 addresses"));
    }
}
