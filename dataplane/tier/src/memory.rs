//! Memory that I/O uses, named by offsets: the caller's pool and the tier's staging area.
//!
//! Both are registered memory of the host. The tier never holds a reference into them; it accesses them through
//! [`Memory`].

use kvplane_proto::checksum::PayloadChecksum;

/// Address space of an offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Space {
    /// Area that the host provides for the tier: [`crate::TierConfig::staging_bytes`], aligned to 4096.
    #[default]
    Staging,
    /// Pool of the shard, which holds payloads.
    Pool,
}

/// Range of memory.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    pub space: Space,
    pub bytes: u32,
    /// Offset from the start of the space.
    pub offset: u64,
}

impl Span {
    /// Returns a range of the pool.
    #[must_use]
    pub const fn pool(offset: u64, bytes: u32) -> Self {
        Self { space: Space::Pool, bytes, offset }
    }

    /// Returns a range of the staging area.
    #[must_use]
    pub const fn staging(offset: u64, bytes: u32) -> Self {
        Self { space: Space::Staging, bytes, offset }
    }

    /// Returns the part of `bytes` from `at` on. The caller stays inside the range.
    #[must_use]
    pub(crate) const fn part(self, at: u32, bytes: u32) -> Self {
        Self { space: self.space, bytes, offset: self.offset + at as u64 }
    }
}

/// Memory accesses of the tier itself. Calls come from inside the tier's methods, on their thread.
pub trait Memory {
    /// Copies out: `from` has `into.len()` bytes.
    fn read(&self, from: Span, into: &mut [u8]);
    /// Copies in: `to` has `from.len()` bytes.
    fn write(&mut self, from: &[u8], to: Span);
    /// Copies between two ranges of one length that do not overlap.
    fn copy(&mut self, from: Span, to: Span);
    /// Adds a range to a checksum.
    fn checksum(&self, span: Span, sum: &mut PayloadChecksum);
}

/// Writes `bytes` zeros at `offset` of the staging area.
pub(crate) fn zero(memory: &mut dyn Memory, offset: u64, bytes: u32) {
    const ZEROS: [u8; 512] = [0; 512];
    let mut done = 0;
    while done < bytes {
        let now = (bytes - done).min(512);
        memory.write(&ZEROS[..now as usize], Span::staging(offset + u64::from(done), now));
        done += now;
    }
}

/// Returns the checksum of a range.
pub(crate) fn sum(memory: &dyn Memory, span: Span) -> u64 {
    let mut sum = PayloadChecksum::new();
    memory.checksum(span, &mut sum);
    sum.finish()
}
