//! Device pools of a node: configured on the command line, and divided among the shards.

use std::fmt;
use std::str::FromStr;

use kvplane_engine::{DevicePoolConfig, Eviction};
use kvplane_sys::device::DeviceId;
use kvplane_transfer::{ParseBytesError, parse_bytes};

use crate::node::{NodeConfig, NodeConfigError};

/// Least bytes of a device pool for each shard that uses it, which are also the unit of its parts.
const PART_LEAST_BYTES: u64 = 1 << 20;

/// Memory of an accelerator that serves as device pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevicePool {
    /// Device.
    pub device: DeviceId,
    /// Bytes to allocate on it, over all shards.
    pub bytes: u64,
}

/// Error of a text that names no device pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ParseDevicePoolError {
    /// The part after the equals sign is no size.
    Size(ParseBytesError),
    /// There is no device before an equals sign, or the size is 0.
    NoPool { text: String },
}

impl fmt::Display for ParseDevicePoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(error) => error.fmt(f),
            Self::NoPool { text } => write!(f, "{text:?} names no device pool: give DEVICE=SIZE, such as cuda:0=8G"),
        }
    }
}

impl std::error::Error for ParseDevicePoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Size(error) => Some(error),
            Self::NoPool { .. } => None,
        }
    }
}

impl FromStr for DevicePool {
    type Err = ParseDevicePoolError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = text.split_once('=').and_then(|(device, size)| Some((DeviceId::parse(device)?, size)));
        let (device, size) = named.ok_or_else(|| ParseDevicePoolError::NoPool { text: text.to_owned() })?;
        let bytes = parse_bytes(size).map_err(ParseDevicePoolError::Size)?;
        if bytes == 0 {
            return Err(ParseDevicePoolError::NoPool { text: text.to_owned() });
        }
        Ok(Self { device, bytes })
    }
}

/// Returns the device pool of each of `shards` shards: they take the devices in turn, and each device is divided into
/// equal parts.
pub(crate) fn of_shards(config: &NodeConfig, shards: usize) -> Result<Vec<Option<DevicePoolConfig>>, NodeConfigError> {
    let pools = &config.device_pools;
    if pools.is_empty() {
        return Ok(vec![None; shards]);
    }
    if !config.ssds.is_empty() {
        return Err(NodeConfigError::DevicePoolsBesideSsds);
    }
    if config.eviction == Eviction::Lru {
        return Err(NodeConfigError::DevicePoolsByLru);
    }
    if pools.len() > shards {
        return Err(NodeConfigError::DevicePools { device_pools: pools.len(), shards });
    }
    for (at, pool) in pools.iter().enumerate() {
        let DevicePool { device, bytes } = *pool;
        if pools[..at].iter().any(|other| other.device == device) {
            return Err(NodeConfigError::DeviceTwice { device });
        }
        let least_bytes = PART_LEAST_BYTES * parts(at, pools.len(), shards);
        if bytes < least_bytes {
            return Err(NodeConfigError::DevicePool { device, bytes, least_bytes });
        }
    }
    let of = |shard: usize| {
        let DevicePool { device, bytes } = pools[shard % pools.len()];
        let part = bytes / parts(shard % pools.len(), pools.len(), shards);
        Some(DevicePoolConfig { device, bytes: part / PART_LEAST_BYTES * PART_LEAST_BYTES })
    };
    Ok((0..shards).map(of).collect())
}

/// Returns the number of shards that share a device.
const fn parts(which: usize, count: usize, shards: usize) -> u64 {
    (shards - which).div_ceil(count) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::SsdConfig;

    fn pool(text: &str) -> DevicePool {
        text.parse().expect("a device pool")
    }

    #[test]
    fn device_pools_are_a_device_and_a_size() {
        let DevicePool { device, bytes } = pool("cuda:1=8G");
        assert_eq!((device.to_string().as_str(), bytes), ("cuda:1", 8 << 30));
        for wrong in ["", "cuda:0", "cuda:0=", "cuda:0=0", "cuda=1G", "0=1G", "gpu:0=1G", "cuda:0=1x"] {
            assert!(wrong.parse::<DevicePool>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn shards_take_devices_in_turn_and_divide_them() {
        let config = |pools: &[&str]| NodeConfig {
            device_pools: pools.iter().map(|text| pool(text)).collect(),
            ..NodeConfig::local("test", 1 << 30)
        };
        let of = |config: &NodeConfig, shards| {
            let all = of_shards(config, shards).expect("a layout").into_iter().flatten();
            all.map(|one| (one.device.ordinal, one.bytes >> 20)).collect::<Vec<_>>()
        };
        assert_eq!(of(&config(&[]), 2), []);
        assert_eq!(of(&config(&["cuda:0=9M", "cuda:3=4M"]), 3), [(0, 4), (3, 4), (0, 4)]);
        let refusal = |config: &NodeConfig| of_shards(config, 2).expect_err("refused").to_string();
        assert!(refusal(&config(&["cuda:0=9M", "cuda:1=9M", "cuda:2=9M"])).contains("3 device pools for 2 shards"));
        assert!(refusal(&config(&["cuda:0=9M", "cuda:0=9M"])).contains("cuda:0 is named twice"));
        assert!(refusal(&config(&["cuda:0=1M"])).contains("2097152 are needed"));
        let lru = NodeConfig { eviction: Eviction::Lru, ..config(&["cuda:0=9M"]) };
        assert!(refusal(&lru).contains("use slru or s3fifo"));
        let ssds = vec!["/no/such:1G".parse::<SsdConfig>().expect("an SSD")];
        assert!(refusal(&NodeConfig { ssds, ..config(&["cuda:0=9M"]) }).contains("exclude each other"));
    }
}
