//! Memory that I/O uses, named by offsets: the caller's pool and the tier's own staging area.
//!
//! Both are registered memory of the host. The tier never holds a reference into them; it asks through [`Memory`].

use kvplane_proto::checksum::PayloadChecksum;

/// Which memory an offset counts in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Space {
    /// The area that the host set aside for the tier: [`crate::TierConfig::staging_bytes`], aligned to 4096.
    #[default]
    Staging,
    /// The pool of the shard, where payloads lie.
    Pool,
}

/// A piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// Which memory.
    pub space: Space,
    /// Bytes.
    pub bytes: u32,
    /// From the start of the space.
    pub offset: u64,
}

impl Span {
    /// A piece of the pool.
    #[must_use]
    pub const fn pool(offset: u64, bytes: u32) -> Self {
        Self { space: Space::Pool, bytes, offset }
    }

    /// A piece of the staging area.
    #[must_use]
    pub const fn staging(offset: u64, bytes: u32) -> Self {
        Self { space: Space::Staging, bytes, offset }
    }

    /// `bytes` of it, from `at` on. The caller stays inside.
    #[must_use]
    pub(crate) const fn part(self, at: u32, bytes: u32) -> Self {
        Self { space: self.space, bytes, offset: self.offset + at as u64 }
    }
}

/// What the tier does to memory by itself. Calls come from inside the tier's methods, on their thread.
pub trait Memory {
    /// Copies out: `from` has `into.len()` bytes.
    fn read(&self, from: Span, into: &mut [u8]);
    /// Copies in: `to` has `from.len()` bytes.
    fn write(&mut self, from: &[u8], to: Span);
    /// Copies between two pieces of one length that do not overlap.
    fn copy(&mut self, from: Span, to: Span);
    /// Takes a piece into a checksum.
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

/// The checksum of a piece.
pub(crate) fn sum(memory: &dyn Memory, span: Span) -> u64 {
    let mut sum = PayloadChecksum::new();
    memory.checksum(span, &mut sum);
    sum.finish()
}
