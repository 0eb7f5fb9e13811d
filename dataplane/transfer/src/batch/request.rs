//! What is asked of the transfer engine: transfers by address, alone or as sets of ranges, and how to treat them.

use std::time::Duration;

use kvplane_client::Intent;
use kvplane_client::sched::Priority;
use kvplane_mooncake::Notice;

use crate::error::Error;
use crate::segment::SegmentHandle;

/// Which way bytes go. The numbers are those of Mooncake's interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Opcode {
    /// From the segment into our memory.
    Read = 0,
    /// From our memory into the segment.
    Write = 1,
}

/// One transfer, between registered memory of ours and registered memory of a segment's owner.
///
/// Each range must lie within one registered buffer. A length of 0 is allowed and done at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferRequest {
    /// Which way.
    pub opcode: Opcode,
    /// Address in our memory.
    pub source: u64,
    /// Whose memory.
    pub target: SegmentHandle,
    /// Address in their process.
    pub target_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// One range of a [`ScatterRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Address in our memory.
    pub source: u64,
    /// Address in their process.
    pub target_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// The ranges of a [`ScatterRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ranges<'a> {
    /// One by one.
    List(&'a [Range]),
    /// Equal ranges at equal distances.
    Strided {
        /// The first one.
        first: Range,
        /// From the start of one to the start of the next in our memory, in bytes.
        source_stride: u64,
        /// The same in theirs.
        target_stride: u64,
        /// How many.
        count: u64,
    },
}

/// Many ranges between us and one segment, with one result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScatterRequest<'a> {
    /// Which way.
    pub opcode: Opcode,
    /// Whose memory.
    pub target: SegmentHandle,
    /// Which ranges.
    pub ranges: Ranges<'a>,
}

impl ScatterRequest<'_> {
    /// How many ranges.
    pub(crate) const fn count(&self) -> u64 {
        match self.ranges {
            Ranges::List(list) => list.len() as u64,
            Ranges::Strided { count, .. } => count,
        }
    }

    /// Appends the ranges as transfers; false when an address is beyond 2^64.
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

/// How to treat a batch.
#[derive(Clone, Debug)]
pub struct SubmitOptions {
    /// How long it may take; `None` takes the engine's.
    pub deadline: Option<Duration>,
    /// When it should be done, from now on. Batches with such a time go before others of their class and tenant, the
    /// earliest first. Nothing ends when it passes.
    pub due: Option<Duration>,
    /// Its class; `None` takes the intent's.
    pub priority: Option<Priority>,
    /// What it is for.
    pub intent: Intent,
    /// For whom: tenants share a class by weight.
    pub tenant: u32,
    /// The tenant's share, relative to others'; at least 1.
    pub weight: u16,
    /// Whether a thread of the engine moves it on from the start. Without, whoever waits for the batch does, and the
    /// engine's thread only when nobody has for about a millisecond. Asking for [`super::Batch::completion_fd`] or
    /// awaiting [`super::Batch::completed`] has the same effect.
    pub background: bool,
    /// What the owner of the first request's segment is told when all went well: soon after the batch is done, by a
    /// thread of the engine. Nothing is sent when any request failed.
    pub notice: Option<Notice>,
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
            notice: None,
        }
    }
}

impl SubmitOptions {
    /// What the initiator is told.
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

/// Refuses reads whose memory overlaps: the outcome would depend on the network.
pub(crate) fn check_overlap(requests: &[TransferRequest]) -> Result<(), Error> {
    let reads = || requests.iter().enumerate().filter(|(_, one)| one.opcode == Opcode::Read && one.length > 0);
    let mut end = 0;
    // Most batches come in order of their addresses.
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
            return Err(Error::Argument(format!("requests {first} and {second} read into overlapping memory")));
        }
    }
    Ok(())
}
