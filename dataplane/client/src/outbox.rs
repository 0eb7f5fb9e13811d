//! Outbox: outputs that the host has not polled yet, in order, with the bytes of the frames among them.
//!
//! Bodies and lists of payload ranges are appended to buffers that are cleared when all outputs have been polled, so
//! that no frame allocates.

use core::ops::Range;
use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::BatchId;

use crate::types::{LaneId, Local, Output};

/// Outputs that the host has not polled yet.
#[derive(Default)]
pub struct Outbox {
    outputs: VecDeque<Output>,
    /// Completed tasks that are not reported yet, if tasks are reported.
    finished: VecDeque<(BatchId, u32)>,
    bytes: Vec<u8>,
    locals: Vec<Local>,
    /// Scratch buffer for names on their way into a body.
    names: Vec<u8>,
    /// Scratch list of the ranges of one gathered payload.
    pieces: Vec<Local>,
}

impl Outbox {
    pub(crate) fn push(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Returns the next output.
    pub(crate) fn pop(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns true if no output is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    /// Clears the buffers if the host has polled all outputs.
    pub(crate) fn recycle(&mut self) {
        if self.outputs.is_empty() {
            self.bytes.clear();
            self.locals.clear();
        }
    }

    /// Returns the position at which the next body begins.
    pub(crate) const fn mark(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the range of the body written since a mark.
    pub(crate) const fn since(&self, mark: usize) -> Range<usize> {
        mark..self.bytes.len()
    }

    /// Returns the buffer to which the body of the next frame is appended.
    pub(crate) const fn writer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Appends a body with `write` and returns its range.
    #[inline]
    pub(crate) fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Range<usize> {
        let mark = self.mark();
        write(&mut self.bytes);
        self.since(mark)
    }

    /// Sends a frame with this body of `items` items, and a payload from these ranges.
    pub(crate) fn send(&mut self, lane: LaneId, header: Header, body: Range<usize>, items: usize, payload: &[Local]) {
        let start = self.locals.len();
        self.locals.extend_from_slice(payload);
        let payload = start..self.locals.len();
        let header = header.with_body(&self.bytes[body.clone()], items);
        self.outputs.push_back(Output::Send { lane, header, body, payload });
    }

    /// Returns the body of an [`Output::Send`]; valid until [`poll_output`](crate::Client::poll_output) has returned
    /// `None`.
    #[must_use]
    pub fn body(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }

    /// Returns the memory ranges of an [`Output::Send`]'s payload, in order; valid as long as its body.
    #[must_use]
    pub fn payload(&self, range: Range<usize>) -> &[Local] {
        &self.locals[range]
    }

    /// Returns an empty scratch buffer for names, to be returned with [`Self::give_names`].
    pub(crate) fn take_names(&mut self) -> Vec<u8> {
        let mut names = core::mem::take(&mut self.names);
        names.clear();
        names
    }

    pub(crate) fn give_names(&mut self, names: Vec<u8>) {
        self.names = names;
    }

    /// Returns an empty scratch list of ranges, to be returned with [`Self::give_pieces`].
    pub(crate) fn take_pieces(&mut self) -> Vec<Local> {
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        pieces
    }

    /// Takes the scratch list of ranges back, and returns a view of it.
    pub(crate) fn give_pieces(&mut self, pieces: Vec<Local>) -> &[Local] {
        self.pieces = pieces;
        &self.pieces
    }

    /// Enqueues the report of a completed task.
    pub(crate) fn report(&mut self, batch: BatchId, task: u32) {
        self.finished.push_back((batch, task));
    }

    /// Dequeues the report of a completed task.
    pub(crate) fn take_report(&mut self) -> Option<(BatchId, u32)> {
        self.finished.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::RequestId;
    use kvplane_proto::message::{Kind, Operation};

    use super::*;

    const LANE: LaneId = LaneId { index: 1, generation: 2 };

    #[test]
    fn bodies_and_payloads_stay_valid_until_all_outputs_are_polled() {
        let mut outbox = Outbox::default();
        let header = |operation| Header::request(Kind::Request(operation), RequestId::default());
        let local = Local { buffer: 3, offset: 4, bytes: 5 };
        let first = outbox.append(|body| body.extend_from_slice(&[7; 8]));
        outbox.send(LANE, header(Operation::Release), first, 1, &[]);
        let mark = outbox.mark();
        outbox.writer().extend_from_slice(&[9; 16]);
        let second = outbox.since(mark);
        outbox.send(LANE, header(Operation::Write), second, 1, &[local]);
        for (bytes, locals) in [(&[7; 8][..], &[][..]), (&[9; 16], &[local])] {
            let Some(Output::Send { header, body, payload, .. }) = outbox.pop() else { panic!("a frame") };
            assert_eq!((outbox.body(body), outbox.payload(payload)), (bytes, locals));
            assert_eq!(header.check_body(bytes), Ok(()));
            outbox.recycle();
        }
        assert!(outbox.is_empty() && outbox.mark() == 0, "the buffers are empty again");
    }
}
