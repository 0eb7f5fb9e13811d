//! Copies by RDMA devices between the caller's memory and segments of peers.

use kvplane_client::{Client, DeviceCopy, LaneId, RowCopy, SliceId};
use kvplane_proto::frame::Header;
use kvplane_proto::message::{GetItem, Kind, Operation, RangeItem, ReadItem, decode_items};
use kvplane_proto::{Limits, RequestId, Status};
use kvplane_transport::{ConnectionId, CopyCompletions, Rdma, RdmaCopy};

use super::buffers::Buffers;
use crate::host::reactor::Reactor;
use crate::host::reactor::links::{Link, Role};
use crate::host::reports::HostCounters;

/// Copies that are passed from the client to a device at once: few enough to stay in the cache.
const ROW: usize = 64;

/// Copies on their way to a device and back.
pub(crate) struct DeviceCopies {
    /// Scratch list of completed copies.
    completions: CopyCompletions,
    /// Scratch list of copies on their way from the client to a device.
    row: Box<[RowCopy]>,
}

impl Default for DeviceCopies {
    fn default() -> Self {
        Self { completions: CopyCompletions::default(), row: vec![RowCopy::default(); ROW].into() }
    }
}

impl DeviceCopies {
    /// Submits a copy to the device, and those that the client has for the same lane right behind it. They go in rows,
    /// first all of a row from the client, then all of it to the device, as doing both for each takes more values than
    /// there are registers.
    // Not inlined: the other kinds of outputs need registers that the copies use.
    #[inline(never)]
    pub(crate) fn start(
        &mut self,
        client: &mut Client,
        driver: &mut Rdma,
        buffers: &Buffers,
        id: ConnectionId,
        lane: LaneId,
        first: DeviceCopy,
    ) {
        let row = &mut self.row;
        let mut next = Some(first);
        while let Some(first) = next {
            let head = on_device(buffers, &first);
            let Some(mut copies) = client.copies(lane) else {
                driver.copy_many(id, [head]);
                return;
            };
            let alike = copies.alike(&first, row);
            driver.copy_all(id, head, row[..alike].iter().map(|copy| of_row(&head, copy)));
            next = copies.next();
        }
    }

    /// Reports copies that the devices have completed, or have failed, to the client. Returns true if there were any.
    pub(crate) fn take(&mut self, client: &mut Client, reactor: &mut Reactor, counters: &mut HostCounters) -> bool {
        reactor.connections.rdma.take_copied(&mut self.completions);
        let progress = !self.completions.is_empty();
        for (connection, outcome, tokens) in self.completions.runs() {
            let now_ns = reactor.arrival_ns();
            let Role::Lane(lane, _) = reactor.connections.role(Link::Rdma(connection)) else { continue };
            let slices = tokens.iter().map(|&token| slice_of(token));
            match outcome {
                Ok(()) => {
                    counters.rdma_copies += tokens.len() as u64;
                    client.all_copied(lane, slices, now_ns);
                }
                // The end of the failed connection reports all copies that were not made.
                Err(Status::Unreachable) => {}
                Err(status) => slices.for_each(|slice| {
                    client.copied(lane, slice, Err(status), now_ns);
                }),
            }
        }
        self.completions.clear();
        progress
    }
}

/// Offers the device the memory that the answers to a request go to.
pub(crate) fn expect_answers(
    driver: &mut Rdma,
    id: ConnectionId,
    client: &Client,
    buffers: &Buffers,
    header: &Header,
    body: &[u8],
) {
    let mut expect = |request: RequestId| {
        if let Some(local) = client.answer_memory(request) {
            driver.expect_answer(id, request, buffers.pieces(local));
        }
    };
    match header.kind {
        Kind::Request(Operation::Get) => {
            decode_items::<GetItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        Kind::Request(Operation::GetRange) => {
            decode_items::<RangeItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        Kind::Request(Operation::Read) => {
            decode_items::<ReadItem>(body, header.items).into_iter().flatten().for_each(|item| expect(item.request));
        }
        _ => {}
    }
}

/// Bits of a copy's token for the index of its slice; its generation is in the bits above them.
const INDEX_BITS: u32 = 28;
const _: () = assert!(Limits::OPEN_SLICES <= 1 << (INDEX_BITS - 1), "a batch may add slices beyond the limit");

fn token_of(slice: SliceId) -> u64 {
    u64::from(slice.generation) << INDEX_BITS | u64::from(slice.index)
}

const fn slice_of(token: u64) -> SliceId {
    SliceId { index: token as u32 & ((1 << INDEX_BITS) - 1), generation: (token >> INDEX_BITS) as u32 }
}

/// Converts a copy for the driver.
///
/// # Panics
/// If the buffer was removed while a batch used it.
#[inline]
fn on_device<'a>(buffers: &'a Buffers, copy: &DeviceCopy) -> RdmaCopy<'a> {
    let DeviceCopy { slice, segment, offset, local, write } = *copy;
    let memory = buffers.memory(local.buffer);
    let memory = memory.expect("memory stays registered while a batch uses it");
    let (at, bytes) = (local.offset as usize, local.bytes as usize);
    RdmaCopy { token: token_of(slice), segment, offset, memory, at, bytes, write }
}

/// Converts a copy that differs from `head` in its row entry only.
#[inline]
fn of_row<'a>(head: &RdmaCopy<'a>, copy: &RowCopy) -> RdmaCopy<'a> {
    RdmaCopy {
        token: token_of(copy.slice),
        offset: copy.offset,
        at: copy.at as usize,
        bytes: copy.bytes as usize,
        ..*head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_slice() {
        for slice in
            [SliceId { index: 0, generation: 1 }, SliceId { index: (1 << INDEX_BITS) - 1, generation: u32::MAX }]
        {
            assert_eq!(slice_of(token_of(slice)), slice);
        }
    }
}
