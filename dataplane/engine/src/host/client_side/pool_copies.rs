//! Copies over shared memory, made by this thread, between the caller's memory and a peer's pool.
//!
//! The checksum of a copy is computed piece by piece while its source is in the cache. The pieces are long enough to be
//! copied with non-temporal stores, past the cache.

use std::sync::Arc;

use kvplane_client::Local;
use kvplane_proto::Status;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_sys::{IoBuf, Region, STREAMING_BYTES};

use super::buffers::Buffers;

/// Copies a range of a peer's pool to the caller's memory. If a checksum is given, it is verified.
pub(crate) fn copy_out(
    pool: &Arc<Region>,
    offset: u64,
    buffers: &Buffers,
    local: Local,
    checksum: Option<u64>,
) -> Result<u64, Status> {
    let to = buffers.pieces(local);
    // On an error, the peer named bytes outside of its own pool.
    let from = range(pool, offset, local.bytes).ok_or(Status::OutOfRange)?;
    match checksum {
        Some(checksum) => {
            let found = copy_summed(to.as_slice(), &[from]);
            if found == checksum { Ok(found) } else { Err(Status::Corrupt) }
        }
        None => {
            pairs(to.as_slice(), &[from], copy);
            Ok(0)
        }
    }
}

/// Returns the checksum of the bytes of these ranges.
pub(crate) fn sum(ranges: &[IoBuf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    for range in ranges {
        range.region().read_with(range.offset(), range.bytes(), &mut |_, part| checksum.update(part));
    }
    checksum.finish()
}

/// Copies the caller's memory to a range of a peer's pool; returns its checksum.
pub(crate) fn copy_in(pool: &Arc<Region>, offset: u64, buffers: &Buffers, local: Local) -> Result<u64, Status> {
    let from = buffers.pieces(local);
    let to = range(pool, offset, local.bytes).ok_or(Status::OutOfRange)?;
    Ok(copy_summed(&[to], from.as_slice()))
}

/// Returns a range that a peer named, if it is inside the region.
pub(crate) fn range(region: &Arc<Region>, offset: u64, bytes: u64) -> Option<IoBuf> {
    let end = offset.checked_add(bytes)?;
    (end <= region.bytes() as u64).then(|| IoBuf::new(Arc::clone(region), offset as usize, bytes as usize))
}

/// Copies bytes between two ranges of the same length.
pub(crate) fn copy(to: &IoBuf, from: &IoBuf) {
    Region::copy_between(to.region(), to.offset(), from.region(), from.offset(), from.bytes());
}

/// Walks the pieces of both sides, which have the same total length, and calls `each` for every range that lies in one
/// piece of either.
fn pairs(to: &[IoBuf], from: &[IoBuf], mut each: impl FnMut(&IoBuf, &IoBuf)) {
    let (mut to, mut from) = (to.iter().cloned(), from.iter().cloned());
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some(one), Some(other)) = (&mut target, &mut source) {
        let bytes = one.bytes().min(other.bytes());
        if bytes > 0 {
            each(&one.slice(0, bytes), &other.slice(0, bytes));
            one.advance(bytes);
            other.advance(bytes);
        }
        if one.is_empty() {
            target = to.next();
        }
        if other.is_empty() {
            source = from.next();
        }
    }
}

/// Copies, and returns the checksum of the bytes. It is computed from the destination, so that it covers the bytes that
/// arrived, if the piece went through the cache; else from the source, which is in the cache.
fn copy_summed(to: &[IoBuf], from: &[IoBuf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    pairs(to, from, |to, from| {
        let mut at = 0;
        while at < from.bytes() {
            let bytes = STREAMING_BYTES.min(from.bytes() - at);
            Region::copy_between(to.region(), to.offset() + at, from.region(), from.offset() + at, bytes);
            let source = if bytes < STREAMING_BYTES { to } else { from };
            source.region().read_with(source.offset() + at, bytes, &mut |_, part| checksum.update(part));
            at += bytes;
        }
    });
    checksum.finish()
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn bytes_survive_a_round_trip_and_a_wrong_checksum_is_detected() {
        let region = |name: &str| Region::allocate(&RegionOptions::new(name, 4096)).expect("memory");
        let (pool, ours) = (region("pool"), region("ours"));
        ours.copy_in(0, b"some bytes");
        let mut buffers = Buffers::default();
        buffers.set(0, Arc::clone(&ours).into());
        let local = |offset| Local { buffer: 0, offset, bytes: 10 };
        let checksum = copy_in(&pool, 100, &buffers, local(0)).expect("inside");
        assert_eq!(copy_out(&pool, 100, &buffers, local(50), Some(checksum)), Ok(checksum));
        let mut bytes = [0; 10];
        ours.copy_out(50, &mut bytes);
        assert_eq!(&bytes, b"some bytes");
        assert_eq!(copy_out(&pool, 100, &buffers, local(50), Some(checksum ^ 1)), Err(Status::Corrupt));
        assert_eq!(copy_out(&pool, 100, &buffers, local(50), None), Ok(0));
        assert_eq!(copy_in(&pool, pool.bytes() as u64 - 9, &buffers, local(0)), Err(Status::OutOfRange));
    }
}
