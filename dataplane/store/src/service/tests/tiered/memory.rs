//! Memory of a host, by spaces.

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_tier::{Memory, Space, Span};

use crate::service::PoolBytes;

/// The pool, and the tier's staging memory.
pub(super) struct HostMemory {
    pub(super) pool: Vec<u8>,
    pub(super) staging: Vec<u8>,
}

impl HostMemory {
    pub(super) fn of(&self, span: Span) -> &[u8] {
        let memory = if span.space == Space::Pool { &self.pool } else { &self.staging };
        &memory[span.offset as usize..][..span.bytes as usize]
    }

    pub(super) fn of_mut(&mut self, span: Span) -> &mut [u8] {
        let memory = if span.space == Space::Pool { &mut self.pool } else { &mut self.staging };
        &mut memory[span.offset as usize..][..span.bytes as usize]
    }
}

impl Memory for HostMemory {
    fn read(&self, from: Span, into: &mut [u8]) {
        into.copy_from_slice(self.of(from));
    }

    fn write(&mut self, from: &[u8], to: Span) {
        self.of_mut(to).copy_from_slice(from);
    }

    fn copy(&mut self, from: Span, to: Span) {
        let bytes = self.of(from).to_vec();
        self.of_mut(to).copy_from_slice(&bytes);
    }

    fn checksum(&self, span: Span, sum: &mut PayloadChecksum) {
        sum.update(self.of(span));
    }
}

/// Pool from which names are read.
pub(super) struct Pool<'a>(pub(super) &'a [u8]);

impl PoolBytes for Pool<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
    }

    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}
