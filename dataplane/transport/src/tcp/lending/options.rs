//! Options and counters of zero-copy sends.

/// Policy of zero-copy sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ZeroCopy {
    /// Never.
    Never,
    /// To other machines, as long as the kernel does not report that it copies after all.
    #[default]
    Auto,
    /// Always, even if the kernel copies: for tests.
    Always,
}

/// Options of zero-copy sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroCopyOptions {
    /// Policy.
    pub when: ZeroCopy,
    /// Least length of a piece of a payload that is sent without a copy, in bytes.
    pub least_bytes: usize,
}

impl ZeroCopyOptions {
    /// Default of `least_bytes`: below it, the call for the header, the pinning and the notification cost as much as
    /// the copy; measured in docs/performance.md.
    pub const LEAST_BYTES: usize = 128 << 10;
}

impl Default for ZeroCopyOptions {
    fn default() -> Self {
        Self { when: ZeroCopy::default(), least_bytes: Self::LEAST_BYTES }
    }
}

/// Counters of zero-copy sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ZeroCopyCounters {
    /// Bytes that the kernel accepted without a copy.
    pub bytes: u64,
    /// Zero-copy calls.
    pub calls: u64,
    /// Calls whose notification has arrived.
    pub noticed: u64,
    /// Notified calls for which the kernel copied after all.
    pub copied: u64,
    /// Calls that the kernel refused, and that were repeated with a copy.
    pub fallbacks: u64,
    /// Payloads returned because of the peer's acknowledgement and reply, before a late notification.
    pub late: u64,
    /// Payloads returned without any notification, seconds after a reset.
    pub abandoned: u64,
}

impl ZeroCopyCounters {
    /// Adds the counters of another driver.
    pub const fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.calls += other.calls;
        self.noticed += other.noticed;
        self.copied += other.copied;
        self.fallbacks += other.fallbacks;
        self.late += other.late;
        self.abandoned += other.abandoned;
    }
}
