//! Intake of batches: validates the requests of a batch as a whole, and groups them into stretches that are cut into
//! slices in the same way.

use core::ops::Range;

use kvplane_proto::limits::Limits;

use crate::network::Network;
use crate::sched::LEAST_BYTES;
use crate::tables::ExistenceBatch;
use crate::types::{Local, PeerId, Request, SegmentTarget, SubmitError};

/// Consecutive requests that become slices in the same way.
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    from: u32,
    until: u32,
    /// True if each request is one slice; else the requests are adjacent, or a single one, and are cut together.
    pub(crate) whole: bool,
}

impl Stretch {
    /// Returns the positions of the requests in the batch.
    pub(crate) const fn tasks(self) -> Range<usize> {
        self.from as usize..self.until as usize
    }
}

/// Placeholders that equal no peer id and no start of a range.
const NOBODY: PeerId = PeerId(u32::MAX);
const NOWHERE: (u64, u64) = (u64::MAX, u64::MAX);

/// Builder of stretches.
struct Grouping<'a> {
    done: &'a mut Vec<Stretch>,
    last: Stretch,
}

impl Grouping<'_> {
    /// Adds the next request: `touches` if it continues the previous one, `whole` if it is one slice.
    #[inline]
    fn add(&mut self, index: u32, touches: bool, whole: bool) {
        let last = &mut self.last;
        if !touches && whole && last.whole {
            last.until = index + 1;
        } else {
            self.change(index, touches, whole);
        }
    }

    fn change(&mut self, index: u32, touches: bool, whole: bool) {
        let last = &mut self.last;
        if touches && last.whole {
            // The previous request moves to the new stretch.
            last.until -= 1;
            let from = last.until;
            self.begin(Stretch { from, until: index + 1, whole: false });
        } else if touches {
            last.until = index + 1;
        } else {
            self.begin(Stretch { from: index, until: index + 1, whole });
        }
    }

    fn begin(&mut self, next: Stretch) {
        let last = core::mem::replace(&mut self.last, next);
        if !last.tasks().is_empty() {
            self.done.push(last);
        }
    }
}

/// Validates batches and groups their requests.
pub(crate) struct Intake {
    /// Stretches of the batch that is being submitted.
    stretches: Vec<Stretch>,
    /// Existence queries of the next batch.
    pub(crate) existence: ExistenceBatch,
}

impl Intake {
    pub(crate) const fn new() -> Self {
        Self { stretches: Vec::new(), existence: ExistenceBatch::new() }
    }

    /// Returns the stretches of the last batch.
    pub(crate) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Validates the requests of a batch and groups them. `puts` is the number of entries that puts may name, `open`
    /// the number of slices in flight.
    #[inline]
    pub(crate) fn take_in(
        &mut self,
        requests: &[Request],
        puts: usize,
        open: usize,
        network: &Network,
    ) -> Result<(), SubmitError> {
        if requests.is_empty() {
            return Err(SubmitError::Empty);
        }
        if requests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: requests.len(), limit: Limits::BATCH_REQUESTS });
        }
        self.stretches.clear();
        let mut grouping = Grouping { done: &mut self.stretches, last: Stretch { from: 0, until: 0, whole: true } };
        // Limits of the previous request's peer, and the end of its range: in our memory, and in the peer's.
        let (mut known, mut most_bytes, mut ends) = (NOBODY, 0, NOWHERE);
        let (mut slices, mut written) = (0, 0);
        for (index, request) in requests.iter().enumerate() {
            let (mut touches, mut whole) = (false, true);
            match request {
                Request::Read(target, local) | Request::Write(target, local) => {
                    if known != target.peer {
                        check_peer(network, index, target.peer)?;
                        (known, most_bytes) = (target.peer, whole_bytes(network, target.peer));
                    }
                    check_local(index, local, local.offset.max(target.offset))?;
                    if local.bytes > most_bytes {
                        let cuts = network.cuts(target.offset, local.bytes, target.peer).slices() as usize;
                        slices += cuts - 1;
                        whole = cuts == 1;
                    }
                    let begins = (local.offset, target.offset);
                    touches = begins == ends && network.host.config.merge && continues(&requests[index - 1], request);
                    ends = (local.offset + local.bytes, target.offset + local.bytes);
                    written += usize::from(matches!(request, Request::Read(..)));
                }
                other => {
                    ends = NOWHERE;
                    written += usize::from(check_object(network, index, other, puts)?);
                }
            }
            slices += 1;
            grouping.add(index as u32, touches, whole);
        }
        let Grouping { done, last } = grouping;
        done.push(last);
        if open + slices > Limits::OPEN_SLICES {
            return Err(SubmitError::Busy { open, slices, limit: Limits::OPEN_SLICES });
        }
        if written < 2 { Ok(()) } else { check_overlap(requests) }
    }
}

/// Validates the requests of a batch as [`Intake::take_in`] does, for a caller that submits them in several batches:
/// the slices in flight do not count.
pub(crate) fn check(requests: &[Request], puts: usize, network: &Network) -> Result<(), SubmitError> {
    if requests.is_empty() {
        return Err(SubmitError::Empty);
    }
    if requests.len() > Limits::BATCH_REQUESTS {
        return Err(SubmitError::TooMany { requests: requests.len(), limit: Limits::BATCH_REQUESTS });
    }
    for (index, request) in requests.iter().enumerate() {
        if let Request::Read(target, local) | Request::Write(target, local) = request {
            check_peer(network, index, target.peer)?;
            check_local(index, local, local.offset.max(target.offset))?;
        } else {
            check_object(network, index, request, puts)?;
        }
    }
    check_overlap(requests)
}

/// Validates a request that names no range of a peer's memory. Returns true if it writes to the caller's memory.
fn check_object(network: &Network, index: usize, request: &Request, puts: usize) -> Result<bool, SubmitError> {
    match request {
        Request::Get(_, local) | Request::GetHead(_, local) | Request::GetCopy(_, local, _) => {
            check_local(index, local, local.offset)?;
            return Ok(true);
        }
        Request::Put(_, local) => check_local(index, local, local.offset)?,
        Request::PutAs(_, local, number) | Request::PutCopy(_, local, number, _) => {
            if *number as usize >= puts {
                return Err(SubmitError::UnknownPut { index });
            }
            check_local(index, local, local.offset)?;
        }
        Request::GetRange(_, offset, local) | Request::PeekRange(_, offset, local) => {
            check_local(index, local, local.offset.max(*offset))?;
            return Ok(true);
        }
        Request::Fill(_, _, _, offset, local) => check_local(index, local, local.offset.max(*offset))?,
        Request::Begin(_, bytes, _, number) => {
            if *number as usize >= puts {
                return Err(SubmitError::UnknownPut { index });
            }
            check_local(index, &Local { buffer: 0, offset: 0, bytes: *bytes }, 0)?;
        }
        Request::OpenSegment(peer) => check_peer(network, index, *peer)?,
        _ => {}
    }
    Ok(false)
}
fn check_peer(network: &Network, index: usize, peer: PeerId) -> Result<(), SubmitError> {
    let known = network.peers.get(peer.0).is_some_and(|peer| peer.pinned);
    if known { Ok(()) } else { Err(SubmitError::UnknownPeer { index }) }
}

/// Returns the most bytes of a range that is one slice in any case; for longer ones the cuts have to be computed.
fn whole_bytes(network: &Network, peer: PeerId) -> u64 {
    let slice_bytes = network.host.config.most_slice_bytes();
    let least_bytes = LEAST_BYTES.min(slice_bytes);
    // Slices are shortened to the alignment by no more than is merged into the last slice as a rest, or are too short
    // to be aligned.
    let align_bytes = network.host.config.align_bytes;
    let whole = align_bytes <= least_bytes / 5 || slice_bytes / 2 < align_bytes;
    match (whole, network.peers[peer.0].most_rails()) {
        (false, _) => 0,
        (true, 0 | 1) => slice_bytes,
        (true, _) => least_bytes,
    }
}

#[inline]
fn check_local(index: usize, local: &Local, starts: u64) -> Result<(), SubmitError> {
    // A put of 0 bytes is rejected here, as it would be by the shard.
    if local.bytes == 0 {
        return Err(SubmitError::ZeroBytes { index });
    }
    if local.bytes > Limits::PAYLOAD_BYTES {
        return Err(SubmitError::TooLarge { index, bytes: local.bytes, limit: Limits::PAYLOAD_BYTES });
    }
    if starts.checked_add(local.bytes).is_none() {
        return Err(SubmitError::OutOfRange { index });
    }
    Ok(())
}

/// Returns true if a read or write that begins at the end of the previous request continues it.
fn continues(before: &Request, request: &Request) -> bool {
    let ((Request::Read(target, local), Request::Read(next, to))
    | (Request::Write(target, local), Request::Write(next, to))) = (before, request)
    else {
        return false;
    };
    let begins = target.offset.checked_add(local.bytes) == Some(next.offset);
    begins && local.buffer == to.buffer && SegmentTarget { offset: next.offset, ..*target } == *next
}

/// Rejects a batch in which two requests write to the same memory: the outcome would depend on the network. Ranges
/// whose end is not a 64-bit number reach to the last byte.
///
/// # Errors
/// [`SubmitError::Overlap`] with the positions of two such requests.
fn check_overlap(requests: &[Request]) -> Result<(), SubmitError> {
    let writes = |(index, request): (usize, &Request)| match request {
        Request::Get(_, local)
        | Request::GetHead(_, local)
        | Request::GetCopy(_, local, _)
        | Request::GetRange(_, _, local)
        | Request::PeekRange(_, _, local)
        | Request::Read(_, local) => Some((local.buffer, local.offset, local.bytes, index)),
        _ => None,
    };
    let ranges = || requests.iter().enumerate().filter_map(writes);
    // Most batches are in order, ascending or descending.
    let after = |one: &WrittenRange, other: &WrittenRange| one.0 == other.0 && one.1.saturating_add(one.2) <= other.1;
    if in_order(ranges(), after) || in_order(ranges(), |one, other| after(other, one)) {
        return Ok(());
    }
    let mut ranges: Vec<WrittenRange> = ranges().collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((buffer, offset, bytes, first), (next_buffer, next_offset, _, second)) = (pair[0], pair[1]);
        if buffer == next_buffer && offset.saturating_add(bytes) > next_offset {
            return Err(SubmitError::Overlap { first: first.min(second), second: first.max(second) });
        }
    }
    Ok(())
}

/// Memory that a request writes: buffer, offset, bytes, and the position of the request.
type WrittenRange = (u32, u64, u64, usize);

fn in_order(
    mut ranges: impl Iterator<Item = WrittenRange>,
    before: impl Fn(&WrittenRange, &WrittenRange) -> bool,
) -> bool {
    let Some(mut last) = ranges.next() else { return true };
    ranges.all(|next| {
        let fine = before(&last, &next);
        last = next;
        fine
    })
}
