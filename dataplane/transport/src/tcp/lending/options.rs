//! When payloads are sent without a copy, and what is counted of that.

/// When payloads are sent without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ZeroCopy {
    /// Never.
    Never,
    /// To other hosts, as long as the kernel does not say that it copies after all.
    #[default]
    Auto,
    /// Always, also where the kernel copies: for tests.
    Always,
}

/// Settings of sends without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroCopyOptions {
    /// When to do it.
    pub when: ZeroCopy,
    /// Pieces of payloads from this length on are sent so.
    pub least_bytes: usize,
}

impl ZeroCopyOptions {
    /// Below it, the call for the header, the pinning and the notice cost what the copy would: measured in
    /// docs/performance.md.
    pub const LEAST_BYTES: usize = 128 << 10;
}

impl Default for ZeroCopyOptions {
    fn default() -> Self {
        Self { when: ZeroCopy::default(), least_bytes: Self::LEAST_BYTES }
    }
}

/// What was counted of sends without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ZeroCopyCounters {
    /// Bytes that the kernel took that way.
    pub bytes: u64,
    /// Calls.
    pub calls: u64,
    /// Calls of which notice was given.
    pub noticed: u64,
    /// Those of them where the kernel had copied after all.
    pub copied: u64,
    /// Calls that the kernel refused, and that were made again with a copy.
    pub fallbacks: u64,
    /// Payloads that were given back for the peer's acknowledgement and answer, the notice being late.
    pub late: u64,
    /// Payloads that were given back without any notice, some seconds after a reset.
    pub abandoned: u64,
}

impl ZeroCopyCounters {
    /// Adds what another driver counted.
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
