//! Parsers of flag values: accept what this build supports, refuse the rest with its name.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvplane::device::DeviceId;
use kvplane::{RdmaConfig, RdmaUse};

/// Error of a flag's value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ValueError {
    /// Any host could reach the registered memory at this address.
    Open { flag: String, address: SocketAddr },
    /// No engine has a transport of that name.
    UnknownTransport { name: String },
    /// Other engines have the transport, this build has not.
    NoTransport {
        name: String,
        /// Missing part of the build.
        lacks: &'static str,
    },
    /// RDMA devices are named, and RDMA is disabled.
    Devices { flag: String, devices: String },
    /// A matrix of RDMA devices is given, and RDMA is disabled.
    Matrix,
    /// No GPU has a driver.
    Vram {
        /// Reasons of the drivers.
        reasons: Vec<String>,
    },
    /// There is no GPU of that number.
    NoGpu {
        gpu: GpuChoice,
        /// Number of visible GPUs.
        visible: usize,
    },
    /// No memory is of that type.
    UnknownMemory { kind: String },
    /// A GPU is named for a tool that uses none.
    Gpu { number: i32 },
    /// The text is not the number of a GPU.
    NotGpu { text: String },
    /// A case of 0 seconds measures nothing.
    NoSeconds,
    /// The text is not a number of seconds.
    NotSeconds { text: String },
    /// The seconds are out of range.
    Seconds { text: String },
    /// The text is not a capacity.
    NotCapacity { text: String },
    /// Metadata addresses are given, and the metadata is without a store.
    UrlsOfP2p { list: String },
    /// The metadata store has no address.
    NoUrls { kind: String },
    /// The metadata store takes only one address.
    ManyUrls { list: String, urls: usize, kind: String },
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { flag, address } => write!(
                f,
                "{flag} {address} would be open without authentication: every host that reaches it could read and \
                 write all of the registered memory; give a loopback address, or --open_to_network to allow it"
            ),
            Self::UnknownTransport { name } => {
                write!(f, "{name:?} is not a transport: use tcp, rdma, shm, cma, iouring or local")
            }
            Self::NoTransport { name, lacks } => {
                write!(f, "{name} is not available: this build has {lacks}: use tcp, rdma, shm, cma, iouring or local")
            }
            Self::Devices { flag, devices } => {
                write!(f, "{flag} {devices}: RDMA is disabled by the other flags")
            }
            Self::Matrix => f.write_str("a matrix of RDMA devices is given, but RDMA is disabled by the other flags"),
            Self::Vram { reasons } => write!(f, "VRAM is not available: {}; use DRAM", reasons.join("; ")),
            Self::NoGpu { gpu, visible } => write!(f, "GPU {gpu} is not available: {visible} are visible"),
            Self::UnknownMemory { kind } => write!(f, "{kind:?} is not a type of memory: use DRAM or VRAM"),
            Self::Gpu { number } => {
                write!(f, "GPU {number}: this tool moves memory of the host; use 0 or -1, or kvplane tebench")
            }
            Self::NotGpu { text } => write!(f, "{text:?} is not the number of a GPU"),
            Self::NoSeconds => f.write_str("a case of 0 seconds measures nothing"),
            Self::NotSeconds { text } => write!(f, "{text:?} is not a number of seconds"),
            Self::Seconds { text } => write!(f, "{text} seconds: give from 0 to 1000000"),
            Self::NotCapacity { text } => write!(f, "{text:?} is not a capacity: give GB/s from 0"),
            Self::UrlsOfP2p { list } => {
                write!(f, "--metadata_url_list {list:?} needs --metadata_type http, etcd or redis")
            }
            Self::NoUrls { kind } => write!(f, "--metadata_type {kind} needs --metadata_url_list"),
            Self::ManyUrls { list, urls, kind } => {
                write!(f, "--metadata_url_list {list:?} has {urls} addresses, {kind} takes one")
            }
        }
    }
}

impl std::error::Error for ValueError {}

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
) -> Result<ListenAddress, ValueError> {
    if open || address.ip().is_loopback() {
        return Ok(ListenAddress { listen: address, announce: None });
    }
    // An unspecified address cannot be announced to peers: an engine with such an address serves every host.
    if gives_memory || address.ip().is_unspecified() {
        return Err(ValueError::Open { flag: flag.to_owned(), address });
    }
    let loopback: IpAddr = if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    Ok(ListenAddress { listen: SocketAddr::new(loopback, address.port()), announce: Some(address.ip()) })
}

/// Type of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum MemoryType {
    /// Memory of the host.
    Dram,
    /// Memory of a GPU.
    Vram,
}

impl MemoryType {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Dram => "DRAM",
            Self::Vram => "VRAM",
        }
    }
}

/// GPUs of one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GpuChoice {
    /// All of them.
    All,
    /// The one of this number.
    Number(u16),
}

impl GpuChoice {
    /// Returns true if it means this device.
    pub(crate) const fn takes(self, id: DeviceId) -> bool {
        match self {
            Self::All => true,
            Self::Number(number) => id.ordinal == number,
        }
    }
}

impl fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("-1"),
            Self::Number(number) => number.fmt(f),
        }
    }
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
pub(crate) fn transport(text: &str) -> Result<Transport, ValueError> {
    Ok(match text {
        "" | "unspec" => Transport::Any,
        "tcp" => Transport::Tcp,
        "rdma" => Transport::Rdma,
        "shm" => Transport::Shm,
        "cma" => Transport::Cma,
        "iouring" | "io_uring" => Transport::Uring,
        "local" => Transport::Local,
        _ => {
            let name = text.to_owned();
            return Err(match missing_part(text) {
                Some(lacks) => ValueError::NoTransport { name, lacks },
                None => ValueError::UnknownTransport { name },
            });
        }
    })
}

/// Returns the part of a build that a transport of other engines needs and this build lacks.
fn missing_part(transport: &str) -> Option<&'static str> {
    Some(match transport {
        "barex" | "efa" | "hp_tcp" => "no driver of network cards that bypass the kernel, other than RDMA's",
        "mnnvl" | "nvlink" | "nvlink_intra" | "gds" | "musa" | "hip" | "mpcomm" => "no transport of GPU memory alone",
        "ascend" | "sunrise_link" | "ub" | "cxl" | "nvmeof" => "no driver of that device",
        _ => return None,
    })
}

/// Returns the configuration of RDMA in this mode, over the devices of the flag, or all if it names none. `matrix` is
/// the affinity of devices to memory, as JSON or the path of a JSON file; empty to derive it from the machine's
/// topology.
pub(crate) fn rdma(flag: &str, mode: RdmaUse, devices: &[String], matrix: &str) -> Result<RdmaConfig, ValueError> {
    let names = devices.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let devices: Vec<String> = names.collect();
    if mode == RdmaUse::Never && !devices.is_empty() {
        return Err(ValueError::Devices { flag: flag.to_owned(), devices: devices.join(",") });
    }
    if mode == RdmaUse::Never && !matrix.is_empty() {
        return Err(ValueError::Matrix);
    }
    let matrix = (!matrix.is_empty()).then(|| matrix.to_owned());
    Ok(RdmaConfig { devices, matrix, ..RdmaConfig::of(mode) })
}

/// Parses a type of memory.
pub(crate) fn memory(text: &str) -> Result<MemoryType, ValueError> {
    match text.to_ascii_uppercase().as_str() {
        "DRAM" => Ok(MemoryType::Dram),
        "VRAM" => Ok(MemoryType::Vram),
        _ => Err(ValueError::UnknownMemory { kind: text.to_owned() }),
    }
}

/// Parses types of memory, separated by commas; none for an empty text.
pub(crate) fn memories(text: &str) -> Result<Vec<MemoryType>, ValueError> {
    text.split(',').map(str::trim).filter(|kind| !kind.is_empty()).map(memory).collect()
}

/// Parses the number of a GPU; -1 means all.
pub(crate) fn gpu(text: &str) -> Result<GpuChoice, ValueError> {
    match text.parse::<i32>().map(|number| (number, u16::try_from(number))) {
        Ok((-1, _)) => Ok(GpuChoice::All),
        Ok((_, Ok(number))) => Ok(GpuChoice::Number(number)),
        _ => Err(ValueError::NotGpu { text: text.to_owned() }),
    }
}

/// Parses the number of a GPU for a tool that uses none: only the values that mean none in particular.
pub(crate) fn no_gpu(text: &str) -> Result<i32, ValueError> {
    match text.parse() {
        Ok(number @ (-1 | 0)) => Ok(number),
        Ok(number) => Err(ValueError::Gpu { number }),
        Err(_) => Err(ValueError::NotGpu { text: text.to_owned() }),
    }
}

/// Parses seconds above 0, also fractions.
pub(crate) fn seconds(text: &str) -> Result<f64, ValueError> {
    match seconds_or_none(text)? {
        0.0 => Err(ValueError::NoSeconds),
        seconds => Ok(seconds),
    }
}

/// Parses seconds from 0, also fractions.
pub(crate) fn seconds_or_none(text: &str) -> Result<f64, ValueError> {
    let seconds: f64 = text.parse().map_err(|_| ValueError::NotSeconds { text: text.to_owned() })?;
    match (0.0..=1e6).contains(&seconds) {
        true => Ok(seconds),
        false => Err(ValueError::Seconds { text: text.to_owned() }),
    }
}

/// Parses a capacity in GB/s; 0 means unknown.
pub(crate) fn capacity(text: &str) -> Result<f64, ValueError> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
        _ => Err(ValueError::NotCapacity { text: text.to_owned() }),
    }
}

/// Builds the connection string of a metadata store from its kind and the list of its addresses.
pub(crate) fn metadata(kind: &str, list: &str) -> Result<String, ValueError> {
    let urls: Vec<&str> = list.split(',').map(str::trim).filter(|url| !url.is_empty()).collect();
    if kind == "p2p" {
        return match urls.is_empty() {
            true => Ok("P2PHANDSHAKE".to_owned()),
            false => Err(ValueError::UrlsOfP2p { list: list.to_owned() }),
        };
    }
    let [first, rest @ ..] = urls.as_slice() else {
        return Err(ValueError::NoUrls { kind: kind.to_owned() });
    };
    if kind != "etcd" && !rest.is_empty() {
        return Err(ValueError::ManyUrls { list: list.to_owned(), urls: urls.len(), kind: kind.to_owned() });
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
        let error = reached("--seg_name", at("192.0.2.7:5"), true, false).unwrap_err().to_string();
        assert!(error.contains("--seg_name 192.0.2.7:5") && error.contains("--open_to_network"), "{error}");
        let plain = |listen| Ok(ListenAddress { listen, announce: None });
        assert_eq!(reached("--seg_name", at("192.0.2.7:5"), true, true), plain(at("192.0.2.7:5")));
        assert_eq!(reached("--seg_name", at("[::1]:5"), true, false), plain(at("[::1]:5")));
        let known = |listen, as_ip: &str| Ok(ListenAddress { listen, announce: as_ip.parse().ok() });
        assert_eq!(reached("--seg_name", at("192.0.2.7:5"), false, false), known(at("127.0.0.1:5"), "192.0.2.7"));
        assert_eq!(reached("--seg_name", at("[2001:db8::7]:0"), false, false), known(at("[::1]:0"), "2001:db8::7"));
        assert!(
            reached("--seg_name", at("0.0.0.0:0"), false, false)
                .is_err_and(|error| error.to_string().contains("0.0.0.0:0"))
        );
    }

    #[test]
    fn unavailable_values_are_refused_by_name() {
        for (text, words) in [("efa", "efa is not available"), ("gds", "GPU memory"), ("pigeon", "not a transport")] {
            let error = transport(text).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("tcp"), "{error}");
        }
        for name in ["tcp", "rdma", "shm", "cma", "iouring", "local", ""] {
            assert_eq!(transport(name).unwrap().name(), name);
        }
        assert_eq!(memories("dram, VRAM").unwrap(), [MemoryType::Dram, MemoryType::Vram]);
        assert!(memories("dram,nvram").unwrap_err().to_string().contains("use DRAM or VRAM"));
        assert_eq!((gpu("-1"), gpu("3")), (Ok(GpuChoice::All), Ok(GpuChoice::Number(3))));
        assert!(gpu("-2").is_err() && gpu("65536").is_err() && gpu("one").is_err());
        assert!(no_gpu("-1").is_ok() && no_gpu("0").is_ok() && no_gpu("1").unwrap_err().to_string().contains("GPU 1"));
        assert!(seconds("0").is_err() && seconds("nan").is_err() && seconds("0.02").is_ok());
        assert!(capacity("-1").is_err() && capacity("inf").is_err() && capacity("12.5").is_ok());
    }

    #[test]
    fn devices_are_named_for_rdma_only() {
        let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let config = rdma("--x", RdmaUse::Require, &list(" mlx5_1,, mlx5_0 "), "/m").unwrap();
        assert_eq!((config.mode, config.devices), (RdmaUse::Require, list("mlx5_1,mlx5_0")));
        assert!(rdma("--x", Transport::Any.rdma(), &list(""), "").unwrap().devices.is_empty());
        let error = rdma("--x", Transport::Tcp.rdma(), &list("mlx5_0"), "").unwrap_err().to_string();
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
        assert!(metadata("p2p", "http://x").unwrap_err().to_string().contains("--metadata_url_list"));
        assert!(metadata("redis", "").unwrap_err().to_string().contains("needs --metadata_url_list"));
        assert!(metadata("redis", "a:1,b:2").unwrap_err().to_string().contains("2 addresses"));
    }
}
