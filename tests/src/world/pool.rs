//! Memory of a pool: that of one incarnation of a shard, or kept memory, which the next one uses again. Peers on the
//! host map it, and may still copy when the incarnation has ended.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvplane_proto::checksum::payload_checksum;
use kvplane_store::PoolSums;
use kvplane_store::service::PoolBytes;

/// Bytes of a pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolMemory(Arc<RwLock<Vec<u8>>>);

impl PoolMemory {
    pub(crate) fn new(bytes: u64) -> Self {
        Self(Arc::new(RwLock::new(vec![0; bytes as usize])))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of a range.
    pub(crate) fn bytes(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.read()[offset as usize..(offset + bytes) as usize].to_vec()
    }

    pub(crate) fn copy_in(&self, offset: u64, bytes: &[u8]) {
        self.write()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

impl PoolBytes for PoolMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let at = offset as usize;
        into.copy_from_slice(&Self::read(self)[at..at + into.len()]);
    }

    fn bytes(&self) -> u64 {
        Self::read(self).len() as u64
    }
}

impl PoolSums for PoolMemory {
    fn checksum(&self, offset: u64, bytes: u64) -> u64 {
        payload_checksum(&Self::read(self)[offset as usize..][..bytes as usize])
    }
}
