//! Settings of the RDMA driver.

/// Options of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Limit of connections of one device.
    pub endpoints: u32,
    /// Number of receives of one device, which its connections share.
    pub receives: u32,
    /// Number of receives that one connection is granted.
    pub grant: u16,
    /// Size of a receive, and of the longest message, in bytes.
    pub message_bytes: u32,
    /// Limit of messages in flight of one device.
    pub send_slots: u32,
    /// Limit of requests in flight of one connection.
    pub send_depth: u32,
    /// Limit of regions registered with one device, besides published segments. The bytes of further regions are copied
    /// through bounce buffers.
    pub regions: u32,
    /// Idle time of a connection after which a keepalive probe is sent, and its period after that, in nanoseconds.
    pub keepalive_ns: u64,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            endpoints: 64,
            receives: 1024,
            grant: 16,
            message_bytes: 8192,
            send_slots: 128,
            send_depth: 128,
            regions: 65_536,
            keepalive_ns: 10_000_000_000,
        }
    }
}

impl RdmaOptions {
    /// Raises the options to their working minimum; `grant` and `message_bytes` are the minimum of those two.
    pub(super) fn raised(self, grant: u16, message_bytes: u32) -> Self {
        Self {
            grant: self.grant.max(grant),
            message_bytes: self.message_bytes.max(message_bytes),
            send_slots: self.send_slots.max(1),
            send_depth: self.send_depth.max(64),
            ..self
        }
    }
}
