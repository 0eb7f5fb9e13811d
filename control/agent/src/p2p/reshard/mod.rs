//! Execution of resharding plans: reads from each rank exactly the ranges that overlap with the target rank.

mod error;
mod manifest;
mod named;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvplane_cluster::reshard::{Placement, Plan, ReshardError};
use kvplane_sys::interrupt;

use crate::error::Error;
use crate::p2p::catalog::Object;
use crate::p2p::ranges::{RangeReads, ReadBytes};

pub use error::{OffsetsError, ReshardingError};
pub use manifest::{ManifestError, placement_from_json};
pub use named::{NamedPart, ReshardNames, packed_bytes};
pub(super) use named::{part_sources, target_offsets};

/// Limit of ranks that are read from at a time.
const READERS: usize = 8;
/// Interval at which a watched thread checks whether the others are done.
const LOOK: Duration = Duration::from_millis(2);

/// Location of the bytes of one rank of the source.
#[derive(Clone, Debug)]
pub struct PartSource {
    /// Object that holds the bytes.
    pub object: Object,
    /// Index of the buffer.
    pub buffer: usize,
    /// Offset of each of the rank's fragments in the buffer.
    pub offsets: Vec<u64>,
}

/// Plan of one rank of the target: its fragments, and the ranges of the source that they come from.
#[derive(Debug)]
pub struct Resharding<'a> {
    source: &'a Placement,
    target: &'a Placement,
    part: usize,
    plan: Plan,
}

impl<'a> Resharding<'a> {
    /// Plans for the rank of that name in the target.
    ///
    /// # Errors
    /// When there is no such rank, the placements contradict each other, or a fragment is in no source.
    pub fn new(source: &'a Placement, target: &'a Placement, participant: &str) -> Result<Self, ReshardError> {
        let part = target.part(participant)?;
        Ok(Self { source, target, part, plan: Plan::new(source, target, part)? })
    }

    /// Returns the index of the rank in the target.
    #[must_use]
    pub const fn part(&self) -> usize {
        self.part
    }

    /// Returns the plan of the copies.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the placement of the source.
    pub(in crate::p2p) const fn source(&self) -> &'a Placement {
        self.source
    }

    /// Checks the locations of the parts of the source, and the offsets of the fragments in memory of so many bytes.
    ///
    /// # Errors
    /// When a location is missing or too small, or fragments overlap in memory.
    pub(in crate::p2p) fn check(
        &self,
        from: &BTreeMap<usize, PartSource>,
        to: &[u64],
        memory_bytes: u64,
    ) -> Result<(), ReshardingError> {
        for part in self.plan.sources() {
            let participant = || self.source.parts()[part].participant.clone();
            let source = from.get(&part).ok_or_else(|| ReshardingError::NoLocation { participant: participant() })?;
            let (object, buffer) = (&source.object, source.buffer);
            let buffer_bytes = object.layout.sizes().get(buffer).copied().unwrap_or(0);
            check_offsets(self.source, part, &source.offsets, buffer_bytes).map_err(|why| {
                ReshardingError::PartOffsets { object: object.name.clone(), buffer, participant: participant(), why }
            })?;
        }
        let spans = check_offsets(self.target, self.part, to, memory_bytes);
        let mut spans = spans.map_err(ReshardingError::MemoryOffsets)?;
        spans.sort_unstable();
        match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(ReshardingError::FragmentsOverlap { end: pair[0].1, next_offset: pair[1].0 }),
            None => Ok(()),
        }
    }

    /// Reads the fragments of the rank. The locations and offsets have been checked ([`Self::check`]).
    ///
    /// # Errors
    /// When no peer is left, the deadline has passed, or the process is interrupted.
    pub(in crate::p2p) fn read(
        &self,
        reads: &RangeReads<'_>,
        from: &BTreeMap<usize, PartSource>,
        to: &[u64],
    ) -> Result<ReadBytes, Error> {
        let parts = self.plan.sources();
        let next = AtomicUsize::new(0);
        let (total, checked) = (AtomicU64::new(0), AtomicU64::new(0));
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let fail = |error| {
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            reads.stop();
        };
        let work = || {
            while !reads.is_stopping() {
                let Some(&part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                let source = &from[&part];
                match reads.read(&source.object, source.buffer, || self.plan.copies(part, &source.offsets, to)) {
                    Ok(read) => {
                        total.fetch_add(read.bytes, Ordering::Relaxed);
                        checked.fetch_add(read.checked, Ordering::Relaxed);
                    }
                    Err(error) => fail(error),
                }
            }
        };
        std::thread::scope(|scope| {
            let start = |_| {
                let builder = std::thread::Builder::new().name("kvp-p2p-read".to_owned());
                // Without the thread, fewer ranks are read from at a time.
                builder.spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = (1..READERS.min(parts.len())).filter_map(start).collect();
            work();
            // Only this thread can be interrupted; it stops the others.
            while interrupt::is_watched() && others.iter().any(|other| !other.is_finished()) {
                if !interrupt::sleep(LOOK) {
                    fail(Error::interrupted());
                    break;
                }
            }
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(ReadBytes { bytes: total.into_inner(), checked: checked.into_inner() }),
        }
    }
}

/// Checks that each fragment fits into so many bytes; returns the begin and end of each.
fn check_offsets(
    placement: &Placement,
    part: usize,
    offsets: &[u64],
    memory_bytes: u64,
) -> Result<Vec<(u64, u64)>, OffsetsError> {
    let fragments = &placement.parts()[part].fragments;
    if offsets.len() != fragments.len() {
        return Err(OffsetsError::Count { offsets: offsets.len(), fragments: fragments.len() });
    }
    let span = |(fragment, &offset): (_, &u64)| {
        let bytes = placement.bytes(fragment);
        let end = offset.checked_add(bytes).filter(|&end| end <= memory_bytes);
        end.map(|end| (offset, end)).ok_or_else(|| {
            let tensor = placement.tensors()[fragment.tensor].name.clone();
            OffsetsError::Outside { tensor, bytes, offset, memory_bytes }
        })
    };
    fragments.iter().zip(offsets).map(span).collect()
}
