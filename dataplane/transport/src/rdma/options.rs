//! Settings of the RDMA driver.

/// Settings of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Connections of one device.
    pub endpoints: u32,
    /// Receives of one device, which its connections share.
    pub receives: u32,
    /// Receives that one connection is granted.
    pub grant: u16,
    /// Length of a receive, and of the longest message.
    pub message_bytes: u32,
    /// Messages of one device that may be on their way.
    pub send_slots: u32,
    /// Requests of one connection that may be under way.
    pub send_depth: u32,
    /// Regions of memory that are registered with one device, beside published segments. The bytes of others are
    /// copied through buffers.
    pub regions: u32,
    /// An idle connection's peer is asked for a sign of life after so long, and again after as long.
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
    /// These, with settings below what works raised to it: so much at least must a grant and a message be.
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
