//! Requests to the transfer engine: transfers by address, single or as sets of ranges, and the options of a batch.

use std::collections::HashSet;
use std::time::Duration;

use kvplane_client::Intent;
use kvplane_client::sched::Priority;
use kvplane_mooncake::Notice;
use kvplane_sys::device::StreamHandle;

use crate::error::{ArgumentError, Error};
use crate::segment::SegmentHandle;

/// Direction of a transfer. The numbers are those of Mooncake's interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Opcode {
    /// From the segment into local memory.
    Read = 0,
    /// From local memory into the segment.
    Write = 1,
}

/// Transfer between registered local memory and registered memory of a segment's owner.
///
/// Each range must lie within one registered buffer. A length of 0 is allowed and completes at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferRequest {
    /// Direction.
    pub opcode: Opcode,
    /// Address in local memory.
    pub source: u64,
    /// Segment.
    pub target: SegmentHandle,
    /// Address in the process of the segment's owner.
    pub target_offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Range of a [`ScatterRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Address in local memory.
    pub source: u64,
    /// Address in the process of the segment's owner.
    pub target_offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Ranges of a [`ScatterRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ranges<'a> {
    /// Explicit list.
    List(&'a [Range]),
    /// Equal ranges at equal distances.
    Strided {
        /// First range.
        first: Range,
        /// Distance of the starts of consecutive ranges in local memory, in bytes.
        source_stride: u64,
        /// Distance of the starts of consecutive ranges in the segment, in bytes.
        target_stride: u64,
        /// Number of ranges.
        count: u64,
    },
}

/// Set of ranges between local memory and one segment, with a single result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScatterRequest<'a> {
    /// Direction.
    pub opcode: Opcode,
    /// Segment.
    pub target: SegmentHandle,
    /// Ranges.
    pub ranges: Ranges<'a>,
}

impl ScatterRequest<'_> {
    /// Returns the number of ranges.
    pub(crate) const fn count(&self) -> u64 {
        match self.ranges {
            Ranges::List(list) => list.len() as u64,
            Ranges::Strided { count, .. } => count,
        }
    }

    /// Appends the ranges as transfers; returns false when an address exceeds 2^64.
    pub(crate) fn expand(&self, out: &mut Vec<TransferRequest>) -> bool {
        let (opcode, target) = (self.opcode, self.target);
        let transfer = |range: Range| TransferRequest {
            opcode,
            source: range.source,
            target,
            target_offset: range.target_offset,
            length: range.length,
        };
        match self.ranges {
            Ranges::List(list) => out.extend(list.iter().copied().map(transfer)),
            Ranges::Strided { first, source_stride, target_stride, count } => {
                for index in 0..count {
                    let source = source_stride.checked_mul(index).and_then(|at| first.source.checked_add(at));
                    let target = target_stride.checked_mul(index).and_then(|at| first.target_offset.checked_add(at));
                    let (Some(source), Some(target_offset)) = (source, target) else { return false };
                    out.push(transfer(Range { source, target_offset, length: first.length }));
                }
            }
        }
        true
    }
}

/// Options of a batch.
#[derive(Clone, Debug)]
pub struct SubmitOptions {
    /// Deadline; `None` takes the engine's default.
    pub deadline: Option<Duration>,
    /// Time by which the batch should be complete, from the submission. Batches with a due time precede others of their
    /// class and tenant, the earliest first. Nothing is cancelled when it passes.
    pub due: Option<Duration>,
    /// Priority class; `None` takes that of the intent.
    pub priority: Option<Priority>,
    /// Intent: what the batch is for.
    pub intent: Intent,
    /// Tenant: tenants share a class by weight.
    pub tenant: u32,
    /// Weight of the tenant relative to others; at least 1.
    pub weight: u16,
    /// Let the engine's progress thread drive the batch from the start. Otherwise the thread that waits for the batch
    /// drives it, and the progress thread only after about a millisecond without one. A call of
    /// [`super::Batch::completion_fd`] or awaiting [`super::Batch::completed`] has the same effect.
    pub background: bool,
    /// Stream of the caller, for memory of devices: what was enqueued on it before the submission is done before bytes
    /// leave or arrive. `None` takes the stream of callers that name none, which waits for all others that block.
    pub stream: Option<StreamHandle>,
    /// Notice to owners of segments after success: sent by a thread of the engine soon after the batch is complete. Not
    /// sent when any request failed.
    pub notice: Option<Notice>,
    /// Segments whose owners get the notice.
    pub notice_to: NoticeTargets,
}

/// Segments of a batch whose owners get its notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoticeTargets {
    /// The first request's.
    #[default]
    First,
    /// Those of all requests, each segment once.
    All,
}

impl NoticeTargets {
    /// Returns the segments of these requests, in the order in which they first occur.
    pub(crate) fn of(self, requests: &[TransferRequest]) -> Vec<SegmentHandle> {
        let counted = match self {
            Self::First => requests.get(..1).unwrap_or_default(),
            Self::All => requests,
        };
        let (mut targets, mut seen) = (Vec::new(), HashSet::new());
        targets.extend(counted.iter().map(|request| request.target).filter(|target| seen.insert(*target)));
        targets
    }
}

impl Default for SubmitOptions {
    fn default() -> Self {
        Self {
            deadline: None,
            due: None,
            priority: None,
            intent: Intent::Unspecified,
            tenant: 0,
            weight: 1,
            background: false,
            stream: None,
            notice: None,
            notice_to: NoticeTargets::First,
        }
    }
}

impl SubmitOptions {
    /// Returns the options for the initiator.
    pub(crate) fn of_client(&self, start_ns: u64, deadline_ns: u64) -> kvplane_client::SubmitOptions {
        let due_ns = self.due.map(|due| start_ns.saturating_add(u64::try_from(due.as_nanos()).unwrap_or(u64::MAX)));
        kvplane_client::SubmitOptions {
            due_ns,
            priority: self.priority,
            intent: self.intent,
            tenant: self.tenant,
            weight: self.weight.max(1),
            ..kvplane_client::SubmitOptions::until(deadline_ns)
        }
    }
}

/// Rejects reads into overlapping memory: the outcome would depend on the network.
pub(crate) fn check_overlap(requests: &[TransferRequest]) -> Result<(), Error> {
    let reads = || requests.iter().enumerate().filter(|(_, one)| one.opcode == Opcode::Read && one.length > 0);
    let mut end = 0;
    // Most batches are sorted by address.
    let ascending = reads().all(|(_, one)| {
        let after = one.source >= end;
        end = one.source + one.length;
        after
    });
    if ascending {
        return Ok(());
    }
    let mut sorted: Vec<(u64, u64, usize)> = reads().map(|(index, one)| (one.source, one.length, index)).collect();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        let ((start, length, first), (next, _, second)) = (pair[0], pair[1]);
        if start + length > next {
            let (first, second) = (first.min(second), first.max(second));
            return Err(ArgumentError::Overlap { first, second }.into());
        }
    }
    Ok(())
}
