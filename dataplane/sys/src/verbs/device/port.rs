//! Port attributes: state, speed and MTU.

use crate::verbs::ffi::*;

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// Link, but not yet configured.
    Initializing,
    /// Configured, but not yet active.
    Armed,
    /// Carries traffic.
    Active,
    /// A state unknown to this code.
    Other(u32),
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: peers are addressed by LID, and by GID across subnets.
    InfiniBand,
    /// RoCE: peers are addressed by GID.
    Ethernet,
    /// Another link layer.
    Other,
}

/// MTU: the largest payload of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    const ALL: [Self; 5] = [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self.raw()
    }

    /// Returns the largest MTU that is not above a size in bytes; at least 256 bytes.
    #[must_use]
    pub fn from_bytes(bytes: u32) -> Self {
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() <= bytes).unwrap_or(Self::Bytes256)
    }

    /// Returns the MTU code of verbs, 1 to 5, which is also used in handshakes.
    #[must_use]
    pub const fn raw(self) -> u32 {
        match self {
            Self::Bytes256 => 1,
            Self::Bytes512 => 2,
            Self::Bytes1024 => 3,
            Self::Bytes2048 => 4,
            Self::Bytes4096 => 5,
        }
    }

    /// Decodes an MTU code.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.raw() == raw)
    }
}

/// Current attributes of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Number of the port, from 1.
    pub port: u8,
    /// State of the port.
    pub state: PortState,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// MTU in use.
    pub active_mtu: Mtu,
    /// Bandwidth in bits per second, over all lanes; 0 if the speed or the width is unknown to this code.
    pub bits_per_second: u64,
    /// LID inside an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
    /// Size of its GID table.
    pub gids: u32,
    /// Longest message, in bytes.
    pub message_bytes: u32,
}

impl PortAttributes {
    pub(crate) fn from_raw(port: u8, raw: &ibv_port_attr) -> Self {
        let speed = match raw.active_speed_ex {
            0 => u32::from(raw.active_speed),
            speed => speed,
        };
        Self {
            port,
            state: match raw.state {
                1 => PortState::Down,
                2 => PortState::Initializing,
                3 => PortState::Armed,
                4 => PortState::Active,
                other => PortState::Other(other),
            },
            link_layer: match raw.link_layer {
                LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Other,
            },
            active_mtu: Mtu::from_raw(raw.active_mtu).unwrap_or(Mtu::Bytes256),
            bits_per_second: lane_bits_per_second(speed) * lanes(raw.active_width),
            lid: raw.lid,
            gids: u32::try_from(raw.gid_tbl_len).unwrap_or(0),
            message_bytes: raw.max_msg_sz,
        }
    }

    /// Returns true if the port is active.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }
}

/// Returns the data rate of one lane in bits per second, by the speed's code; the names of the specification are in
/// comments.
fn lane_bits_per_second(code: u32) -> u64 {
    match code {
        1 => 2_500_000_000,      // SDR
        2 => 5_000_000_000,      // DDR
        4 | 8 => 10_000_000_000, // QDR, FDR10
        16 => 14_000_000_000,    // FDR
        32 => 25_000_000_000,    // EDR
        64 => 50_000_000_000,    // HDR
        128 => 100_000_000_000,  // NDR
        256 => 200_000_000_000,  // XDR
        _ => 0,
    }
}

fn lanes(code: u8) -> u64 {
    match code {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(speed: u8, extended: u32, width: u8) -> PortAttributes {
        // SAFETY: plain numbers, for which zeros are values.
        let mut raw: ibv_port_attr = unsafe { std::mem::zeroed() };
        (raw.state, raw.active_mtu, raw.active_speed, raw.active_speed_ex, raw.active_width) =
            (4, 5, speed, extended, width);
        PortAttributes::from_raw(1, &raw)
    }

    #[test]
    fn speeds_are_lanes_times_the_speed_of_each() {
        assert_eq!(port(1, 0, 1).bits_per_second, 2_500_000_000, "what soft-RoCE says");
        assert_eq!(port(32, 0, 2).bits_per_second, 100_000_000_000, "EDR x4");
        assert_eq!(port(64, 0, 2).bits_per_second, 200_000_000_000, "HDR x4");
        assert_eq!(port(128, 0, 2).bits_per_second, 400_000_000_000, "NDR x4");
        assert_eq!(port(128, 256, 2).bits_per_second, 800_000_000_000, "XDR x4, with the old field clamped");
        assert_eq!(port(77, 0, 2).bits_per_second, 0, "unknown is not guessed");
    }

    #[test]
    fn packet_sizes_by_number_and_by_bytes() {
        for mtu in Mtu::ALL {
            assert_eq!((Mtu::from_raw(mtu.raw()), Mtu::from_bytes(mtu.bytes())), (Some(mtu), mtu));
        }
        assert_eq!(Mtu::from_bytes(1500), Mtu::Bytes1024);
        assert_eq!(Mtu::from_bytes(0), Mtu::Bytes256);
        assert_eq!(Mtu::from_raw(6), None);
    }
}
