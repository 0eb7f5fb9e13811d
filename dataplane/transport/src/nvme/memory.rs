//! Memory of a tier: the shard's pool and the tier's staging area, both as regions.

use std::sync::Arc;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_sys::{IoBuf, Region};
use kvplane_tier::{Memory, Space, Span};

/// Pool and staging area.
#[derive(Clone, Debug)]
pub struct TierMemory {
    pool: Arc<Region>,
    staging: Arc<Region>,
}

impl TierMemory {
    /// Creates it from these two regions.
    #[must_use]
    pub const fn new(pool: Arc<Region>, staging: Arc<Region>) -> Self {
        Self { pool, staging }
    }

    /// Returns both regions.
    #[must_use]
    pub const fn regions(&self) -> [&Arc<Region>; 2] {
        [&self.pool, &self.staging]
    }

    const fn region(&self, span: Span) -> &Arc<Region> {
        match span.space {
            Space::Pool => &self.pool,
            Space::Staging => &self.staging,
        }
    }

    /// Returns the buffer of a span, for the kernel.
    pub(super) fn buffer(&self, span: Span) -> IoBuf {
        IoBuf::new(Arc::clone(self.region(span)), span.offset as usize, span.bytes as usize)
    }
}

impl Memory for TierMemory {
    fn read(&self, from: Span, into: &mut [u8]) {
        assert_eq!(from.bytes as usize, into.len(), "a piece and its copy");
        self.region(from).copy_out(from.offset as usize, into);
    }

    fn write(&mut self, from: &[u8], to: Span) {
        assert_eq!(to.bytes as usize, from.len(), "a piece and its copy");
        self.region(to).copy_in(to.offset as usize, from);
    }

    fn copy(&mut self, from: Span, to: Span) {
        assert_eq!(from.bytes, to.bytes, "a piece and its copy");
        let (source, target) = (self.region(from), self.region(to));
        Region::copy_between(target, to.offset as usize, source, from.offset as usize, from.bytes as usize);
    }

    fn checksum(&self, span: Span, sum: &mut PayloadChecksum) {
        self.region(span).read_with(span.offset as usize, span.bytes as usize, &mut |_, bytes| sum.update(bytes));
    }
}
